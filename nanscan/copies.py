"""Copies and pickles of a guarded optimizer: what goes along, and how a copy is put together again."""

from __future__ import annotations

import copy
from typing import Any

from nanscan import messages
from nanscan.clipping.state import guard_state
from nanscan.inner_attributes import carried_attributes, copied_attributes, give_attributes
from nanscan.log import Log
from nanscan.microbatches import Microbatches
from nanscan.names import Names

__all__ = ["Copies"]


class Copies(Microbatches):
    """The part of a guarded optimizer that pickles and copies it."""

    def _listen(self, log: Log | None) -> None:
        raise NotImplementedError

    def _agree_over(self, process_group: Any) -> None:
        raise NotImplementedError

    def carried_attributes(self) -> dict[str, Any]:
        """What a copy takes along of the inner optimizer that torch's own pickling would lose."""
        return carried_attributes(self.optimizer)

    def __getstate__(self) -> dict[str, Any]:
        self._settle(wait=True)
        if self._agreement is not None:
            messages.warn(messages.group_left_out(), UserWarning)
        record = self._record
        return {
            "optimizer": self.optimizer,
            "attributes": self.carried_attributes(),
            "policy": self.policy,
            "record": record,
            "names": self._names.known(self.optimizer.param_groups),
            "log": getattr(record.listener, "path", None) or record.listener,
            "limits": guard_state(self),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "policy" not in state:  # torch's own methods hand over a plain optimizer's state
            self.optimizer.__setstate__(state)
            return
        give_attributes(state["optimizer"], state.get("attributes", {}))
        names = Names(state.get("model"), state["names"])
        super().__init__(state["optimizer"], names, state["record"], state["policy"])
        history = state["record"].history
        self._last = history[-1] if len(history) else None
        if self._limits is not None and "limits" in state:
            self._limits.load(state["limits"])
        self._agree_over(False)
        self._listen(state["log"])

    def __deepcopy__(self, memo: dict[int, Any]) -> Copies:
        new = memo[id(self)] = type(self).__new__(type(self))
        state = self.__getstate__()
        shared = {"policy", "log"}  # they never change; the functions in them may belong to whatever there is
        attributes = state.pop("attributes")
        state = {name: value if name in shared else copy.deepcopy(value, memo) for name, value in state.items()}
        state["attributes"] = copied_attributes(attributes, memo)
        state["model"] = memo.get(id(self._names.model))  # None unless the model is copied in the same call
        new.__setstate__(state)
        return new
