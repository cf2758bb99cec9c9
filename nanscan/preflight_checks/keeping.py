"""Leaves everything as it was: what the one forward and backward pass of a preflight changes is put back.

Memory is copied just before an op overwrites it, as in `nanscan.find_origin`; memory made during the pass is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nanscan.origin.keep import Keeper
from nanscan.origin.modules import storage_key

__all__ = ["Kept"]

_PLAIN = (int, float, bool, str, type(None), Tensor)
_INSTEAD = "before fully_shard it does, and nanscan.preflight(model, optimizer) without a batch always does"
_TABLES = ("_parameters", "_buffers", "_modules")


class Kept:
    """The state of a program before a pass.

    Args:
        modules: of these also training modes, attributes and the tables of parameters and buffers are kept.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._keeper = Keeper(modules, "preflight with a batch", _INSTEAD)
        self._made: set[int] = set()
        every = {id(m): m for root in modules for m in root.modules()}
        self._modules = [(m, _plain_attributes(m), [dict(m.__dict__[t]) for t in _TABLES]) for m in every.values()]
        self._leaves = [(p, p.grad, p.requires_grad) for m in every.values() for p in m.parameters(recurse=False)]
        with torch.no_grad():
            self._buffers = [(b, b.clone()) for m in every.values() for b in m.buffers(recurse=False) if not b.is_meta]
        for leaf, _, _ in self._leaves:
            leaf.grad = None

    def made(self, tensors: Sequence[Tensor]) -> None:
        """Told of what ops return: memory of their own is of this pass, and not worth a copy."""
        self._made.update(key for t in tensors if (key := storage_key(t)) is not None)

    def before_write(self, tensors: Sequence[Tensor]) -> None:
        """Told of memory before it is overwritten."""
        with torch.no_grad():
            self._keeper.save([t for t in tensors if not t.is_meta and storage_key(t) not in self._made])

    def restore(self) -> None:
        """Put everything back."""
        for module, attributes, tables in self._modules:
            for name, table in zip(_TABLES, tables, strict=True):
                module.__dict__[name].clear()
                module.__dict__[name].update(table)
            for name in set(_plain_attributes(module)) - set(attributes):
                del module.__dict__[name]
            module.__dict__.update(attributes)
        self._keeper.restore()
        for leaf, grad, wanted in self._leaves:
            leaf.requires_grad_(wanted)
            leaf.grad = grad
        with torch.no_grad():
            for buffer, copy in self._buffers:
                if not _same(buffer, copy):
                    buffer.copy_(copy)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal bits; the keeper has put most buffers back already, and a write counts a version up."""
    if one.shape != other.shape or one.layout is not torch.strided:
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
