"""Ops that make NaN or Inf of a 0 (log, sqrt, division, acos, powers) or overflow (exp), with nothing against it.

What an input can be is told by the op that made it: a softmax, a sum of squares or a count can be 0; a sum with an eps
or a clamp can't. What it is in this batch makes an info a warning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["JUDGES", "MAKERS", "Makers", "Prone"]

# autograd nodes that hand values on as they are
# fmt: off
_VIEWS = frozenset({
    "View", "Reshape", "UnsafeView", "Unsqueeze", "Squeeze", "Expand", "Transpose", "Permute", "Slice", "Select", "T",
    "ToCopy", "Alias", "Split", "SplitWithSizes", "Unbind", "Gather", "Index", "IndexSelect", "Neg", "Flatten", "Chunk",
})
# fmt: on
_ANY = frozenset({"Addmm", "Mm", "Bmm", "Convolution", "Linear"})  # the output of a layer can be anything
_CAN_BE_ZERO = frozenset({"Softmax", "Sigmoid", "Relu", "Threshold", "Abs", "Rsub", "Sub", "Prod", "Cos", "Sin"}) | _ANY
_SQUARES = (
    frozenset({"Pow", "Sum", "Mean", "Mul", "Relu", "Threshold", "Abs", "Var", "Sub", "Rsub", "Max", "Amax"}) | _ANY
)
_DENOMINATORS = frozenset({
    "Sum", "LinalgVectorNorm", "Norm", "Std", "Var", "Sub", "Rsub", "Relu", "Threshold", "Abs", "Max", "Amax", "Mean",
    "Prod",
})  # fmt: skip
_POSITIVE = frozenset({"Exp", "Softmax", "Softplus"})  # a sum of these is not 0
MAKERS = {
    "sum": "Sum", "linalg_vector_norm": "LinalgVectorNorm", "std": "Std", "var": "Var", "sub": "Sub", "rsub": "Rsub",
    "amax": "Amax", "abs": "Abs", "prod": "Prod",
}  # fmt: skip
_KEPT = 256


class Prone(NamedTuple):
    """An op that can make NaN.

    Attributes:
        code: of the table.
        message: what goes into what.
        hit: it is so in this batch.
    """

    code: str
    message: str
    hit: bool


class Makers:
    """Who made the tensors that autograd does not know: counts and data."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, str]] = []

    def add(self, tensor: Tensor, maker: str) -> None:
        """Remember one; the last few are kept."""
        self._kept.append((tensor, maker))
        del self._kept[:-_KEPT]

    def of(self, tensor: Tensor) -> tuple[str, str]:
        """(what made a tensor, what made that one's input), as autograd names them, "" if unknown."""
        node = tensor.grad_fn
        while node is not None and _short(node) in _VIEWS:
            node = node.next_functions[0][0] if node.next_functions else None
        if node is not None:
            before = node.next_functions[0][0] if node.next_functions else None
            while before is not None and _short(before) in _VIEWS:
                before = before.next_functions[0][0] if before.next_functions else None
            return _short(node), "" if before is None else _short(before)
        for kept, maker in reversed(self._kept):
            if kept.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
                return maker, ""
        return "", ""


def _short(node: Any) -> str:
    return str(node.name()).rpartition("::")[2].partition("Backward")[0]


def _low(tensor: Tensor) -> float:
    return float(tensor.min()) if tensor.numel() else math.inf


def _log(args: Sequence[Any], makers: Makers) -> Prone | None:
    x = args[0]
    if not x.requires_grad:
        return None
    maker, low = makers.of(x)[0], _low(x)
    if maker not in _CAN_BE_ZERO and low > 0:
        return None
    return Prone("NS701", f"log of {_made(maker)} without an eps or clamp{_smallest(low)}", low <= 0)


def _sqrt(args: Sequence[Any], makers: Makers) -> Prone | None:
    x = args[0]
    if not x.requires_grad:
        return None
    maker, low = makers.of(x)[0], _low(x)
    if maker not in _SQUARES and low > 0:
        return None
    return Prone("NS702", f"square root of {_made(maker)} without an eps{_smallest(low)}", low <= 0)


def _std(args: Sequence[Any], makers: Makers) -> Prone | None:
    if not args[0].requires_grad:
        return None
    return Prone("NS702", "std without an eps under its root: the gradient is NaN where all values are equal", False)


def _div(args: Sequence[Any], makers: Makers) -> Prone | None:
    y = args[1] if len(args) > 1 else args[0]
    if not isinstance(y, Tensor) or not any(isinstance(a, Tensor) and a.requires_grad for a in args[:2]):
        return None
    maker, before = makers.of(y)
    can_be = maker in _DENOMINATORS | _ANY and not (maker == "Sum" and before in _POSITIVE)
    low = _low(y.abs()) if can_be or y.numel() > 1 else 1.0
    if not can_be and low > 0:
        return None
    return Prone("NS703", f"division by {_made(maker)} without an eps or clamp{_smallest(low)}", low == 0)


def _acos(args: Sequence[Any], makers: Makers) -> Prone | None:
    x = args[0]
    if not x.requires_grad or not x.numel():
        return None
    maker, high = makers.of(x)[0], float(x.abs().max())
    if maker.startswith("Clamp") and high < 1:
        return None
    return Prone("NS704", f"of {_made(maker)} without a clamp; largest |x| here {high:.6g}", high >= 1)


def _pow(args: Sequence[Any], makers: Makers) -> Prone | None:
    base, exponent = args[0], args[1]
    if isinstance(exponent, Tensor):
        exponent = float(exponent) if exponent.numel() == 1 and not exponent.requires_grad else 0.5
    if not isinstance(base, Tensor) or not base.requires_grad or exponent >= 1 or exponent == 0:
        return None
    maker, low = makers.of(base)[0], _low(base if exponent % 1 else base.abs())
    if maker not in _SQUARES and low > 0:
        return None
    return Prone("NS705", f"power {exponent:g} of {_made(maker)} without an eps or clamp{_smallest(low)}", low <= 0)


def _exp(args: Sequence[Any], makers: Makers) -> Prone | None:
    x = args[0]
    if not x.requires_grad or not x.numel():
        return None
    high, limit = float(x.max()), math.log(torch.finfo(x.dtype).max)
    if not high > 0.8 * limit:
        return None
    return Prone("NS706", f"exp of {high:.4g}; {str(x.dtype)[6:]} overflows at {limit:.4g}", True)


def _made(maker: str) -> str:
    names = {"LinalgVectorNorm": "a norm", "Rsub": "a difference", "Sub": "a difference", "Pow": "a power"}
    if maker in _ANY:
        return "the output of a layer"
    return names.get(maker, f"the output of {maker.lower()}" if maker else "a value")


def _smallest(low: float) -> str:
    return f"; smallest here {low:.4g}"


JUDGES: dict[str, Callable[[Sequence[Any], Makers], Prone | None]] = {
    "log": _log, "log_": _log, "log2": _log, "log10": _log, "sqrt": _sqrt, "sqrt_": _sqrt, "rsqrt": _sqrt,
    "rsqrt_": _sqrt, "std": _std, "div": _div, "div_": _div, "reciprocal": _div, "acos": _acos, "asin": _acos,
    "atanh": _acos, "pow": _pow, "pow_": _pow, "exp": _exp, "exp_": _exp,
}  # fmt: skip
