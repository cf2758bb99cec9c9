"""Hints for +, -, *, / and what is made of them: zero divisors, 0 · inf, inf − inf."""

from __future__ import annotations

import math
import re

import torch

from nanscan.origin.hints.row import Row, names
from nanscan.origin.hints.view import View, short

__all__ = ["ROWS"]

_DIVISION = names("div true_divide reciprocal divide addcdiv")
# What stands right after the / of the line, for where no gradient is recorded.
_CALLED = r"/\s*\(?\s*(?:[\w.\[\]]|\([\w., -]*\))*"
_COUNTS = _CALLED + r"(?:sum\(|count|num_|numel\(|len\(|\bn_|\bn\b)"
_NORM_CALL = _CALLED + r"norm\("
_SPREAD_CALL = _CALLED + r"(?:(?:std|var|max)\(|(?:std|sigma|spread|range)\b)"
_MIN_MAX = r"\(\s*\w+\s*-\s*(\w+)\s*\)\s*/\s*\(\s*\w+\s*-\s*\1\s*\)"  # (x - low) / (high - low)
_NORMS = {"LinalgVectorNorm", "Norm"}
_SPREADS = {"Std", "Var", "VarMean", "StdMean", "Max", "Amax", "Sqrt", "Min", "Amin"}


def _divisor(view: View) -> float | None:
    return view.value({"reciprocal": 0, "addcdiv": 2}.get(view.name, 1))


def _dividend(view: View) -> float | None:
    return 1.0 if view.name == "reciprocal" else view.value(1 if view.name == "addcdiv" else 0)


def _divided(view: View) -> str | None:
    """What was divided, for a divisor that is exactly 0."""
    if _divisor(view) != 0.0:
        return None
    top = _dividend(view)
    return f"{short(top)} / 0{view.where}: the divisor is exactly 0"


def _by_norm(view: View) -> str | None:
    said = _divided(view)
    made = view.made_by(1)
    if said is None or not (made & _NORMS or (not made and re.search(_NORM_CALL, view.code))):
        return None
    return f"{said}, it is the norm of a zero vector"


def _by_spread(view: View) -> str | None:
    said = _divided(view)
    written = view.made_by(1) & _SPREADS or re.search(f"{_SPREAD_CALL}|{_MIN_MAX}", view.code)
    if said is None or not written or _dividend(view) != 0.0:
        return None
    return f"{said}, it is the spread or maximum of values that are all the same"


def _by_count(view: View) -> str | None:
    divisor = view.operand(1)
    if view.name in ("reciprocal", "addcdiv"):
        return None
    if isinstance(divisor, int):
        return f"{_divided(view)}, a count over an empty selection" if divisor == 0 else None
    if not isinstance(divisor, torch.Tensor):
        return None
    counted = not divisor.is_floating_point() or "Sum" in view.made_by(1) or re.search(_COUNTS, view.code)
    said = _divided(view)
    if said is None or not counted:
        return None
    return f"{said} (shape {list(divisor.shape)}), a count or sum over an empty selection"


def _softmax_underflow(view: View) -> str | None:
    said = _divided(view)
    if said is None or _dividend(view) != 0.0 or not view.only_exp(1):
        return None
    return f"{said}, the sum of exps that are all 0 in {view.dtype} (they underflowed)"


def _zero_by_zero(view: View) -> str | None:
    return _divided(view) if _dividend(view) == 0.0 else None


def _tiny_divisor(view: View) -> str | None:
    top, divisor = _dividend(view), _divisor(view)
    if top is None or divisor is None or divisor == 0 or not math.isfinite(top) or not math.isfinite(divisor):
        return None
    kind = "subnormal" if abs(divisor) < torch.finfo(view.bad.dtype).tiny else "tiny"
    return f"{short(top)} / {short(divisor)}{view.where} is beyond {short(view.limit)}: the divisor is {kind}"


def _inf_by_inf(view: View) -> str | None:
    top, divisor = _dividend(view), _divisor(view)
    if top is None or divisor is None or not (math.isinf(top) and math.isinf(divisor)):
        return None
    return f"{short(top)} / {short(divisor)}{view.where}: both overflowed before"


def _remainder_by_zero(view: View) -> str | None:
    return f"remainder of {short(view.value(0))} by 0{view.where}" if view.value(1) == 0.0 else None


def _operands(view: View) -> tuple[float, float] | None:
    """The two factors, the smaller magnitude first."""
    pair = (view.value(0), view.value(1))
    if pair[0] is None or pair[1] is None:
        return None
    low, high = sorted((pair[0], pair[1]), key=abs)
    return low, high


def _zero_times_log(view: View) -> str | None:
    pair = _operands(view)
    if pair is None or pair[0] != 0.0 or pair[1] != -math.inf:
        return None
    return f"0 * -inf{view.where}: one operand is 0 and the other -inf, as in p * log(p) where p is 0"


def _clipping(view: View) -> str | None:
    if not view.nan or "clip_grad" not in view.code:
        return None
    return "a gradient was Inf, so the norm was Inf, the factor max_norm / norm 0, and Inf * 0 is NaN"


def _mask_times_inf(view: View) -> str | None:
    numbers = [v for v in (view.operand(0), view.operand(1)) if isinstance(v, float)]
    written = [t.numel() == 1 for t in (view.operand(0), view.operand(1)) if isinstance(t, torch.Tensor)]
    pair = _operands(view)
    if pair is None or pair[0] != 0.0 or not math.isinf(pair[1]) or not (numbers or any(written)):
        return None
    return f"0 * {short(pair[1])}{view.where} is NaN: a mask of 0 and 1 was multiplied with {short(pair[1])}"


