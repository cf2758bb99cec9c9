"""Is a training state finite? Weights, buffers and optimizer state, with names where it is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from nanscan import engine
from nanscan.engine.shards import is_dtensor, logical_index
from nanscan.engine.tensors import parts_of
from nanscan.names import label_of
from nanscan.recovery.training_state import Named, TrainingState
from nanscan.report import Report, TensorReport

__all__ = ["FiniteCheck"]


class FiniteCheck:
    """Looks for NaN and Inf in a training state.

    A buffer may hold Inf on purpose, as attention masks do: one that did when it was first seen may go on to. A NaN,
    or an Inf in any other place, is bad.

    Args:
        state: what is looked at.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._shapes: dict[str, torch.Size] = {}  # of the buffers seen so far
        self._masks: set[str] = set()  # those of them that may hold Inf

    def bad(self) -> tuple[TensorReport, ...]:
        """A row for each tensor that is bad; reads everything once."""
        buffers = self._state.buffers()
        rows = _bad_rows([*self._state.parameters(), *buffers, *self._state.states()])
        self._learn(buffers, rows)
        return tuple(row for row in rows if row.nan_count or row.kind != "buffer" or row.name not in self._masks)

    def bad_weights(self) -> tuple[TensorReport, ...]:
        """A row for each parameter that holds a NaN or Inf; reads the trained ones only."""
        groups = self._state.optimizer.param_groups
        if engine.scan([param for group in groups for param in group["params"]]).finite:
            return ()
        return _bad_rows(self._state.parameters())

    def _learn(self, buffers: Sequence[Named], rows: Sequence[TensorReport]) -> None:
        """Note the buffers that hold Inf now, when they are seen for the first time in this shape."""
        infinite = {row.name for row in rows if row.kind == "buffer" and not row.nan_count}
        for (name, *_), _, buffer in buffers:
            if self._shapes.get(name) != buffer.shape:
                self._shapes[name] = buffer.shape
                (self._masks.add if name in infinite else self._masks.discard)(name)


def _bad_rows(named: Sequence[Named]) -> tuple[TensorReport, ...]:
    named = [inner for item in named for inner in _inside(item)]
    scan = engine.scan([tensor for _, _, tensor in named])
    if scan.finite:
        return ()
    sharded = [row for row in scan.bad_rows() if is_dtensor(named[row.position][2])]
    places = {row.position: logical_index(named[row.position][2], row.first_bad) for row in sharded}
    return Report.from_scan(scan, [label_of(tensor, names, kind) for names, kind, tensor in named], places).bad


def _inside(item: Named) -> Iterator[Named]:
    """The tensors inside of a wrapper that can hold a NaN: the scale of quantized state; any other tensor itself."""
    names, kind, tensor = item
    parts = parts_of(tensor)
    if parts is None:
        yield item
    for part, value in (parts or {}).items():
        if value.is_floating_point():
            yield tuple(f"{part} of {name}" for name in names), kind, value
