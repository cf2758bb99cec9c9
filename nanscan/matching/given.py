"""What a caller hands over as a state: the right dict, or a whole checkpoint whose right entry is to be named."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nanscan.errors import CheckpointError
from nanscan.matching.keys import bare

__all__ = ["checked_model_state", "checked_optimizer_state"]

_DEPTH = 3


def checked_model_state(state: Any, own: Mapping[str, Any]) -> Mapping[str, Any]:
    """`state` if it can be a model's.

    Args:
        state: what the caller gave.
        own: the model's own state, to tell which entry of a whole checkpoint is meant.

    Raises:
        TypeError: it is no dict.
        CheckpointError: it is one of something else; the message says which entry of it to give, if there is one.
    """
    _must_be_a_dict(state, "model.state_dict()")
    names = {bare(key) for key in own}
    if _fits(state, names) or (not state and not own):
        return _with_text_keys(state)
    inner = sorted(_entries(state, _holds_tensors), key=lambda item: -_overlap(item[1], names))
    if inner:
        raise CheckpointError(_whole("a model's state", state, inner[0][0], "load_model_state(model, {})"))
    if not _holds_tensors(state) and own:
        raise CheckpointError(
            f"this is no model's state, a dict of name -> tensor: it holds no tensor, only {_keys(state)}"
        )
    return _with_text_keys(state)


def checked_optimizer_state(state: Any) -> Mapping[str, Any]:
    """`state` if it is an optimizer's; raises as `checked_model_state`."""
    _must_be_a_dict(state, "optimizer.state_dict()")
    if _is_optimizer_state(state):
        return state  # type: ignore[no-any-return]
    inner = list(_entries(state, _is_optimizer_state))
    if inner:
        raise CheckpointError(_whole("an optimizer's state", state, inner[0][0], "load_optimizer_state(optimizer, {})"))
    raise CheckpointError(
        "this is no optimizer's state, a dict with 'state' and 'param_groups' as optimizer.state_dict() gives: "
        f"it holds {_keys(state)}"
    )


def _must_be_a_dict(state: Any, made_by: str) -> None:
    if isinstance(state, Mapping):
        return
    if isinstance(state, (str, os.PathLike)):
        raise TypeError(f"state must be a dict, got the path {str(state)!r}: load it first, with nanscan.load(path)")
    if isinstance(state, (nn.Module, torch.optim.Optimizer)):
        raise TypeError(f"state must be a dict, got a {type(state).__name__}: give {made_by} of it")
    raise TypeError(f"state must be a dict as {made_by} gives, got {type(state).__name__}")


def _with_text_keys(state: Mapping[Any, Any]) -> Mapping[str, Any]:
    other = next((key for key in state if not isinstance(key, str)), None)
    if other is not None:
        raise CheckpointError(f"the keys of a model's state are names, this one has {other!r} ({type(other).__name__})")
    return state


def _fits(state: Mapping[Any, Any], names: set[str]) -> bool:
    """True if a name of the model's is there, with a tensor."""
    return any(isinstance(v, Tensor) and isinstance(key, str) and bare(key) in names for key, v in state.items())


def _holds_tensors(state: Mapping[Any, Any]) -> bool:
    return any(isinstance(value, Tensor) and isinstance(key, str) for key, value in state.items())


def _is_optimizer_state(state: Mapping[Any, Any]) -> bool:
    return isinstance(state.get("state"), Mapping) and isinstance(state.get("param_groups"), (list, tuple))


def _overlap(state: Mapping[Any, Any], names: set[str]) -> int:
    return sum(bare(str(key)) in names for key in state)


def _entries(
    state: Mapping[Any, Any], wanted: Callable[[Mapping[Any, Any]], bool], path: str = "state", depth: int = _DEPTH
) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """(path as a person types it, dict) of the dicts within `state` that are `wanted`, outer ones first."""
    inner = [(f"{path}[{_text(key)}]", value) for key, value in state.items() if isinstance(value, Mapping)]
    for place, value in inner:
        if wanted(value):
            yield place, value
    for place, value in inner:
        if depth > 1 and not _is_optimizer_state(value):
            yield from _entries(value, wanted, place, depth - 1)


def _text(key: Any) -> str:
    return f'"{key}"' if isinstance(key, str) else repr(key)


def _keys(state: Mapping[Any, Any], limit: int = 8) -> str:
    keys = [repr(key) for key in state]
    if not keys:
        return "nothing"
    return ", ".join(keys[:limit]) + (f" and {len(keys) - limit} more" if len(keys) > limit else "")


def _whole(wanted: str, state: Mapping[Any, Any], entry: str, call: str) -> str:
    return f"this is no {wanted.split(' ', 1)[1]} but a dict of {_keys(state)}: use {entry}, as in {call.format(entry)}"
