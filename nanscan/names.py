"""What the tensors of a training step are called: from the model, the optimizer's named groups, or their position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from nanscan.engine.result import BadInput
from nanscan.engine.tensors import full_shape
from nanscan.report import Label
from nanscan.wrappers import forward_module

__all__ = ["Joined", "Names", "buffers_of", "label_of", "names_of"]

_WRAPPED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


class Names:
    """The labels of an optimizer's parameters, by position over all groups; built anew when the parameters change.

    Args:
        model: where names come from first; tied parameters have all theirs.
        known: names by position that were found earlier (an unpickled optimizer has no model any more).
    """

    def __init__(self, model: nn.Module | None = None, known: Sequence[tuple[str, ...]] = ()) -> None:
        self.model = model
        self._known = list(known)
        self.signature = 0  # the engine's, of the parameters that `latest` is of
        self.latest: list[Label] = []
        self._params: list[Tensor] = []  # held, so that no other tensor can take the id of one of them

    def labels(self, signature: int, groups: Sequence[dict[str, Any]]) -> list[Label]:
        """The labels of the gradients of `groups`, in flat order.

        Args:
            signature: the engine's word for "the same parameters as before"; 0 = it doesn't know.
            groups: `optimizer.param_groups`.
        """
        if signature == self.signature and signature:
            return self.latest
        return self.refresh(signature, groups) if signature else self.renewed(groups)

    def refresh(self, signature: int, groups: Sequence[dict[str, Any]]) -> list[Label]:
        """As `labels`, after a look at every parameter; where the signature is new, also at its shape and dtype."""
        params = [p for group in groups for p in group["params"]]
        same = len(params) == len(self._params) and all(a is b for a, b in zip(params, self._params, strict=True))
        if not same or (signature != self.signature and self._look_otherwise(params)):
            self.latest = self._build(groups)
            if any(is_lazy(param) for param in params):  # it gets its shape in the first forward pass
                return self.latest
            self._params = params
        self.signature = signature
        return self.latest

    def renewed(self, groups: Sequence[dict[str, Any]]) -> list[Label]:
        """The labels as the parameters look now: `model.to(...)` changes their dtype or device, and they stay the same.

        It looks at every parameter, so it is for the few steps that are described.
        """
        signature, self.signature = self.signature, -1
        return self.refresh(signature, groups)

    def _look_otherwise(self, params: Sequence[Tensor]) -> bool:
        grads = (p if p.grad is None else p.grad for p in params)
        return any(
            (label.shape, label.dtype, label.device) != (_shape(g), dtype_name(g.dtype), str(g.device))
            for g, label in zip(grads, self.latest, strict=True)
        )

    def known(self, groups: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
        """The names by position, to be kept where the model can't be."""
        return [label.names for label in self.refresh(0, groups)]

    def _build(self, groups: Sequence[dict[str, Any]]) -> list[Label]:
        by_id = names_of(self.model)
        found = list(_group_names(groups, by_id))
        for position, names in enumerate(self._known[: len(found)]):
            if self.model is None:
                found[position] = names
        params = (p for group in groups for p in group["params"])
        return [
            label_of(p if p.grad is None else p.grad, names, "grad") for p, names in zip(params, found, strict=True)
        ]


class Joined(Sequence[Label]):
    """Two lists of labels as one, without a copy."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Sequence[Label], second: Sequence[Label]) -> None:
        self._first = first
        self._second = second

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    @overload
    def __getitem__(self, index: int) -> Label: ...
    @overload
    def __getitem__(self, index: slice) -> list[Label]: ...
    def __getitem__(self, index: int | slice) -> Label | list[Label]:
        if isinstance(index, slice):
            return [*self._first, *self._second][index]
        return self._first[index] if index < len(self._first) else self._second[index - len(self._first)]


def _group_names(groups: Sequence[dict[str, Any]], by_id: dict[int, tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    for number, group in enumerate(groups):
        own = group.get("param_names") or [f"group{number}.param{i}" for i in range(len(group["params"]))]
        for param, name in zip(group["params"], own, strict=True):
            yield by_id.get(id(param)) or (name,)


def names_of(model: nn.Module | None) -> dict[int, tuple[str, ...]]:
    """`id(parameter)` -> all its names in `model`, without the prefixes that wrappers add.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    >>> names_of(torch.nn.DataParallel(model))[id(model[0].bias)]
    ('0.bias',)
    """
    if model is None:
        return {}
    return _by_id(unwrapped(model).named_parameters(remove_duplicate=False))


def buffers_of(model: nn.Module) -> tuple[list[Tensor], list[Label]]:
    """The floating-point buffers of `model`, such as BatchNorm's running statistics, and their labels."""
    named = [(n, b) for n, b in unwrapped(model).named_buffers() if b.is_floating_point() or b.is_complex()]
    return [b for _, b in named], [label_of(b, (clean(n),), "buffer") for n, b in named]


def unwrapped(model: nn.Module) -> nn.Module:
    """`model` without Fabric's wrapper, DataParallel or DistributedDataParallel around it."""
    inside: nn.Module = forward_module(model)
    while isinstance(inside, _PARALLEL):
        inside = inside.module
    return inside


def clean(name: str) -> str:
    """`name` without the parts that torch.compile, FSDP and activation checkpointing add.

    >>> clean("_orig_mod.encoder._checkpoint_wrapped_module.weight")
    'encoder.weight'
    """
    if "_orig_mod" not in name and "_wrapped_module" not in name:  # nearly all; asked for every tensor at every save
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def label_of(tensor: Tensor, names: tuple[str, ...], kind: str) -> Label:
    """The label of a tensor."""
    return Label(names, _shape(tensor), dtype_name(tensor.dtype), str(tensor.device), kind)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    try:
        return full_shape(tensor)
    except BadInput:  # nothing that could be scanned; the scan says so, if it comes to that
        return () if is_lazy(tensor) else tuple(tensor.shape)


def dtype_name(dtype: torch.dtype) -> str:
    """`"float32"` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def _by_id(named: Iterable[tuple[str, Tensor]]) -> dict[int, tuple[str, ...]]:
    found: dict[int, tuple[str, ...]] = {}
    for name, tensor in named:
        name = clean(name)
        have = found.get(id(tensor), ())
        if name not in have:
            found[id(tensor)] = (*have, name)
    return found
