"""What the rows ask of an event: operands at the bad element, settings, what made an input. Nothing here writes."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from nanscan.origin.ops import tensors_in
from nanscan.origin.ranges import element_at
from nanscan.origin.record import OpEvent

__all__ = ["View", "places", "short"]

MAX_PLACES = 8  # indices listed in a hint

# Nodes that hand on what another one made, perhaps shifted, scaled or picked.
# fmt: off
_PASSING = frozenset({
    "View", "UnsafeView", "Reshape", "ReshapeAlias", "Squeeze", "Unsqueeze", "Transpose", "T", "Permute", "Select",
    "Slice", "Index", "Gather", "Expand", "Clone", "Alias", "ToCopy", "Add", "Sub", "Rsub", "Neg", "Clamp", "ClampMin",
    "Sum", "Mean", "Split", "Cat", "Pow",
})
# fmt: on


class View:
    """An event, asked for what a hint needs. Each number that is read costs one transfer from a GPU, and only then.

    Args:
        event: what was found.
    """

    def __init__(self, event: OpEvent) -> None:
        self.event = event
        self.name = _base_name(event.op)
        self.nan = event.kind == "nan"
        self.code = event.code
        self.at = list(event.first_bad)

    @property
    def where(self) -> str:
        """`" at [1, 0]"`, nothing for a result that is a single number."""
        return f" at {self.at}" if self.at else ""

    @property
    def aside(self) -> str:
        """`" (at [1, 0])"`, nothing for a result that is a single number."""
        return f" ({self.where.strip()})" if self.at else ""

    @property
    def bad(self) -> Tensor:
        """The output that holds the NaN or Inf."""
        found = self.event.outputs[self.event.output]
        assert found is not None
        return found

    @property
    def dtype(self) -> str:
        """The dtype of the bad output, without `torch.`."""
        return str(self.bad.dtype).removeprefix("torch.")

    @property
    def limit(self) -> float:
        """The largest finite number of that dtype."""
        return float(torch.finfo(self.bad.dtype).max)

    @property
    def is_float16(self) -> bool:
        return self.bad.dtype is torch.float16

    # ---- forward -----------------------------------------------------------------------------------------------------

    def operand(self, position: int) -> Any:
        """Argument number `position` as it was before the op: a tensor (of a list: the one at fault) or a number."""
        value = self.event.args[position] if position < len(self.event.args) else None
        if not isinstance(value, (Tensor, list, tuple)):
            return value
        before = len(list(tensors_in(self.event.args[:position])))
        if isinstance(value, (list, tuple)):
            if not any(isinstance(item, Tensor) for item in value):
                return value
            before += self.event.output
        return self.event.inputs[before]

    def value(self, position: int) -> float | None:
        """The number that argument `position` has at the first bad element, None where no single one goes with it."""
        return self._at(self.operand(position))

    def setting(self, position: int, name: str, default: Any = None) -> Any:
        """An argument that is no tensor."""
        if name in self.event.kwargs:
            return self.event.kwargs[name]
        return self.event.args[position] if position < len(self.event.args) else default

    def made_by(self, position: int, steps: int = 6) -> set[str]:
        """The ops (`"Sigmoid"`) that argument `position` comes from; empty where no gradient is recorded."""
        value = self.event.args[position] if position < len(self.event.args) else None
        node = getattr(value, "grad_fn", None)
        waiting, found = [node], set()
        while waiting and steps > 0:
            node = waiting.pop(0)
            if node is None:
                continue
            name = re.sub(r"Backward\d*$", "", node.name())
            found.add(name)
            steps -= 1
            if name in _PASSING:
                waiting += [child for child, _ in node.next_functions]
        return found

    def only_exp(self, position: int) -> bool:
        """True if argument `position` is an exp or a sum of some, to which nothing was added."""
        made = self.made_by(position)
        return "Exp" in made and not made & {"Add", "Sub", "Rsub"}

    # ---- backward ----------------------------------------------------------------------------------------------------

    def saved(self, name: str) -> float | None:
        """What the forward op had saved, at the first bad element."""
        return self._at(self.event.saved.get(name))

    @property
    def gradient(self) -> float | None:
        """The incoming gradient at the first bad element."""
        found = (self._at(g) for g in self.event.inputs)
        return next((value for value in found if value is not None), None)

    @property
    def largest_gradient(self) -> float | None:
        """The largest magnitude among the finite incoming gradients, None if there are none."""
        found = [t[t.isfinite()].abs() for t in self.event.inputs if t is not None]
        sizes = [float(t.max()) for t in found if t.numel()]
        return max(sizes, default=None)

    def _at(self, value: Any) -> float | None:
        if isinstance(value, (bool, int, float)):
            return float(value)
        if not isinstance(value, Tensor):
            return None
        found = element_at(value, self.bad.shape, self.event.first_bad)
        if isinstance(found, str):  # a complex number: only 0 is told apart
            return 0.0 if complex(found) == 0 else None
        return found


def short(value: float | None) -> str:
    """A number as it is written in a hint.

    >>> short(0.0), short(65504.0), short(None)
    ('0', '65504', 'unknown')
    """
    return "unknown" if value is None else f"{value:.6g}"


def _base_name(op: str) -> str:
    """`"aten.log_"` and `"aten._foreach_log"` are `"log"`, `"SqrtBackward0"` is `"SqrtBackward"`."""
    name = op.rpartition(".")[2].removeprefix("_foreach_")
    name = re.sub(r"(Backward)\d+$", r"\1", name)
    return name[:-1] if name.endswith("_") else name


def places(mask: Tensor) -> str:
    """Where a mask is true: count and the first flat indices.

    >>> places(torch.tensor([True, True, False]))
    '2 of 3 elements, flat indices [0, 1]'
    """
    found = mask.reshape(-1).nonzero().reshape(-1)
    first = found[:MAX_PLACES].tolist()
    more = ", …" if len(found) > MAX_PLACES else ""
    listed = ", ".join(str(i) for i in first)
    return f"{len(found)} of {mask.numel()} element{'s' * (mask.numel() != 1)}, flat indices [{listed}{more}]"
