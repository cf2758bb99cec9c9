"""Own copies of nested training state: containers are rebuilt, tensors copied, memory of a former copy used again."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nanscan import engine
from nanscan.engine.shards import is_dtensor, local_of
from nanscan.engine.tensors import parts_of
from nanscan.state_plan import SCALARS, Plan

__all__ = ["StateCopy", "copy_state", "has_plain_memory", "memory_id"]

Place = Callable[[Tensor], torch.device]
_SCALARS = tuple(SCALARS)
_LISTS = (list, deque, set, frozenset, tuple)


def copy_state(value: Any, into: Any = None, device: str | torch.device | None = None) -> Any:
    """An own deep copy of nested state, such as a state dict, that shares no tensor memory with it.

    Tensors are detached and copied, dicts, lists, tuples, deques, sets, NumPy arrays and plain objects rebuilt. Keys of
    dicts, functions, modules and other objects are kept as they are. A tensor that occurs twice occurs twice in the
    copy, and tensors that overlap in memory still do. Of a DTensor this rank's shard is copied, of a wrapper (quantized
    state) the tensors inside.

    Args:
        value: the state; it is not changed.
        into: a former copy of it; its tensors of the same shape, dtype and device are overwritten and used again, so
            that a repeated copy allocates nothing. It is to be given up: use what is returned.
        device: where tensors are copied to; None: where they are. `"cpu"` takes CUDA tensors to pinned memory.

    Returns:
        The copy.

    >>> state = {"weight": torch.ones(2), "step": 3}
    >>> saved = copy_state(state)
    >>> state["weight"].add_(1)
    tensor([2., 2.])
    >>> saved["weight"], saved["step"]
    (tensor([1., 1.]), 3)
    >>> copy_state(state, into=saved)["weight"] is saved["weight"]
    True
    """
    work = StateCopy(value, into, None if device is None else torch.device(device))
    work.run()
    return work.result


class StateCopy:
    """One copy in two moves: lay out `result` (its memory is not filled yet), then fill it by `run`.

    Args:
        value, into, device: as for `copy_state`; `device` may also be a function of the source tensor, and `into` a
            former `StateCopy` to the same device: if the tensors still lie where they lay then, that is much cheaper.

    Attributes:
        result: the copy; valid after `run`.
        sources, targets: of every tensor copy to be made; `run` empties the first, so as not to keep those alive.
        plain: it is known that no source is conjugated or negated lazily.
        apart: tensors that are not among `sources`: sparse ones and others without memory of their own, which
            are copied already, and those that overlap with others, whose whole memory is one of the sources.
    """

    def __init__(self, value: Any, into: Any = None, device: torch.device | Place | None = None) -> None:
        former = into if isinstance(into, StateCopy) else None
        self.sources: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.apart: list[Tensor] = []
        self.plain = False
        self._plan: Plan | None = None if former is None else former._plan
        self._planned = False
        again = None if self._plan is None else self._plan.again(value, _without_tensors)
        if again is not None and self._plan is not None:
            self.result, sources = again
            self.sources, self.targets = self._plan.copies(sources)
            self.plain = self._plan.plain
            self._planned = True
            return
        layout = _Layout(value, into if former is None else former.result, device)
        self.result, self.apart = layout.result, layout.apart
        self.sources, self.targets = layout.sources, layout.targets
        self._plan = None if layout.apart else Plan(layout.met, layout.met_copies)

    @torch.no_grad()
    def run(self) -> None:
        """Copy the memory of all tensors."""
        if self.sources and self._copy_planned() is None:
            engine.copy_(self.sources, self.targets, self.plain)
            pairs = zip(self.sources, self.targets, strict=True)
            if torch.cuda.is_available() and any(s.is_cuda != t.is_cuda for s, t in pairs):
                torch.cuda.synchronize()
        self.release()

    @torch.no_grad()
    def run_finite(self) -> bool:
        """`run`, but for waiting for devices and `release`; False if a NaN or Inf was among what was copied."""
        finite = self._copy_planned()
        return engine.copy_finite(self.sources, self.targets, self.plain) if finite is None else finite

    def _copy_planned(self) -> bool | None:
        return self._plan.copy() if self._planned and self._plan is not None else None

    def release(self) -> None:
        """Let the sources go: everything is copied."""
        self.sources, self.apart = [], []

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_plan": None, "_planned": False}  # it holds the addresses of these very targets


def _holds_others(tensor: Tensor) -> bool:
    return is_dtensor(tensor) or parts_of(tensor) is not None


def _without_tensors(value: Any) -> Any:
    """A copy of a value in which there is no tensor.

    Raises:
        LookupError: there is one.
    """
    if next(_tensors(value, set()), None) is not None:
        raise LookupError("it holds a tensor")
    return _Layout(value).result


class _Layout:
    """What `StateCopy` lays out: `result`, what is to be copied, and each tensor as it was met, with its copy."""

    def __init__(self, value: Any, into: Any = None, device: torch.device | Place | None = None) -> None:
        self._place: Place = device if callable(device) else lambda t: t.device if device is None else device
        self._copies: dict[int, Any] = {}  # id of a source -> its copy
        self._held: list[Any] = []  # what is known by its id only
        self._same_memory: dict[tuple[Any, ...], Tensor] = {}
        self._overlaps: dict[int, Tensor] = {}  # memory on which tensors overlap -> the copy of the whole of it
        self.sources: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.apart: list[Tensor] = []
        self.met: list[Tensor] = []
        self.met_copies: list[Tensor] = []
        sources = [t for t in _tensors(value, set()) if has_plain_memory(t)]
        self._memory = {id(t): memory_id(t) for t in sources}  # that of each source
        self._taken = set(self._memory.values())  # no target may lie in these
        self._several, self._shared = _shared_memory(sources, self._memory)
        self.result = self._copy(value, into)

    def _copy(self, value: Any, into: Any) -> Any:
        if isinstance(value, _SCALARS):
            return value
        known = self._copies.get(id(value))
        if known is None:
            known = self._copies[id(value)] = self._new(value, into)
        if isinstance(value, Tensor) and not _holds_others(value):  # else these were met
            self.met.append(value)
            self.met_copies.append(known)
        return known

    def _new(self, value: Any, into: Any) -> Any:
        if is_dtensor(value):
            return self._sharded(value, into)
        if isinstance(value, Tensor):
            into = into if isinstance(into, Tensor) and not is_dtensor(into) else None
            return (
                self._tensor(value, into) if (parts := parts_of(value)) is None else self._wrapper(value, parts, into)
            )
        if isinstance(value, dict):
            return self._dict(value, into if isinstance(into, dict) else {})
        if isinstance(value, _LISTS):
            return self._list(value, into)
        if hasattr(value, "__array_interface__") and hasattr(value, "copy"):
            return value.copy()
        if _is_plain_object(value):
            return self._object(value, into)
        return value

    def _dict(self, value: dict[Any, Any], into: dict[Any, Any]) -> Any:
        new: dict[Any, Any] = {} if type(value) is dict else copy.copy(value)
        self._copies[id(value)] = new  # a state that holds itself
        for key, item in value.items():
            new[key] = self._copy(item, into.get(key))
        return new

    def _list(self, value: Any, into: Any) -> Any:
        former = list(into) if type(into) is type(value) and not isinstance(value, (set, frozenset)) else []
        former += [None] * (len(value) - len(former))
        if type(value) is list:  # it may hold itself
            new: list[Any] = []
            self._copies[id(value)] = new
            new += (self._copy(item, old) for item, old in zip(value, former, strict=False))
            return new
        items = [self._copy(item, old) for item, old in zip(value, former, strict=False)]
        if isinstance(value, deque):
            return type(value)(items, value.maxlen)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)

    def _object(self, value: Any, into: Any) -> Any:
        try:
            new = copy.copy(value)
            self._copies[id(value)] = new
            former = vars(into) if type(into) is type(value) else {}
            for name, item in vars(value).items():
                object.__setattr__(new, name, self._copy(item, former.get(name)))
        except Exception:  # an object that doesn't let itself be copied is kept
            return value
        return new

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def _sharded(self, source: Any, into: Any) -> Any:
        """A DTensor around a copy of this rank's shard, which may lie on another device than the mesh."""
        shard = self._copy(local_of(source), local_of(into) if is_dtensor(into) else None)
        return type(source)(shard, source._spec, requires_grad=False)

    def _wrapper(self, source: Any, parts: dict[str, Tensor], into: Any) -> Any:
        """A wrapper, such as quantized state, around copies of the tensors inside."""
        self._held.append(parts)
        former = parts_of(into) if type(into) is type(source) else None
        copies = {name: self._copy(part, (former or {}).get(name)) for name, part in parts.items()}
        _, context = source.__tensor_flatten__()
        return type(source).__tensor_unflatten__(copies, context, source.size(), source.stride())

    def _tensor(self, source: Tensor, into: Tensor | None) -> Tensor:
        memory = self._memory.get(id(source))
        source = source.detach() if source.requires_grad else source
        if memory is None:
            self.apart.append(source)
            new = source.clone()
            wanted = self._place(source)
            return new if new.device == wanted else new.to(wanted)
        if memory not in self._several:
            return self._own(source, into)
        place = (memory, source.storage_offset(), source.shape, source.stride())
        key = (*place, source.dtype, source.is_conj(), source.is_neg())
        known = self._same_memory.get(key)
        if known is None:
            known = self._view(source, memory, into) if memory in self._shared else self._own(source, into)
            self._same_memory[key] = known
        return known

    def _own(self, source: Tensor, into: Tensor | None) -> Tensor:
        """Memory for a tensor: that of the former copy if it fits and nobody else has it, else new."""
        target = self._usable(into, source)
        if target is None:
            target = _like(source, self._place(source))
            self._taken.add(memory_id(target))
        self._pair(source, target)
        return target

    def _pair(self, source: Tensor, target: Tensor) -> None:
        self.sources.append(source)
        self.targets.append(target)

    def _view(self, source: Tensor, storage: int, into: Tensor | None) -> Tensor:
        """A tensor that overlaps with others: the same view of one copy of their whole storage."""
        self.apart.append(source)
        if storage not in self._overlaps:
            whole = _bytes_of(source)
            former = _bytes_of(into) if into is not None and has_plain_memory(into) else None
            target = self._usable(former, whole)
            if target is None:
                target = _like(whole, self._place(source))
                self._taken.add(memory_id(target))
            self._overlaps[storage] = target
            self._pair(whole, target)
        memory = self._overlaps[storage].untyped_storage()
        new = torch.empty(0, dtype=source.dtype, device=memory.device)
        new.set_(memory, source.storage_offset(), source.shape, source.stride())
        new = new.conj() if source.is_conj() else new
        return torch._neg_view(new) if source.is_neg() else new

    def _usable(self, into: Tensor | None, source: Tensor) -> Tensor | None:
        if into is None or into.shape != source.shape or into.dtype != source.dtype:
            return None
        if not has_plain_memory(into) or into.is_conj() or into.is_neg() or 0 in into.stride():
            return None
        memory = memory_id(into)
        if memory in self._taken or into.device != self._place(source):
            return None
        self._taken.add(memory)
        return into.detach() if into.requires_grad else into


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor in nested state, each object once."""
    if isinstance(value, _SCALARS) or id(value) in seen:
        return
    seen.add(id(value))
    if is_dtensor(value):
        yield from _tensors(local_of(value), seen)
    elif isinstance(value, Tensor):
        parts = parts_of(value)
        yield from [value] if parts is None else _tensors(parts, seen)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, seen)
    elif isinstance(value, _LISTS):
        for item in value:
            yield from _tensors(item, seen)
    elif _is_plain_object(value):
        for item in vars(value).values():
            yield from _tensors(item, seen)


def _shared_memory(tensors: list[Tensor], memory: dict[int, int]) -> tuple[set[int], set[int]]:
    """The storages in which several of the tensors lie; and those in which two, not the same view, overlap."""
    by_storage: dict[int, list[Tensor]] = {}
    for t in tensors:
        by_storage.setdefault(memory[id(t)], []).append(t)
    several = {storage: views for storage, views in by_storage.items() if len(views) > 1}
    return set(several), {storage for storage, views in several.items() if _overlap(views)}


def _overlap(views: list[Tensor]) -> bool:
    extents = set()
    for t in views:
        if t.numel():
            start = int(t.storage_offset()) * t.element_size()
            last = sum(int((size - 1) * stride) for size, stride in zip(t.shape, t.stride(), strict=True))
            extents.add((start, start + (last + 1) * t.element_size(), t.dtype, t.shape, t.stride()))
    ordered = sorted(extents, key=lambda extent: extent[:2])
    return any(one[1] > other[0] for one, other in zip(ordered, ordered[1:], strict=False))


def _like(source: Tensor, device: torch.device) -> Tensor:
    """Memory of the same shape, dtype and order; pinned if it is to take a tensor from CUDA to the host."""
    if source.device.type == "cuda" and device.type == "cpu":
        try:
            return torch.empty_like(source, device=device, pin_memory=True)
        except RuntimeError:  # no more memory can be pinned
            pass
    return torch.empty_like(source, device=device, requires_grad=False)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor, as bytes."""
    memory = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


def memory_id(tensor: Tensor) -> int:
    """The same number for tensors in the same storage, as long as that lives."""
    return int(tensor.untyped_storage()._cdata)


def has_plain_memory(tensor: Tensor) -> bool:
    """False for tensors without memory of their own that could be read as their elements: sparse, meta, subclasses."""
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        return False
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def _is_plain_object(value: Any) -> bool:
    """True for objects that only hold values, such as a namespace or a dataclass: cheap to copy, meant to change."""
    if callable(value) or isinstance(value, (nn.Module, torch.optim.Optimizer)) or not hasattr(value, "__dict__"):
        return False
    module = type(value).__module__
    return not isinstance(value, type) and module.split(".")[0] not in ("torch", "threading", "numpy", "functools")
