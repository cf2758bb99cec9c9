"""Hints for arithmetic and constants, each with the fault made to happen and a near miss that is healthy."""

from __future__ import annotations

import torch

from tests.hint_cases import INF, NAN, Case, case, check, leaf, params

NAN_WEIGHT, GOOD_WEIGHT = torch.tensor(NAN), torch.tensor(0.5)


def mask(*values: bool) -> torch.Tensor:
    return torch.tensor(values)


def entropy(logits: torch.Tensor, repaired: bool = False) -> torch.Tensor:
    logp = logits.log_softmax(-1)
    term = logp.exp() * logp
    return -(term.nan_to_num(0.0) if repaired else term)


def standardised(x: torch.Tensor, eps: float = 0.0) -> torch.Tensor:
    spread = x.std()
    return (x - x.mean()) / (spread + eps) if eps else (x - x.mean()) / spread


def over_sum(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    total = weights.sum()
    return (x * weights).sum() / total


def over_its_sum(x: torch.Tensor) -> torch.Tensor:
    return x / x.sum()


def actions(masked: bool) -> torch.Tensor:
    return torch.ones(2, 3, requires_grad=True).masked_fill(
        mask(False, masked).unsqueeze(1) | mask(True, False, False), -INF
    )


def clipped(first: float) -> torch.Tensor:
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([first, 1.0])
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    return weight.grad


def stretched(x: torch.Tensor, eps: float) -> torch.Tensor:
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True) + eps
    return (x - low) / (high - low)


