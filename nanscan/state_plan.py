"""The layout of a copy of nested state, remembered, so that the next copy need not find it out again."""

from __future__ import annotations

import copy
import itertools
import operator
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nanscan import engine

__all__ = ["SCALARS", "Plan"]

SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
Addresses = np.ndarray[Any, np.dtype[np.int64]]
MOST_MOVED = 64
_TENSORS = frozenset({Tensor, nn.Parameter, nn.Buffer})
_SCALARS = tuple(SCALARS)
_shape, _dtype = operator.attrgetter("shape"), operator.attrgetter("dtype")


class Plan:
    """Where the tensors of a state were copied to, in the order in which they are met.

    Tensors that lie at the same addresses with the same shapes, strides and dtypes share memory in the same way as
    they did when the plan was made. So the copies go to the same targets, whatever containers they are in now. A few
    may have moved, as the states of random number generators do, if they are alone in their memory, then and now.

    Args:
        sources: every tensor of the state, as often as it is met; all of them with plain memory.
        targets: the copy of each.

    Attributes:
        plain: no source is conjugated or negated lazily.
    """

    def __init__(self, sources: list[Tensor], targets: Sequence[Tensor]) -> None:
        self.targets = list(targets)
        self._addresses, self._layout, lazy = _layout_of(sources)
        self.plain = not lazy
        self._target_addresses = np.sort(_addresses_of(self.targets))
        self._uses = Counter(map(id, self.targets))
        last = {id(target): place for place, target in enumerate(self.targets)}
        self._once = [last[id(target)] == place for place, target in enumerate(self.targets)]
        self._places = np.flatnonzero(self._once)
        self._copies = engine.plan_copies(*self.copies(sources)) if self.plain else None
        self._memory = [] if self._copies is None else list(map(_for_ever, self.targets))

    def again(self, value: Any, copy_other: Callable[[Any], Any]) -> tuple[Any, list[Tensor]] | None:
        """`value` with the targets in place of its tensors, and these tensors; None if the plan does not fit.

        Args:
            value: the state now; it is not changed.
            copy_other: copies a value that is neither scalar, tensor, dict, list nor tuple and holds no tensor; raises
                `LookupError` if it does hold one.
        """
        try:
            result, sources = engine.rebuild(value, self.targets, _SCALARS, copy_other) or self._walk(value, copy_other)
            fits = len(sources) == len(self.targets) and self._fits(sources)
        except (LookupError, RuntimeError, StopIteration):  # RuntimeError: sparse tensors have no address
            return None
        return (result, sources) if fits else None

    def _walk(self, value: Any, copy_other: Callable[[Any], Any]) -> tuple[Any, list[Tensor]]:
        walk = _Walk(iter(self.targets), copy_other)
        return walk.copy(value), walk.sources

    def _fits(self, sources: list[Tensor]) -> bool:
        addresses, layout, _ = _layout_of(sources)
        if layout != self._layout:
            return False
        moved = np.flatnonzero(addresses != self._addresses).tolist()
        if moved:
            if len(moved) > MOST_MOVED or not all(self._uses[id(self.targets[i])] == 1 for i in moved):
                return False
            ordered = np.sort(addresses)
            if not all(_is_alone(sources[i], ordered, self._target_addresses) for i in moved):
                return False
            self._addresses = addresses
        return True

    def copies(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Source and target of every copy to be made; tied tensors once."""
        return list(itertools.compress(sources, self._once)), list(itertools.compress(self.targets, self._once))

    def copy(self) -> bool | None:
        """Copy all once more, the sources being those that `again` met last; False if a NaN or Inf was among them.

        None: nothing was copied, as addresses alone do not suffice here.
        """
        if self._copies is None:
            return None
        return engine.copy_planned(self._copies, self._addresses[self._places].tobytes())


def _for_ever(target: Tensor) -> torch.UntypedStorage:
    """The memory of a target on the host, which is never moved or cut from now on: it is written to by its address."""
    memory = target.untyped_storage()
    torch.empty(0, dtype=torch.uint8, device="cpu").set_(memory).numpy()  # torch resizes no memory that NumPy has seen
    return memory


def _is_alone(tensor: Tensor, sources: Addresses, targets: Addresses) -> bool:
    """True if of the sorted addresses only that of `tensor`, which is one of `sources`, lies in its storage."""
    memory = tensor.untyped_storage()
    ends = [memory.data_ptr(), memory.data_ptr() + memory.nbytes()]
    inside = [int(np.diff(np.searchsorted(places, ends)).item()) for places in (sources, targets)]
    return inside == [1, 0] and tensor.numel() > 0


def _layout_of(tensors: list[Tensor]) -> tuple[Addresses, Any, bool]:
    """Addresses, all else that decides how the tensors are copied, and whether one is conjugated or negated lazily."""
    found = engine.layouts_of(tensors)
    if found is not None:
        addresses, layout, lazy = found
        return np.frombuffer(addresses, np.int64), layout, lazy
    facts = [list(map(fact, tensors)) for fact in (_shape, Tensor.stride, _dtype, Tensor.is_conj, Tensor.is_neg)]
    return _addresses_of(tensors), facts, any(map(any, facts[-2:]))


def _addresses_of(tensors: Sequence[Tensor]) -> Addresses:
    return np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))


class _Walk:
    """Containers rebuilt, with the next target in place of each tensor."""

    def __init__(self, targets: Iterator[Tensor], copy_other: Callable[[Any], Any]) -> None:
        self.sources: list[Tensor] = []
        self._targets = targets
        self._copy_other = copy_other
        self._seen: set[int] = set()

    def copy(self, value: Any) -> Any:
        kind = type(value)
        if kind in _TENSORS:
            self.sources.append(value)
            return next(self._targets)
        if kind in SCALARS:
            return value
        if id(value) in self._seen:
            raise LookupError("a container in two places")
        self._seen.add(id(value))
        if kind is dict:
            return {key: self.copy(item) for key, item in value.items()}
        if kind is list:
            return [self.copy(item) for item in value]
        if kind is tuple:
            return tuple([self.copy(item) for item in value])
        if kind is OrderedDict:
            new = copy.copy(value)  # with its attributes, such as the metadata of a state dict
            for key, item in value.items():
                new[key] = self.copy(item)
            return new
        return self._copy_other(value)
