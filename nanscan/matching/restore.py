"""Puts copies of a saved state into an optimizer: through its own `load_state_dict`, but without that one's casts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nanscan.errors import CheckpointError
from nanscan.matching.dtypes import followed
from nanscan.state_copy import copy_state

__all__ = ["put_state"]


def put_state(
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, Any],
    groups: Sequence[dict[str, Any]],
    pairs: Mapping[int, Any],
    former: Mapping[int, torch.dtype],
) -> None:
    """Load `saved` into `optimizer`; on any error it is as it was.

    Args:
        optimizer: the real one, not guarded.
        saved: the saved state dict. Entries of its "state" that are no parameter's are taken as they are.
        groups: its groups as they are to be, `params` being positions.
        pairs: position -> id. A parameter without one keeps its present state.
        former: position -> dtype of the parameter when it was saved, as far as that is known.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    on_device = {place: group for group in groups for place in group["params"] if _step_on_device(group)}
    exact: dict[int, Any] = {}
    for place, param in enumerate(params):
        if place not in pairs:
            if param in optimizer.state:
                exact[place] = dict(optimizer.state[param])
        elif pairs[place] in saved["state"]:
            copied = _own_copy(saved["state"][pairs[place]], param, place in on_device)
            exact[place] = followed(copied, param, former.get(place))
    ids = {key for group in saved["param_groups"] for key in group["params"]}
    others = {key: copy_state(value) for key, value in saved["state"].items() if key not in ids}
    torchs = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    handed = {place: _castable(state) if torchs else state for place, state in exact.items()}
    before = _Before(optimizer)
    try:
        optimizer.load_state_dict({"state": {**handed, **others}, "param_groups": list(groups)})
        for place, state in exact.items():
            _undo_casts(optimizer.state, params[place], state, torchs)
    except (KeyError, IndexError, TypeError, AttributeError) as error:  # what it takes for granted is not there
        before.restore()
        raise CheckpointError(
            f"{type(optimizer).__name__} can't take this state: {type(error).__name__}: {error}. Is it another kind of "
            "optimizer's? Nothing was loaded"
        ) from error
    except BaseException:
        before.restore()
        raise


def _step_on_device(group: Mapping[str, Any]) -> bool:
    return bool(group.get("capturable") or group.get("fused"))


def _own_copy(state: Any, param: Tensor, step_on_device: bool) -> Any:
    """A copy on the parameter's device, with the dtype it has; `step` as torch's optimizers keep it."""
    copied = copy_state(state, device=param.device)
    if isinstance(copied, dict) and isinstance(copied.get("step"), Tensor):
        step = copied["step"]
        copied["step"] = step.to(param.device, torch.float32) if step_on_device else step.cpu()
    return copied


def _castable(state: Any) -> Any:
    """Without the entries that torch's cast can't rebuild, such as strings and named tuples; they are put in after."""
    if not isinstance(state, dict):
        return state
    kept = (Tensor, bool, int, float, complex, type(None))
    return {key: value for key, value in state.items() if isinstance(value, kept)}


def _undo_casts(states: Any, param: Tensor, exact: Any, torchs: bool) -> None:
    """Put the saved values in place of those that torch cast to the parameter's dtype."""
    if not isinstance(exact, dict):
        return
    loaded = states.setdefault(param, {})
    for key, value in exact.items():
        if key == "step":
            continue
        present = loaded.get(key)
        cast = isinstance(value, Tensor) and isinstance(present, Tensor) and present.dtype == param.dtype != value.dtype
        if cast or (torchs and not isinstance(value, Tensor)):
            loaded[key] = value


class _Before:
    """An optimizer's state and groups by reference: a load makes new ones and leaves the tensors alone."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state, self._groups = optimizer.state, optimizer.param_groups
        self._entries = {key: dict(v) if isinstance(v, dict) else v for key, v in self._state.items()}
        self._options = [dict(group) for group in self._groups]

    def restore(self) -> None:
        """Put everything back."""
        self._state.clear()
        self._state.update(self._entries)
        for group, options in zip(self._groups, self._options, strict=True):
            group.clear()
            group.update(options)
        self._optimizer.state, self._optimizer.param_groups = self._state, self._groups
