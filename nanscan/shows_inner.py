"""What of the inner optimizer shows through the guard: its live groups, state and defaults, and its state dict."""

from __future__ import annotations

from typing import Any

from nanscan.steps import GuardedSteps

__all__ = ["ShowsInner"]


class ShowsInner(GuardedSteps):
    """Reads and writes go to the inner optimizer, whose `load_state_dict` binds new lists and dicts."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's live parameter groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's live state."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's defaults."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict, unchanged: it loads with or without nanscan."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state dict."""
        self.optimizer.load_state_dict(state_dict)