ARITHMETIC = [
    case(
        "division by the norm of a zero vector",
        "0 / 0 at [0]",
        "divisor is exactly 0",
        bad=lambda: torch.zeros(3, requires_grad=True).div(torch.zeros(3, requires_grad=True).norm()),
        healthy=lambda: torch.nn.functional.normalize(torch.zeros(3, requires_grad=True), dim=0),
    ),
    case(
        "division by the spread of constant values",
        "0 / 0 at [0]",
        bad=lambda: standardised(leaf(2.0, 2.0, 2.0)),
        healthy=lambda: standardised(leaf(2.0, 2.0, 2.0), 1e-6),
    ),
    case(
        "softmax by hand of scores far below 0",
        "0 / 0 at [0]",
        "the sum of exps that are all 0 in float32",
        bad=lambda: over_its_sum(leaf(-200.0, -300.0).exp()),
        healthy=lambda: over_its_sum(leaf(0.0, 0.0)),
        other=True,
    ),
    case(
        "row of nothing but -inf minus its maximum",
        "sample 1: all 3 scores of a row are -inf (at [1, 0])",
        bad=lambda: torch.distributions.Categorical(logits=actions(True), validate_args=False).logits,
        healthy=lambda: torch.distributions.Categorical(logits=actions(False), validate_args=False).probs,
    ),
    case(
        "division by a zero count",
        "0 / 0: the divisor",
        "divisor is exactly 0",
        "shape []",
        bad=lambda: (leaf(0.2, 0.7) * mask(False, False)).sum() / mask(False, False).sum(),
        healthy=lambda: (leaf(0.2, 0.7) * mask(False, False)).sum() / mask(False, False).sum().clamp(min=1),
    ),
    case(
        "division by a zero count",
        "0.9 / 0",
        bad=lambda: leaf(0.2, 0.7).sum() / mask(False, False).sum(),
        healthy=lambda: leaf(0.2, 0.7).sum() / mask(True, False).sum(),
    ),
    case(
        "division by a zero count",
        "empty selection",
        bad=lambda: over_sum(leaf(0.2, 0.7), torch.zeros(2, requires_grad=True)),
        healthy=lambda: over_sum(leaf(0.2, 0.7), torch.ones(2, requires_grad=True)),
    ),
    case(
        "0 / 0",
        "0 / 0 at [0]",
        "divisor is exactly 0",
        bad=lambda: torch.atan(leaf(0.0, 1.0) / leaf(0.0, 1.0)),
        healthy=lambda: torch.atan2(leaf(0.0, 1.0), leaf(0.0, 1.0)),
    ),
    case(
        "division by 0",
        "3 / 0 at [1]",
        bad=lambda: leaf(2.0, 3.0) / leaf(1.0, 0.0),
        healthy=lambda: leaf(2.0, 3.0) / leaf(1.0, 1e-6),
    ),
    case(
        "division by 0",
        "1 / 0 at [0]",
        bad=lambda: leaf(0.0, 1.0).reciprocal(),
        healthy=lambda: leaf(0.5, 1.0).reciprocal(),
    ),
    case(
        "division by a tiny number",
        "divisor is subnormal",
        bad=lambda: torch.ones(2) / torch.tensor([1e-40, 1.0]),
        healthy=lambda: torch.ones(2) / torch.tensor([1e-30, 1.0]),
    ),
    case(
        "division by a tiny number",
        "divisor is tiny",
        bad=lambda: torch.full((2,), 1e20) / torch.tensor([1e-30, 1.0]),
        healthy=lambda: torch.full((2,), 1e20) / torch.tensor([1e-10, 1.0]),
    ),
    case(
        "inf / inf",
        "inf / inf at [0]",
        bad=lambda: leaf(1000.0, 1.0).exp().div(leaf(1000.0, 1.0).exp().sum()),
        healthy=lambda: leaf(1000.0, 1.0).softmax(0),
    ),
    case(
        "remainder by 0",
        "remainder of 1 by 0",
        bad=lambda: leaf(1.0) % 0.0,
        healthy=lambda: leaf(1.0) % 0.5,
    ),
    case(
        "0 * log 0",
        "one operand is 0 and the other -inf",
        "torch.special.entr",
        "xlogy",
        bad=lambda: entropy(leaf(0.0, 0.0, -INF)),
        healthy=lambda: torch.special.entr(leaf(0.0, 0.0, -INF).softmax(-1).detach()),
    ),
    case(
        "0 * log 0",
        "at [2]",
        bad=lambda: entropy(leaf(0.0, 0.0, -INF), repaired=True),
        healthy=lambda: entropy(leaf(0.0, 0.0, -50.0)),
    ),
    case(
        "clipping of an Inf gradient",
        "Inf * 0 is NaN",
        bad=lambda: clipped(INF),
        healthy=lambda: clipped(1e30),
    ),
    case(
        "division by the spread of constant values",
        "0 / 0 at [1, 0]",
        "nanscan.check_batch",
        bad=lambda: stretched(torch.tensor([[1.0, 2.0], [3.0, 3.0]]), 0.0),
        healthy=lambda: stretched(torch.tensor([[1.0, 2.0], [3.0, 3.0]]), 1e-6),
    ),
    case(
        "mask multiplied with -inf",
        "0 * -inf at [0] is NaN: a mask of 0 and 1 was multiplied",
        bad=lambda: torch.tensor([0.0, 1.0]) * -INF,
        healthy=lambda: leaf(1.0, 2.0).masked_fill(mask(False, True), -INF).softmax(0),
    ),
    case(
        "division by a zero count",
        "0.2 / 0 at [0]",
        "a count over an empty selection",
        bad=lambda: leaf(0.2, 0.7) / 0,
        healthy=lambda: leaf(0.2, 0.7) / 1,
    ),
    case(
        "division by the spread of constant values",
        "spread or maximum",
        bad=lambda: torch.zeros(2) / torch.zeros(2).abs().max(),
        healthy=lambda: torch.zeros(2) / torch.zeros(2).abs().max().clamp(min=1e-6),
    ),
    case(
        "division by 0",
        "2 / 0 at [0]",
        bad=lambda: torch.addcdiv(torch.zeros(2), torch.tensor([2.0, 3.0]), torch.tensor([0.0, 1.0])),
        healthy=lambda: torch.addcdiv(torch.zeros(2), torch.tensor([2.0, 3.0]), torch.tensor([0.5, 1.0])),
    ),
    case(
        "softmax or sigmoid by hand",
        "torch.sigmoid",
        bad=lambda: leaf(1000.0, 1.0).exp() / (1 + leaf(1000.0, 1.0).exp()),
        healthy=lambda: torch.sigmoid(leaf(1000.0, 1.0)),
    ),
    case(
        "0 * inf",
        "0 * inf at [0]",
        bad=lambda: leaf(1000.0, 1.0).exp() * torch.tensor([0.0, 1.0]),
        healthy=lambda: leaf(80.0, 1.0).exp() * torch.tensor([0.0, 1.0]),
    ),
    case(
        "weight_norm of a zero weight",
        "1 of 2 elements, flat indices [1]",
        bad=lambda: torch._weight_norm(torch.tensor([[1.0, 2.0], [0.0, 0.0]], requires_grad=True), torch.ones(2, 1)),
        healthy=lambda: torch._weight_norm(torch.ones(2, 2, requires_grad=True), torch.zeros(2, 1)),
    ),
    case(
        "log_softmax of scores too far apart",
        "from -65504 to 100 at [0]: their distance is beyond 65504",
        bad=lambda: leaf(-65504.0, 100.0, dtype=torch.float16).log_softmax(-1),
        healthy=lambda: leaf(-1e4, 100.0, dtype=torch.float16).log_softmax(-1),
    ),
    case(
        "p * log p by hand",
        "log(0) at [1] in a sum of p * log(p)",
        "masked by -1e4",
        bad=lambda: (lambda p: (p * p.log()).sum())(leaf(0.0, -INF).softmax(-1)),
        healthy=lambda: (lambda p: (p * p.log()).sum())(leaf(0.0, -9.0).softmax(-1)),
    ),
    case(
        "inf - inf",
        "inf - inf at [0] is NaN",
        bad=lambda: leaf(INF, 1.0) - leaf(INF, 1.0),
        healthy=lambda: leaf(INF, 1.0) - leaf(-INF, 1.0),
    ),
    case(
        "inf - inf",
        "inf + -inf at [0] is NaN",
        bad=lambda: leaf(INF, 1.0) + leaf(-INF, 1.0),
        healthy=lambda: leaf(-INF, 1.0) + leaf(-INF, 1.0),
    ),
    case(
        "sum over inf and -inf",
        "both +inf and -inf",
        bad=lambda: leaf(INF, -INF).sum(),
        healthy=lambda: leaf(-INF, -INF).sum(),
        other=True,  # a loss of -inf
    ),
    case(
        "matrix product with Inf",
        "an Inf in an operand",
        bad=lambda: torch.tensor([[-INF, 1.0]]) @ torch.tensor([[0.0], [1.0]]),
        healthy=lambda: torch.tensor([[-1e4, 1.0]]) @ torch.tensor([[0.0], [1.0]]),
    ),
]

OUTSIDE = [
    case(
        "NaN written by the program",
        "writes NaN here",
        bad=lambda: torch.zeros(2).fill_(NAN) + 1,
        healthy=lambda: torch.zeros(2).fill_(-INF) + 1,
    ),
    case(
        "bad constant",
        "a single NaN",
        bad=lambda: leaf(1.0, 2.0) * NAN_WEIGHT,
        healthy=lambda: leaf(1.0, 2.0) * GOOD_WEIGHT,
    ),
    case(
        "logdet of a negative determinant",
        "logdet gives NaN",
        bad=lambda: torch.logdet(torch.diag(torch.tensor([-1.0, 1.0])).requires_grad_()),
        healthy=lambda: torch.linalg.slogdet(torch.diag(torch.tensor([-1.0, 1.0])).requires_grad_()).logabsdet,
    ),
]

CASES: list[Case] = [*ARITHMETIC, *OUTSIDE]


@params(CASES)
def test_the_row_speaks_in_its_words_and_not_of_its_healthy_twin(given: Case) -> None:
    check(given)