def _zero_times_inf(view: View) -> str | None:
    pair = _operands(view)
    if pair is None or pair[0] != 0.0 or not math.isinf(pair[1]):
        return None
    return f"0 * {short(pair[1])}{view.where} is NaN: multiplying by a mask of 0 does not remove an Inf"


def _inf_minus_inf(view: View) -> str | None:
    first, second = view.value(0), view.value(1)
    if first is None or second is None or not (math.isinf(first) and math.isinf(second)):
        return None
    sign = "-" if view.name in ("sub", "rsub") else "+"
    return f"{short(first)} {sign} {short(second)}{view.where} is NaN: both operands overflowed or were masked before"


def _inf_in_sum(view: View) -> str | None:
    values = view.operand(0)
    if not view.nan or values is None or not bool((values == math.inf).any() & (values == -math.inf).any()):
        return None
    return "the sum is over both +inf and -inf"


def _inf_in_product(view: View) -> str | None:
    if not view.nan:
        return None
    tensors = [t for t in view.event.inputs if t is not None and t.is_floating_point()]
    if not any(bool(t.isinf().any()) for t in tensors) or any(bool(t.isnan().any()) for t in tensors):
        return None
    return "an Inf in an operand of the matrix product or convolution met a 0 or an Inf of the other sign"


ROWS = (
    Row(
        "division by the norm of a zero vector",
        _DIVISION,
        "x / x.norm() is 0/0 for a vector of zeros",
        "Use torch.nn.functional.normalize(x), or divide by x.norm().clamp(min=eps)",
        _by_norm,
    ),
    Row(
        "division by the spread of constant values",
        _DIVISION,
        "(x - mean) / std or (x - min) / (max - min) is 0/0 where all x are the same, x / x.max() where all are 0",
        "Add an eps to the divisor, or leave constant samples out (nanscan.check_batch finds them)",
        _by_spread,
    ),
    Row(
        "softmax by hand of scores far below 0",
        _DIVISION,
        "exp(x) / exp(x).sum() is 0/0 where every exp underflows to 0",
        "Use torch.softmax(x, dim), which subtracts the maximum first",
        _softmax_underflow,
    ),
    Row(
        "division by a zero count",
        _DIVISION,
        "a sum over an empty selection is divided by its count or its sum of weights, which is 0",
        "Divide by count.clamp(min=1) or max(count, 1), or skip the term when nothing is selected",
        _by_count,
    ),
    Row(
        "0 / 0",
        _DIVISION,
        "both are exactly 0",
        "Add an eps to the divisor or clamp it (counts: clamp(min=1)); for an angle torch.atan2(y, x), not atan(y / x)",
        _zero_by_zero,
    ),
    Row(
        "division by 0",
        _DIVISION,
        "the divisor is exactly 0",
        "Add an eps to the divisor or clamp it away from 0; in a torch.where make it safe before the division",
        _divided,
    ),
    Row(
        "division by a tiny number",
        _DIVISION,
        "the quotient is beyond the dtype's largest number because the divisor is tiny or subnormal",
        "Clamp the divisor to a minimum that fits the dtype, such as 1e-6",
        _tiny_divisor,
    ),
    Row(
        "inf / inf",
        _DIVISION,
        "both overflowed before, as in a softmax written as exp(x) / exp(x).sum()",
        "Keep them finite: torch.softmax subtracts the maximum first",
        _inf_by_inf,
    ),
    Row(
        "remainder by 0",
        names("remainder fmod"),
        "the divisor of % or fmod is 0",
        "Keep the divisor away from 0",
        _remainder_by_zero,
    ),
    Row(
        "clipping of an Inf gradient",
        names("mul"),
        "torch's clip_grad_norm_ multiplies an Inf gradient with max_norm / inf = 0",
        "Use nanscan.clip_grad_norm_ or nanscan.wrap (or error_if_nonfinite=True), and look where the Inf came from",
        _clipping,
    ),
    Row(
        "mask multiplied with -inf",
        names("mul"),
        "(1 - mask) * -inf is NaN where the mask keeps something, since 0 * -inf is NaN",
        "Use scores.masked_fill(mask == 0, -inf) with a boolean mask",
        _mask_times_inf,
    ),
    Row(
        "0 * log 0",
        names("mul"),
        "p * log(p) is 0 * -inf where a probability is 0; nan_to_num mends the value but not the gradient",
        "Use torch.special.entr(p) for -p*log(p) or torch.special.xlogy(p, q) for p*log(q); their gradient at p = 0 is "
        "infinite too, so where it is needed mask logits with -1e4 instead of -inf, or clamp p",
        _zero_times_log,
    ),
    Row(
        "0 * inf",
        names("mul"),
        "an Inf is multiplied by a mask or weight of 0, which makes NaN",
        "Choose with torch.where or masked_fill instead of multiplying, and keep the Inf from being made",
        _zero_times_inf,
    ),
    Row(
        "inf - inf",
        names("add sub rsub"),
        "two Inf are subtracted",
        "Keep both finite: find where they overflowed, or mask after the subtraction",
        _inf_minus_inf,
    ),
    Row(
        "sum over inf and -inf",
        names("sum mean cumsum"),
        "a sum holds both +inf and -inf",
        "Keep the summands finite: clamp the inputs of the op that made them",
        _inf_in_sum,
    ),
    Row(
        "matrix product with Inf",
        names("mm bmm addmm baddbmm convolution dot mv linear"),
        "an Inf (an input, a -inf of a mask, an overflow) in a matrix product or convolution is inf * 0 or inf - inf",
        "Keep the operands finite: nanscan.check_batch looks at what comes in, and masks belong after the product",
        _inf_in_product,
    ),
)
