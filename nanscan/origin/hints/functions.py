"""Hints for functions outside their domain or at its edge: log, sqrt, exp, pow, acos, logit, lgamma and the like."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from nanscan.origin.hints.row import Row, names
from nanscan.origin.hints.view import View, places, short

__all__ = ["ROWS"]

_LOGS = names("log log2 log10")
_IN = r"(?:[^()]|\([^()]*\))*"  # what stands within a pair of brackets
_ONE = r"1(\.0*)?\s*"
# log(1 + exp(x)), log(exp(x) + 1), (1 + x.exp()).log()
_SOFTPLUS = "|".join(
    (
        rf"log1p|log\(\s*{_ONE}\+",
        rf"log\({_IN}exp\({_IN}\)\s*\+\s*{_ONE}\)",
        rf"\(\s*{_ONE}\+{_IN}exp\({_IN}\)\s*\)\.log\(",
    )
)
# exp(x) / exp(x).sum(), exp(x) / (1 + exp(x)), 1 / (1 + exp(-x)), 1 / (exp(-x) + 1)
_SOFTMAX = "|".join(
    (
        rf"exp\(.*/.*(\bsum\(|\b{_ONE}\+)",
        rf"/\s*\(\s*{_ONE}\+{_IN}exp\(",
        rf"/\s*\({_IN}exp\({_IN}\)\s*\+\s*{_ONE}\)",
    )
)
_EDGE = {"log1p": -1.0}
_SATURATING = {
    "Sigmoid": ("sigmoid", "torch.nn.functional.logsigmoid"),
    "Softmax": ("softmax", "torch.nn.functional.log_softmax"),
}


def _equal(edge: float, word: str) -> Callable[[View], str | None]:
    def said(view: View) -> str | None:
        values = view.operand(0)
        if view.value(0) != edge:
            return None
        return f"{view.name}({short(edge)}) is {word} ({places(values == edge)})"

    return said


def _repaired(view: View) -> str | None:
    """`log(x).nan_to_num()`: only plain calls are read, so that `log(x.clamp(...))` is none."""
    match = re.search(rf"\b{view.name}\([^()]*(?:\([^()]*\))?[^()]*\)\.(nan_to_num|clamp\w*|clip)\(", view.code)
    if match is None:
        return None
    made = short(float(view.bad[tuple(view.at)]))
    return (
        f"{view.name}({short(view.value(0))}) is {made}, and {match[1]} after it mends the value but not the gradient"
    )


def _saturated(view: View) -> str | None:
    if view.value(0) != 0.0:
        return None
    made = view.made_by(0)
    for node, (name, better) in _SATURATING.items():
        if node in made or (not made and _log_of(name, view.code)):
            return f"{view.name}({name}(...)){view.where}: the {name} is exactly 0 or 1 in {view.dtype}, use {better}"
    return None


def _log_of(name: str, code: str) -> bool:
    """`torch.log(torch.sigmoid(` or `.sigmoid(x).log(`, where no gradient is recorded."""
    before, after = rf"\blog\w*\((?:1\s*-\s*)?[\w.]*\b{name}\(", rf"\b{name}\([^()]*\)\.log"
    return re.search(f"{before}|{after}", code) is not None


def _squashed(view: View) -> str | None:
    if view.value(0) != 0.0 or "Tanh" not in view.made_by(0):
        return None
    return f"{view.name}(1 - tanh(x)**2){view.where}: the tanh is exactly -1 or 1 in {view.dtype}"


def _negative(view: View) -> str | None:
    value, edge = view.value(0), _EDGE.get(view.name, 0.0)
    return f"{view.name}({short(value)}){view.where} has no real value" if value is not None and value < edge else None


def _overflow(view: View) -> str | None:
    value = view.value(0)
    if view.nan or value is None or not math.isfinite(value):
        return None
    largest = math.log2(view.limit) if view.name == "exp2" else math.log(view.limit)
    return f"{view.name}({short(value)}){view.where} overflows {view.dtype}, whose exp ends at {largest:.5g}"


def _softplus(view: View) -> str | None:
    return _overflow(view) if view.name == "exp" and re.search(_SOFTPLUS, view.code) else None


def _softmax_by_hand(view: View) -> str | None:
    return _overflow(view) if view.name == "exp" and re.search(_SOFTMAX, view.code) else None


def _underflowed(view: View) -> str | None:
    if view.value(0) != 0.0 or not view.only_exp(0):
        return None
    return f"{view.name}(0){view.where}: every exp that was added up is 0 in {view.dtype} (it underflowed)"


def _root_of_negative(view: View) -> str | None:
    base, exponent = view.value(0), view.value(1)
    if base is None or exponent is None or not base < 0 or exponent == int(exponent):
        return None
    return f"({short(base)}) ** {short(exponent)}{view.where}: such a power has no real value"


def _zero_to_negative(view: View) -> str | None:
    base, exponent = view.value(0), view.value(1)
    if base != 0.0 or exponent is None or exponent >= 0:
        return None
    return f"0 ** {short(exponent)}{view.where} is a division by 0"


def _outside(view: View) -> str | None:
    value = view.value(0)
    if not view.nan or value is None or -1.0 <= value <= 1.0:
        return None
    return f"{view.name}({short(value)}){view.where} is outside of its domain, -1 to 1"


def _below_one(view: View) -> str | None:
    value = view.value(0)
    return f"acosh({short(value)}){view.where} is below 1" if value is not None and value < 1.0 else None


def _pole_at_one(view: View) -> str | None:
    value = view.value(0)
    if view.nan or value is None or abs(value) != 1.0:
        return None
    return f"{view.name}({short(value)}){view.where} is infinite"


def _logit(view: View) -> str | None:
    value = view.value(0)
    if value is None or 0.0 < value < 1.0:
        return None
    return f"logit({short(value)}){view.where}: it needs 0 < p < 1"


def _gamma(view: View) -> str | None:
    value = view.value(0)
    if value is None or value > 0 or value != math.floor(value):
        return None
    return f"{view.name}({short(value)}){view.where} is a pole"


def _trigonometric(view: View) -> str | None:
    value = view.value(0)
    if value is None or not math.isinf(value):
        return None
    return f"{view.name}({short(value)}){view.where}: the argument was Inf before"


def _xlogy(view: View) -> str | None:
    x, y = view.value(0), view.value(1)
    if x is None or y is None or y > 0:
        return None
    return f"xlogy({short(x)}, {short(y)}){view.where}: its log is of {'a negative number' if y < 0 else '0'}"


ROWS = (
    Row(
        "NaN or Inf repaired after the fact",
        _LOGS | names("sqrt rsqrt log1p acos asin reciprocal pow"),
        "nan_to_num or clamp after the op mends the value in forward; in backward 0 * inf is NaN all the same",
        "Fix the input before the op: clamp it or choose a safe value with torch.where",
        _repaired,
    ),
    Row(
        "log of a saturated sigmoid or softmax",
        _LOGS,
        "sigmoid and softmax are exactly 0 (or 1) for large logits, and their log is -inf",
        "The fused functions don't overflow: logsigmoid, log_softmax, cross_entropy, binary_cross_entropy_with_logits",
        _saturated,
    ),
    Row(
        "log of 1 - tanh²",
        _LOGS,
        "the log-density of a tanh-squashed action: tanh(x) is exactly ±1 for x beyond ±9",
        "Use the stable form 2 * (math.log(2) - x - torch.nn.functional.softplus(-2 * x))",
        _squashed,
    ),
    Row(
        "log of a sum of exps that are all 0",
        _LOGS,
        "log(exp(x).sum()) of scores far below 0: each exp is 0, and the log of their sum is -inf",
        "Use torch.logsumexp(x, dim), which subtracts the maximum first",
        _underflowed,
    ),
    Row(
        "log of 0",
        _LOGS,
        "log(0) is -inf",
        "Clamp the input before the log (x.clamp(min=1e-6)) or stay in log space; for p*log(p) use torch.special.entr",
        _equal(0.0, "-inf"),
    ),
    Row(
        "log1p of -1",
        names("log1p"),
        "log1p(-1) is log(0), which is -inf",
        "Keep the input above -1, for example with x.clamp(min=-1 + 1e-6)",
        _equal(-1.0, "-inf"),
    ),
    Row(
        "log of a negative number",
        _LOGS | names("log1p special_entr"),
        "it has no real value",
        "Clamp the input before the log (x.clamp(min=1e-6)), or make it positive with softplus or exp",
        _negative,
    ),
    Row(
        "sqrt of a negative number",
        names("sqrt rsqrt"),
        "it has no real value; often a variance E[x²] - E[x]² that rounding made negative",
        "Clamp before the root (x.clamp(min=eps).sqrt()), and compute variances with torch.var",
        _negative,
    ),
    Row(
        "rsqrt of 0",
        names("rsqrt"),
        "1 / sqrt(0) is Inf; RMSNorm and normalisation of a zero vector without eps",
        "Add an eps under the root: torch.rsqrt(x + eps), in a norm layer eps=1e-6",
        _equal(0.0, "inf"),
    ),
    Row(
        "softplus by hand",
        names("exp"),
        "log(1 + exp(x)) overflows for large x although its value is about x",
        "Use torch.nn.functional.softplus(x)",
        _softplus,
    ),
    Row(
        "softmax or sigmoid by hand",
        names("exp"),
        "exp(x) / exp(x).sum() and exp(x) / (1 + exp(x)) are inf / inf for large x; 1 / (1 + exp(-x)) in backward",
        "Use torch.softmax(x, dim), which subtracts the maximum first, or torch.sigmoid(x)",
        _softmax_by_hand,
    ),
    Row(
        "exp overflow",
        names("exp exp2 expm1 sinh cosh"),
        "exp(x) is beyond the dtype's largest number: above 88.7 in float32, above 11 in float16",
        "Clamp its argument (a log-variance, a ratio), subtract the maximum, or stay in log space (torch.logsumexp)",
        _overflow,
    ),
    Row(
        "fractional power of a negative number",
        names("pow float_power"),
        "x ** p with a fractional p has no real value for x < 0",
        "Clamp the base to positive numbers, or use x.sign() * (x.abs() + eps) ** p",
        _root_of_negative,
    ),
    Row(
        "negative power of 0",
        names("pow float_power"),
        "0 ** -p is a division by 0",
        "Clamp the base away from 0 before the power",
        _zero_to_negative,
    ),
    Row(
        "function outside of its domain",
        names("acos asin atanh erfinv"),
        "acos, asin, atanh and erfinv need values between -1 and 1; rounding leads beyond",
        "Clamp the input into the domain, with a margin for the gradient (x.clamp(-1 + 1e-6, 1 - 1e-6))",
        _outside,
    ),
    Row(
        "acosh below 1",
        names("acosh"),
        "acosh has no real value below 1; rounding leads there",
        "Clamp the input, with a margin for the gradient (x.clamp(min=1 + 1e-6))",
        _below_one,
    ),
    Row(
        "atanh or erfinv of ±1",
        names("atanh erfinv"),
        "both are infinite at -1 and 1",
        "Clamp the input, with a margin that the dtype resolves (x.clamp(-1 + 1e-6, 1 - 1e-6))",
        _pole_at_one,
    ),
    Row(
        "logit of 0 or 1",
        names("logit"),
        "logit(p) is infinite at 0 and 1 and has no value outside",
        "Give it an eps: torch.logit(p, eps=1e-6)",
        _logit,
    ),
    Row(
        "gamma function at a pole",
        names("lgamma digamma polygamma mvlgamma"),
        "lgamma and digamma are infinite at 0 and the negative integers",
        "Keep the argument positive (softplus(x) + eps)",
        _gamma,
    ),
    Row(
        "sin, cos or tan of Inf",
        names("sin cos tan"),
        "an angle that overflowed has no sine",
        "Keep the angle finite: reduce it modulo 2π before it grows, or lower the frequency",
        _trigonometric,
    ),
    Row(
        "xlogy of 0 or a negative number",
        names("xlogy special_xlog1py"),
        "x * log(y) with x not 0 is infinite for y = 0 and has no value for y < 0",
        "Clamp y before (y.clamp(min=1e-6))",
        _xlogy,
    ),
)
