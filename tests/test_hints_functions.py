"""Hints for functions outside of their domain or at its edge, each with a near miss that is healthy."""

from __future__ import annotations

import torch

from tests.hint_cases import INF, Case, case, check, leaf, params

HALF = torch.float16

CASES: list[Case] = [
    case(
        "NaN or Inf repaired after the fact",
        "log(0) is -inf, and nan_to_num after it",
        bad=lambda: torch.log(leaf(0.0, 2.0)).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0),
        healthy=lambda: torch.log(leaf(0.0, 2.0).clamp(min=1e-6)).nan_to_num(nan=0.0),
    ),
    case(
        "NaN or Inf repaired after the fact",
        "log(-1) is nan, and clamp after it",
        bad=lambda: leaf(-1.0, 2.0).log().clamp(min=-10),
        healthy=lambda: leaf(-1.0, 2.0).clamp(min=0.0).log(),
        other=True,
    ),
    case(
        "log of a saturated sigmoid or softmax",
        "log(sigmoid(...)) at [0]",
        "logsigmoid",
        bad=lambda: leaf(-200.0, 1.0).sigmoid().log(),
        healthy=lambda: torch.nn.functional.logsigmoid(leaf(-200.0, 1.0)),
    ),
    case(
        "log of a saturated sigmoid or softmax",
        "the softmax is exactly 0 or 1",
        "log_softmax",
        bad=lambda: leaf(-200.0, 1.0).softmax(-1).log(),
        healthy=lambda: leaf(-200.0, 1.0).log_softmax(-1),
    ),
    case(
        "log of a saturated sigmoid or softmax",
        "sigmoid",
        bad=lambda: (1 - torch.sigmoid(leaf(100.0, 1.0))).log(),
        healthy=lambda: torch.nn.functional.binary_cross_entropy(
            torch.sigmoid(leaf(200.0, 1.0)), torch.tensor([0.0, 1.0])
        ),
    ),
    case(
        "log of a saturated sigmoid or softmax",
        "log(sigmoid(...)) at [0]",
        bad=lambda: torch.log(torch.sigmoid(torch.tensor([-200.0, 1.0]))),
        healthy=lambda: torch.log(torch.tensor([1e-6, 1.0])).softmax(0) * torch.sigmoid(leaf(-200.0)),
    ),
    case(
        "log of a saturated sigmoid or softmax",
        "the softmax",
        bad=lambda: torch.tensor([-200.0, 1.0]).softmax(0).log(),
        healthy=lambda: (torch.tensor([0.0]).log() + 1.0).softmax(0) + torch.zeros(1).log(),
        other=True,
    ),
    case(
        "log of 1 - tanh²",
        "log(1 - tanh(x)**2) at [0]",
        "softplus(-2 * x)",
        bad=lambda: (1 - torch.tanh(leaf(20.0)) ** 2).log(),
        healthy=lambda: (1 - torch.tanh(leaf(2.0)) ** 2).log(),
    ),
    case(
        "log of 0",
        "log(0) is -inf",
        "1 of 2 elements, flat indices [0]",
        bad=lambda: leaf(0.0, 1.0).log(),
        healthy=lambda: leaf(1e-6, 1.0).log(),
    ),
    case(
        "log of 0",
        "log10(0) is -inf",
        bad=lambda: torch.maximum(leaf(1.0, 0.0).log10(), torch.zeros(2)),
        healthy=lambda: torch.maximum(leaf(1.0, 1e-6).log10(), torch.zeros(2)),
    ),
    case(
        "log of 0",
        "log(0) is -inf",
        bad=lambda: torch.zeros(2).log_(),
        healthy=lambda: torch.ones(2).log_(),
    ),
    case(
        "log1p of -1",
        "log1p(-1) is -inf",
        bad=lambda: leaf(-1.0, 1.0).log1p(),
        healthy=lambda: leaf(-0.99, 1.0).log1p(),
    ),
    case(
        "log of a negative number",
        "log(-1) at [1] has no real value",
        bad=lambda: leaf(1.0, -1.0).log(),
        healthy=lambda: leaf(1.0, 1e-6).log(),
    ),
    case(
        "sqrt of a negative number",
        "sqrt(-1e-08) at [0]",
        bad=lambda: leaf(-1e-8, 1.0).sqrt(),
        healthy=lambda: leaf(1e-8, 1.0).sqrt(),
    ),
    case(
        "rsqrt of 0",
        "rsqrt(0) is inf",
        bad=lambda: leaf(0.0, 1.0).rsqrt(),
        healthy=lambda: leaf(1e-6, 1.0).rsqrt(),
    ),
    case(
        "softplus by hand",
        "exp(1000) at [0] overflows float32",
        "softplus",
        bad=lambda: leaf(1000.0, 1.0).exp().log1p(),
        healthy=lambda: torch.nn.functional.softplus(leaf(1000.0, 1.0)),
    ),
    case(
        "softmax or sigmoid by hand",
        "exp(1000) at [0]",
        "torch.softmax",
        bad=lambda: leaf(1000.0, 1.0).exp() / leaf(1000.0, 1.0).exp().sum(),
        healthy=lambda: leaf(80.0, 1.0).exp() / leaf(80.0, 1.0).exp().sum(),
    ),
    case(
        "softplus by hand",
        "softplus",
        bad=lambda: torch.log(torch.exp(leaf(1000.0, 1.0)) + 1),
        healthy=lambda: torch.log(torch.exp(leaf(80.0, 1.0)) + 1),
    ),
    case(
        "softplus by hand",
        "softplus",
        bad=lambda: (1 + leaf(1000.0, 1.0).exp()).log(),
        healthy=lambda: (1 + leaf(80.0, 1.0).exp()).log(),
    ),
    case(
        "softmax or sigmoid by hand",
        "torch.sigmoid",
        bad=lambda: 1 / (1 + torch.exp(-leaf(-1000.0, 1.0))),
        healthy=lambda: 1 / (1 + torch.exp(-leaf(-80.0, 1.0))),
    ),
    case(
        "softmax or sigmoid by hand",
        "torch.sigmoid",
        bad=lambda: 1.0 / (torch.exp(-leaf(-1000.0, 1.0)) + 1.0),
        healthy=lambda: 1.0 / (torch.exp(-leaf(-80.0, 1.0)) + 1.0),
    ),
    case(
        "log of a sum of exps that are all 0",
        "log(0): every exp that was added up is 0 in float32",
        bad=lambda: leaf(-2000.0, -3000.0).exp().sum().log(),
        healthy=lambda: (1 - leaf(0.0).exp()).log(),
        other=True,
    ),
    case(
        "exp overflow",
        "exp(100) at [0] overflows float32, whose exp ends at 88.7",
        bad=lambda: leaf(100.0, 1.0).exp(),
        healthy=lambda: leaf(88.0, 1.0).exp(),
    ),
    case(
        "exp overflow",
        "Clamp its argument",
        bad=lambda: 2 / (1 + 0.5) * torch.exp(leaf(100.0, 1.0)),  # no sigmoid
        healthy=lambda: 2 / (1 + 0.5) * torch.exp(leaf(80.0, 1.0)),
    ),
    case(
        "exp overflow",
        "exp(12) at [0] overflows float16, whose exp ends at 11.09",
        bad=lambda: leaf(12.0, 1.0, dtype=HALF).exp(),
        healthy=lambda: leaf(11.0, 1.0, dtype=HALF).exp(),
    ),
    case(
        "fractional power of a negative number",
        "(-0.5) ** 0.5 at [0]",
        bad=lambda: leaf(-0.5, 2.0) ** 0.5,
        healthy=lambda: leaf(-0.5, 2.0) ** 3.0,
    ),
    case(
        "negative power of 0",
        "0 ** -1.5 at [0]",
        bad=lambda: leaf(0.0, 2.0) ** -1.5,
        healthy=lambda: leaf(0.1, 2.0) ** -1.5,
    ),
    case(
        "function outside of its domain",
        "acos(1.0001) at [0] is outside of its domain",
        bad=lambda: leaf(1.0001, 0.5).acos(),
        healthy=lambda: leaf(0.9999, 0.5).acos(),
    ),
    case(
        "function outside of its domain",
        "erfinv(1.5)",
        bad=lambda: leaf(1.5, 0.0).erfinv(),
        healthy=lambda: leaf(0.9, 0.0).erfinv(),
    ),
    case(
        "acosh below 1",
        "acosh(0.5) at [0] is below 1",
        bad=lambda: leaf(0.5, 2.0).acosh(),
        healthy=lambda: leaf(1.5, 2.0).acosh(),
    ),
    case(
        "atanh or erfinv of ±1",
        "atanh(1) at [0] is infinite",
        bad=lambda: leaf(1.0, 0.5).atanh(),
        healthy=lambda: leaf(0.999, 0.5).atanh(),
    ),
    case(
        "atanh or erfinv of ±1",
        "erfinv(-1) at [0]",
        bad=lambda: leaf(-1.0, 0.5).erfinv(),
        healthy=lambda: leaf(-0.999, 0.5).erfinv(),
    ),
    case(
        "logit of 0 or 1",
        "logit(0) at [0]",
        bad=lambda: leaf(0.0, 0.5).logit(),
        healthy=lambda: leaf(0.0, 0.5).logit(eps=1e-6),
    ),
    case(
        "logit of 0 or 1",
        "logit(1.5) at [0]",
        bad=lambda: leaf(1.5, 0.5).logit(),
        healthy=lambda: leaf(0.99, 0.5).logit(),
    ),
    case(
        "gamma function at a pole",
        "lgamma(0) at [0]",
        bad=lambda: leaf(0.0, 2.0).lgamma(),
        healthy=lambda: leaf(0.1, 2.0).lgamma(),
    ),
    case(
        "sin, cos or tan of Inf",
        "sin(inf) at [0]",
        bad=lambda: torch.sin(torch.tensor([INF, 1.0])),
        healthy=lambda: torch.tan(torch.tensor([1.5707963, 1.0])),
    ),
    case(
        "xlogy of 0 or a negative number",
        "xlogy(1, -1) at [0]",
        bad=lambda: torch.xlogy(leaf(1.0, 1.0), torch.tensor([-1.0, 1.0])),
        healthy=lambda: torch.xlogy(leaf(0.0, 1.0), torch.tensor([1e-6, 1.0])),
    ),
]


@params(CASES)
def test_the_row_speaks_in_its_words_and_not_of_its_healthy_twin(given: Case) -> None:
    check(given)
