"""Small views of large memory: what they show is saved, not all of the memory behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nanscan.checkpoint.taken_apart import taken_apart
from nanscan.checkpoint.tensors import Found

__all__ = ["WASTE", "Views"]

WASTE = 1 << 16  # bytes beside a tensor from which on its storage is looked at
_ALIGNED = 16  # bytes: every dtype begins at a multiple of its size
_Piece = tuple[int, int, Any]  # first byte, last + 1, the copy of these bytes once it is made


class Views:
    """Replaces tensors that show less than half of a storage, together, by views of copies of what they show.

    Tensors that overlap still share memory. A storage that PyTorch itself takes apart (another device, a subclass of
    Tensor) is left as it is.

    Args:
        found: every tensor of the state.

    >>> row = torch.zeros(100_000)[5:8]
    >>> Views([Found("row", row)]).alone(row).untyped_storage().nbytes()
    16
    """

    def __init__(self, found: Sequence[Found]) -> None:
        self._found = found
        self._pieces: dict[int, list[_Piece]] | None = None  # of each storage; none: it is left as it is

    def alone(self, tensor: Tensor) -> Tensor:
        """A tensor that looks the same in a storage that is not much larger, or the tensor itself."""
        if self._pieces is None:
            self._pieces = self._laid_out()
        storage = tensor.untyped_storage()
        pieces = self._pieces.get(storage._cdata)
        if pieces is None:
            return tensor
        if not tensor.numel():
            return _view(tensor, torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage(), 0)
        first, _ = _extent(tensor)
        for index, (start, end, copy) in enumerate(pieces):
            if start <= first < end:
                if copy is None:
                    copy = _bytes(storage)[start:end].clone().untyped_storage()
                    pieces[index] = (start, end, copy)
                return _view(tensor, copy, (first - start) // tensor.itemsize)
        return tensor

    def _laid_out(self) -> dict[int, list[_Piece]]:
        extents: dict[int, list[tuple[int, int]]] = {}
        sizes: dict[int, int] = {}
        for tensor in {id(item.tensor): item.tensor for item in self._found}.values():
            if not issubclass(type(tensor), Tensor) or tensor.layout is not torch.strided or not tensor.is_cpu:
                continue
            try:
                storage = tensor.untyped_storage()
            except (RuntimeError, NotImplementedError):  # a subclass without memory of its own
                continue
            sizes.setdefault(storage._cdata, storage.nbytes())
            if not _is_plain(tensor):
                sizes[storage._cdata] = 0
            extents.setdefault(storage._cdata, []).extend([_extent(tensor)] if tensor.numel() else ())
        merged = {key: _merged(spans) for key, spans in extents.items() if sizes[key] > WASTE}
        return {key: pieces for key, pieces in merged.items() if 2 * sum(e - s for s, e, _ in pieces) < sizes[key]}


def _is_plain(tensor: Tensor) -> bool:
    inner = tensor.data if type(tensor) is nn.Parameter else tensor
    return type(inner) is Tensor and taken_apart(inner, inner.untyped_storage()) is not None


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of its storage that a tensor shows, and the one behind the last."""
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


def _merged(spans: list[tuple[int, int]]) -> list[_Piece]:
    """The spans without overlaps, those that touch each other as one."""
    pieces: list[_Piece] = []
    for start, end in sorted(spans):
        start -= start % _ALIGNED
        if pieces and start <= pieces[-1][1]:
            pieces[-1] = (pieces[-1][0], max(end, pieces[-1][1]), None)
        else:
            pieces.append((start, end, None))
    return pieces


def _bytes(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def _view(tensor: Tensor, storage: Any, offset: int) -> Tensor:
    view = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storage, offset, tensor.size(), tensor.stride())
    return view.requires_grad_(tensor.requires_grad)
