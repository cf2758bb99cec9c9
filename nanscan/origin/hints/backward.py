"""Hints for gradients that are infinite although the value is fine."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from nanscan.origin.hints.row import Row, names
from nanscan.origin.hints.view import View, places, short

__all__ = ["ROWS"]

_NOT_POINTWISE = ("Linalg", "Logsumexp", "Logcumsumexp", "Softmax", "LogSoftmax", "CtcLoss", "Convolution", "Mm", "Bmm")
_DIVISION = names("DivBackward ReciprocalBackward")


def _where_trick(view: View) -> str | None:
    event = view.event
    if not event.zero_gradient or event.phase != "backward" or view.name.startswith(_NOT_POINTWISE):
        return None
    saved, name = view.saved("self"), "input"
    if saved is None:
        saved, name = view.saved("result"), "result"
    value = "" if saved is None else f" ({name} {short(saved)})"
    return (
        f"{view.name}{view.where}{value}: its incoming gradient was exactly 0, so this is the where trick (a branch "
        "that was not taken, or a factor of 0), and 0 * inf is NaN"
    )


def _sqrt(view: View) -> str | None:
    result = view.event.saved.get("result")
    if view.saved("result") != 0.0 or not isinstance(result, Tensor):
        return None
    return f"the gradient of sqrt is 1 / (2 * sqrt(x)), inf at x = 0 ({places(result == 0)})"


def _power(view: View) -> str | None:
    base, exponent = view.saved("self"), view.saved("exponent")
    if base != 0.0 or exponent is None or exponent >= 1:
        return None
    p = short(exponent)
    return f"the gradient of x ** {p} is {p} * x ** {short(exponent - 1)}, inf at x = 0{view.aside}"


def _exponent(view: View) -> str | None:
    base = view.saved("self")
    if view.event.output != 1 and view.event.op != "PowBackward1" or base is None or base > 0:
        return None
    return f"the gradient for the exponent of {short(base)} ** p{view.aside} takes log({short(base)})"


def _at_edge(*edges: float) -> Callable[[View], str | None]:
    def said(view: View) -> str | None:
        value = view.saved("self")
        if value is None or value not in edges:
            return None
        name = view.name.removesuffix("Backward").lower()
        return f"the gradient of {name} is infinite at exactly {short(value)}{view.aside}"

    return said


def _tiny(view: View) -> str | None:
    name = "other" if view.name == "DivBackward" else "self"
    value = view.saved(name)
    if value is None and view.name == "ReciprocalBackward":
        result = view.saved("result")
        value = None if not result else 1.0 / result
    if value is None or view.nan and value == 0.0 and view.event.zero_gradient:
        return None
    if abs(value) > 1e-3:
        return None
    return f"the gradient of a division by {short(value)}{view.aside} divides by its square and overflows"


def _tiny_argument(view: View) -> str | None:
    value = view.saved("self")
    result = view.saved("result")
    if value is None and result:
        value = 1.0 / (result * result)  # rsqrt keeps its result
    if value is None or not abs(value) < 1e-3:
        return None
    name = view.name.removesuffix("Backward").lower()
    return f"the gradient of {name} at {short(value)}{view.aside} is beyond {short(view.limit)}"


def _hypot(view: View) -> str | None:
    if view.saved("result") != 0.0:
        return None
    return f"the gradient of hypot(0, 0){view.where} is 0/0"


def _entropy(view: View) -> str | None:
    values = [view.saved("self"), view.saved("other") if view.name == "XlogyBackward" else 0.0]
    if values != [0.0, 0.0]:
        return None
    name = "entr" if view.name == "SpecialEntrBackward" else "xlogy"
    return f"{name} of a probability of 0{view.aside} is 0, and its gradient is infinite"


def _exp(view: View) -> str | None:
    result, gradient = view.saved("result"), view.gradient
    if result is None or gradient is None or not math.isfinite(result) or view.nan:
        return None
    return (
        f"exp(x) = {short(result)}{view.where} times an incoming gradient of {short(gradient)} overflows {view.dtype}"
    )


ROWS = (
    Row(
        "the where trick",
        frozenset(),
        "torch.where sends a gradient of 0 into the branch that was not taken, where 0 * inf is NaN",
        "Fix the input before the op: a where of its own puts a safe value there, y = where(m, f(where(m, x, 1)), x), "
        "or an eps inside of f",
        _where_trick,
    ),
    Row(
        "sqrt at 0",
        names("SqrtBackward"),
        "its gradient is Inf, and the 0 of a square before it makes NaN of that",
        "Add an eps under the root (torch.sqrt(x + 1e-12)), or use torch.linalg.vector_norm or torch.hypot with an eps",
        _sqrt,
    ),
    Row(
        "fractional power at 0",
        names("PowBackward"),
        "the gradient of x ** p with p < 1 is Inf at x = 0",
        "Add an eps to the base ((x + 1e-6) ** p), or clamp it",
        _power,
    ),
    Row(
        "exponent of a base that is not positive",
        names("PowBackward"),
        "the gradient for the exponent of x ** p is x ** p * log(x)",
        "Clamp the base to positive numbers, or detach the exponent",
        _exponent,
    ),
    Row(
        "acos or asin at ±1",
        names("AcosBackward AsinBackward"),
        "their gradient 1 / sqrt(1 - x²) is infinite at exactly -1 and 1; the cosine of parallel vectors",
        "Clamp the input inside (x.clamp(-1 + 1e-6, 1 - 1e-6)), or take the angle with torch.atan2(sine, cosine)",
        _at_edge(-1.0, 1.0),
    ),
    Row(
        "acosh at 1",
        names("AcoshBackward"),
        "its gradient 1 / sqrt(x² - 1) is infinite at exactly 1; the hyperbolic distance of a point to itself",
        "Clamp the input above 1 (x.clamp(min=1 + 1e-6))",
        _at_edge(1.0),
    ),
    Row(
        "hypot at 0",
        names("HypotBackward"),
        "the gradient of hypot(0, 0) is 0/0",
        "Add an eps (torch.sqrt(x * x + y * y + 1e-12)), or torch.abs(torch.complex(x, y)), whose gradient there is 0",
        _hypot,
    ),
    Row(
        "entr or xlogy at 0",
        names("SpecialEntrBackward XlogyBackward"),
        "the value 0 * log(0) = 0 is right, the gradient -log(0) - 1 is infinite: an action masked with -inf",
        "For -p*log(p) mask the logits with -1e4 instead of -inf and write -(p * logits.log_softmax(-1)), or clamp p",
        _entropy,
    ),
    Row(
        "gradient of a division by a tiny number",
        _DIVISION,
        "the gradient for a divisor is x / divisor², which overflows before the quotient does",
        "Clamp the divisor to a minimum (1e-6)",
        _tiny,
    ),
    Row(
        "gradient of log, rsqrt or lgamma near 0",
        names("LogBackward Log2Backward Log10Backward RsqrtBackward LgammaBackward DigammaBackward"),
        "1 / x, x ** -1.5 and digamma(x) overflow for a subnormal or tiny x although the value itself is fine",
        "Clamp the input to a minimum (1e-6) or add an eps",
        _tiny_argument,
    ),
    Row(
        "gradient of a large exp",
        names("ExpBackward"),
        "the gradient of exp is exp itself: large values times a large gradient overflow",
        "Clamp the argument of exp, or lower the scale of the loss",
        _exp,
    ),
)
