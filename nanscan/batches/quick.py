"""One compiled question to a batch: is all well? Only a batch of which it is not known is looked at step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from nanscan import engine
from nanscan.engine.tensors import is_transformed

if TYPE_CHECKING:
    from nanscan.batches.plan import Plan
    from nanscan.batches.question import Question

__all__ = ["Quick", "compiled"]

_REAL = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
_WHOLE = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool})


class Quick(NamedTuple):
    """A question in the words of the compiled check: no judge need look where the answer is yes.

    Attributes:
        kind: `"within"`: at least one element, and all at least `low` and at most `high`; `"mask"`: no row hides every
            key; `"varies"`: no sample holds one value, not 0, at some places of it.
        low, high: the bounds; integers must be among the floats.
        ignored: an integer that is left out, and is no element.
        zero_hides: of a mask: what is 0 hides, else what is not.
    """

    kind: Literal["within", "mask", "varies"]
    low: float = 0.0
    high: float = 0.0
    ignored: int | None = None
    zero_hides: bool = False


def compiled(batch: Any, values: Sequence[Tensor], plan: Plan) -> Callable[[Any], bool] | None:
    """What says of a batch of this form that all is well (False: not known); None: no such question can be made."""
    make = engine.active_engine().batch_check
    askable = _askable(batch, values) and not plan.problems and not plan.converted
    if make is None or not askable or any(question.quick is None for question in plan.questions):
        return None
    asked = [(question.leaf, question.quick) for question in plan.questions if isinstance(question.quick, Quick)]
    if any(quick.kind == "mask" and values[i].dtype not in _WHOLE for i, quick in asked):
        return None
    check: Callable[[Any], bool] = make(
        batch,
        floats=[(i, plan.odd_magnitudes.get(i, [])) for i in plan.floats],
        within=[(i, quick.low, quick.high, quick.ignored) for i, quick in asked if quick.kind == "within"],
        masks=[(i, quick.zero_hides) for i, quick in asked if quick.kind == "mask"],
        varying=[i for i, quick in asked if quick.kind == "varies"],
    )
    beside = [question for question in plan.questions if question.quick == "beside"]
    return partial(_all_well, check, beside) if beside else check


def _all_well(check: Callable[[Any], bool], beside: Sequence[Question], batch: Any) -> bool:
    """Of a batch of the same form, with the questions that are not compiled."""
    if not check(batch):
        return False
    values = [*batch.values()] if type(batch) is dict else batch
    return all(one.is_well(one.ask(values[one.leaf], *one.beside(values))) for one in beside)  # type: ignore[arg-type]


def _askable(batch: Any, values: Sequence[Tensor]) -> bool:
    """A plain tuple, list or dict (with text as keys) of plain tensors in the host's memory."""
    if type(batch) is dict and any(type(key) is not str for key in batch):
        return False
    own = batch.values() if type(batch) is dict else batch if type(batch) in (tuple, list) else ()
    if not values or len(own) != len(values) or any(a is not b for a, b in zip(own, values, strict=True)):
        return False
    return all(
        type(value) is Tensor
        and value.is_cpu
        and not value.is_nested
        and not is_transformed(value)
        and value.layout is torch.strided
        and value.dtype in _REAL | _WHOLE
        for value in values
    )
