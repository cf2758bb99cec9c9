"""What goes into a checkpoint: the state of each part of a training run, gathered in the training thread."""

from __future__ import annotations

import functools
import types
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from nanscan._version import __version__
from nanscan.errors import CheckpointError
from nanscan.guard import GuardedOptimizer
from nanscan.matching import optimizer_names
from nanscan.matching.compare import plain_names
from nanscan.names import clean
from nanscan.rng import rng_state

__all__ = ["FORMAT", "PARTS", "VERSION", "contents", "generators_of", "model_state", "unstored"]

FORMAT = "nanscan-checkpoint"
VERSION = 1
PARTS = ("model", "optimizer", "scheduler", "scaler", "loader")
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


def contents(step: int, epoch: int | None, parts: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """The dict that is saved; it still shares tensors with the parts.

    Args:
        step: of the training run.
        epoch: likewise.
        parts: name in `PARTS` -> the object, None where there is none.
        extra: the user's own entries; objects in it that have a `state_dict()` are stored by that.
    """
    found: dict[str, Any] = {"format": FORMAT, "version": VERSION, "step": step, "epoch": epoch}
    for name in PARTS:
        part = parts.get(name)
        if part is None or not hasattr(part, "state_dict"):
            continue
        found[name] = model_state(part) if name == "model" else _with_plain_numbers(name, part.state_dict())
    optimizer = parts.get("optimizer")
    if optimizer is not None:
        found["optimizer_names"] = optimizer_names(optimizer, parts.get("model"))
    if isinstance(optimizer, GuardedOptimizer):
        found["guard"] = optimizer.guard_state_dict()
    found["extra"] = {key: _storable(value) for key, value in extra.items()}
    found["nanscan"] = __version__
    found["rng"] = rng_state()  # last: a loader that has not begun yet draws its seed when it is asked for its state
    if "loader" in found and (own := generators_of(parts["loader"])):
        found["rng"]["loader"] = [generator.get_state() for generator in own]
    return found


def _with_plain_numbers(name: str, state: Any) -> Any:
    """The state with Python's numbers for NumPy's: a schedule in NumPy puts these into learning rates."""
    if name == "optimizer" and isinstance(state, Mapping) and "param_groups" in state:
        return {**state, "param_groups": _storable(state["param_groups"])}
    return _storable(state) if name in ("scheduler", "scaler") else state


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a loader was given for its shuffling; its own state says nothing of later epochs.

    >>> generator = torch.Generator()
    >>> loader = torch.utils.data.DataLoader([1, 2], shuffle=True, generator=generator)
    >>> generators_of(loader) == [generator], generators_of(None)
    (True, [])
    """
    held = [getattr(owner, "generator", None) for owner in (loader, getattr(loader, "sampler", None))]
    return list({id(one): one for one in held if isinstance(one, torch.Generator)}.values())


def model_state(model: nn.Module) -> dict[str, Any]:
    """`model.state_dict()` without the prefixes of DataParallel, DDP and torch.compile.

    Raises:
        CheckpointError: a tensor has no values.

    >>> list(model_state(torch.nn.DataParallel(torch.nn.Linear(1, 1))))
    ['weight', 'bias']
    """
    state = model.state_dict()
    _refuse_without_values(state)
    plain = plain_names(model, list(state))
    names = [clean(plain.get(name, name)) for name in state]
    if len(set(names)) != len(names):
        return state
    renamed = OrderedDict(zip(names, state.values(), strict=True))
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        plain = plain_names(model, list(metadata))
        renamed._metadata = {clean(plain.get(name, name)): dict(item) for name, item in metadata.items()}  # type: ignore[attr-defined]
    return renamed


def _refuse_without_values(state: Mapping[str, Any]) -> None:
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if nn.parameter.is_lazy(tensor):
            raise CheckpointError(
                f"model['{name}'] has no values yet (a lazy module): give the model one batch before it is saved"
            )
        if tensor.is_meta:
            raise CheckpointError(
                f"model['{name}'] is on the meta device and has no values (offloaded, or made under "
                "torch.device('meta')): a checkpoint of it would restore nothing. Save where its values are"
            )


def unstored(parts: Mapping[str, Any]) -> list[str]:
    """What of the parts can't be stored and is to be rebuilt by the program, a sentence each."""
    found = []
    loader = parts.get("loader")
    if loader is not None and not hasattr(loader, "state_dict"):
        found.append(
            f"the position of the loader is not stored: {type(loader).__name__} has no state_dict(), as "
            "torchdata.stateful_dataloader.StatefulDataLoader has. A resumed run begins its epoch anew"
        )
    for path in _functions(parts.get("scheduler"), "scheduler"):
        found.append(
            f"{path} is a function and is not stored: build the scheduler with the same function before restore()"
        )
    return found


def _functions(scheduler: Any, path: str) -> list[str]:
    """The functions that a scheduler leaves out of its state, by path."""
    found = []
    for index, function in enumerate(getattr(scheduler, "lr_lambdas", [])):
        if isinstance(function, _FUNCTIONS):  # of other callables, torch stores the attributes
            found.append(f"{path}.lr_lambdas[{index}]")
    if getattr(scheduler, "_scale_fn_custom", None) is not None:
        found.append(f"{path}.scale_fn")
    for index, inner in enumerate(getattr(scheduler, "_schedulers", [])):
        found += _functions(inner, f"{path}._schedulers[{index}]")
    return found


def _storable(value: Any) -> Any:
    """`value` with the state of objects that have one, and with Python's numbers for NumPy's."""
    if isinstance(value, nn.Module):
        return model_state(value)
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (dict, OrderedDict, Counter):
        return type(value)({_storable(key): _storable(item) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_storable(item) for item in value)
    if not isinstance(value, (type, torch.Tensor)) and callable(getattr(value, "state_dict", None)):
        return value.state_dict()
    return value
