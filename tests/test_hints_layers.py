"""Hints for reductions, norm layers, attention, losses and optimizers, each with a healthy near miss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hint_cases import INF, Case, case, check, leaf, params

HALF = torch.float16
SECOND_MASKED = torch.tensor([[False, False, False], [True, True, True]])
LAST_KEY_MASKED = torch.tensor([[False, False, False], [False, True, True]])


def scores(masked: Tensor) -> Tensor:
    return torch.randn(2, 3, requires_grad=True).masked_fill(masked, -INF)


def attend(masked: Tensor, heads: int = 1, need_weights: bool = True) -> Tensor:
    attn = nn.MultiheadAttention(4, heads, batch_first=True)
    x = torch.randn(len(masked), 3, 4)
    out: Tensor = attn(x, x, x, key_padding_mask=masked, need_weights=need_weights)[0]
    return out[0]


def attend_without_gradients(masked: Tensor) -> Tensor:
    with torch.no_grad():  # in training mode: the fused kernel is for eval
        return attend(masked, heads=2)


def attend_4d(masked: Tensor) -> Tensor:
    q = torch.randn(2, 2, 3, 4, requires_grad=True)
    weights = (q @ q.transpose(-1, -2)).masked_fill(masked[:, None, None], -INF).softmax(-1)
    return (weights @ q)[0]


def encode(masked: Tensor) -> Tensor:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    with torch.no_grad():
        out: Tensor = layer(torch.randn(2, 3, 4), src_key_padding_mask=masked)
    return out


def evaluate(variance: float, eps: float) -> Tensor:
    norm = nn.BatchNorm1d(3, eps=1e-5).eval()
    norm.running_var.fill_(variance)
    norm.eps = eps
    out: Tensor = norm(torch.ones(4, 3))
    return out


def add_masks(first: float, second: float) -> Tensor:
    logits = torch.zeros(1, 2, dtype=HALF, requires_grad=True)
    return (logits + torch.full((1, 2), first, dtype=HALF)) + torch.full((1, 2), second, dtype=HALF)


def add_mask_in_place(second: float) -> Tensor:
    logits = torch.full((1, 2), -60000.0, dtype=HALF)
    logits += second
    return logits


def step(make: Any, dtype: torch.dtype, **settings: Any) -> Tensor:
    weight = nn.Parameter(torch.ones(2, dtype=dtype))
    optimizer = make([weight], lr=1e-3, **settings)
    weight.grad = torch.zeros(2, dtype=dtype)
    optimizer.step()
    return weight.detach()


def ctc(input_length: int, **settings: Any) -> Tensor:
    logp = torch.randn(input_length, 1, 4, requires_grad=True).log_softmax(-1)
    lengths = torch.tensor([input_length]), torch.tensor([3])
    return F.ctc_loss(logp, torch.tensor([[1, 1, 2]]), *lengths, **settings)


def class_loss(labels: list[int], **settings: Any) -> Tensor:
    return F.cross_entropy(torch.randn(len(labels), 3, requires_grad=True), torch.tensor(labels), **settings)


def plogp(p: Tensor) -> Tensor:
    return (p * p.log()).sum()


def normalised_in_half(eps: float) -> Tensor:
    x = torch.ones(2, 4, dtype=HALF)
    return x.sub(x.mean()) / (x.std() + eps)


REDUCTIONS = [
    case(
        "mean of an empty selection",
        "mean of an empty selection",
        "shape [0]",
        bad=lambda: leaf(0.2, 0.7)[torch.tensor([False, False])].mean(),
        healthy=lambda: leaf(0.2, 0.7)[torch.tensor([False, False])].sum(),
    ),
    case(
        "mean of an empty selection",
        "mse_loss of an empty selection",
        bad=lambda: F.mse_loss(leaf(0.2)[:0], torch.zeros(0)),
        healthy=lambda: F.mse_loss(leaf(0.2)[:1], torch.zeros(1)),
    ),
    case(
        "mean of an empty selection",
        "shape [0, 3]",
        bad=lambda: F.cross_entropy(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)),
        healthy=lambda: F.cross_entropy(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), reduction="sum"),
    ),
    case(
        "mean of an empty selection",
        "of an empty selection",
        bad=lambda: F.binary_cross_entropy_with_logits(torch.zeros(0), torch.zeros(0)),
        healthy=lambda: F.binary_cross_entropy_with_logits(torch.zeros(1), torch.zeros(1)),
    ),
    case(
        "mean of an empty selection",
        "of an empty selection",
        bad=lambda: F.kl_div(torch.zeros(0), torch.zeros(0), reduction="mean"),
        healthy=lambda: F.kl_div(torch.zeros(0), torch.zeros(0), reduction="sum"),
    ),
    case(
        "std or var of one element",
        "std over one element",
        "correction=1",
        bad=lambda: leaf(1.0).std(),
        healthy=lambda: leaf(1.0).std(correction=0),
    ),
    case(
        "std or var of one element",
        "input [3, 1]",
        bad=lambda: torch.randn(3, 1, requires_grad=True).var(-1),
        healthy=lambda: torch.randn(3, 1, requires_grad=True).var(0),
    ),
    case(
        "norm overflow",
        "beyond 65504",
        bad=lambda: torch.full((3,), 6e4, dtype=HALF).norm(),
        healthy=lambda: torch.linalg.vector_norm(torch.full((3,), 6e4, dtype=HALF), dtype=torch.float32),
    ),
    case(
        "logsumexp of all -inf",
        "row 1: logsumexp of nothing but -inf",
        bad=lambda: torch.tensor([[0.0, 1.0], [-INF, -INF]], requires_grad=True).logsumexp(-1),
        healthy=lambda: scores(LAST_KEY_MASKED).logsumexp(-1),
    ),
    case(
        "logsumexp of all -inf",
        "logaddexp of nothing but -inf",
        bad=lambda: torch.logaddexp(leaf(-INF, 1.0), torch.tensor([-INF, 1.0])),
        healthy=lambda: torch.logaddexp(leaf(0.0, 1.0), torch.tensor([-INF, 1.0])),
    ),
    case(
        "logsumexp of +inf",
        "logsumexp of +inf",
        bad=lambda: leaf(1.0, 2.0).masked_fill(torch.tensor([True, False]), INF).logsumexp(-1),
        healthy=lambda: leaf(1e38, 1.0).logsumexp(-1),
    ),
]


def statistics_of(x: torch.Tensor) -> torch.Tensor:
    """A batch norm in training, called past the check of the layer's own forward."""
    mean, var = torch.zeros(3), torch.ones(3)
    return torch.batch_norm(x, None, None, mean, var, True, 0.1, 1e-5, False)


NORMALISATION = [
    case(
        "BatchNorm with an unusable running_var",
        "running_var is 0 (0) with eps=0 in 3 of 3",
        bad=lambda: evaluate(0.0, 0.0),
        healthy=lambda: evaluate(0.0, 1e-5),
    ),
    case(
        "BatchNorm with an unusable running_var",
        "running_var is negative (-1)",
        bad=lambda: evaluate(-1.0, 1e-5),
        healthy=lambda: evaluate(1.0, 1e-5),
    ),
    case(
        "BatchNorm over one value per channel",
        "one value per channel (input [1, 3])",
        bad=lambda: statistics_of(torch.ones(1, 3)),
        healthy=lambda: statistics_of(torch.ones(2, 3)),
    ),
    case(
        "running statistics overflow",
        "the input is up to 1e+25",
        bad=lambda: statistics_of(torch.tensor([[1e25, -1e25, 1.0], [0.0, 0.0, 0.0]])),
        healthy=lambda: statistics_of(torch.tensor([[1e15, -1e15, 1.0], [0.0, 0.0, 0.0]])),
    ),
    case(
        "normalisation with eps=0",
        "eps=0",
        "input [2, 4]",
        bad=lambda: nn.LayerNorm(4, eps=0.0)(torch.ones(2, 4)),
        healthy=lambda: nn.LayerNorm(4)(torch.ones(2, 4)),
    ),
    case(
        "normalisation with eps=0",
        "eps=0",
        bad=lambda: nn.GroupNorm(2, 4, eps=0.0)(torch.ones(2, 4, 3)),
        healthy=lambda: nn.BatchNorm1d(4)(torch.ones(2, 4, 3)),
    ),
    case(
        "RMSNorm with eps=0",
        "RMSNorm of a zero vector",
        bad=lambda: nn.RMSNorm(4, eps=0.0)(torch.zeros(2, 4, requires_grad=True)),
        healthy=lambda: nn.RMSNorm(4, eps=1e-6)(torch.zeros(2, 4, requires_grad=True)),
    ),
]

ATTENTION = [
    case(
        "softmax over a fully masked row",
        "sample 1: all keys masked, softmax",
        bad=lambda: scores(SECOND_MASKED).softmax(-1),
        healthy=lambda: scores(LAST_KEY_MASKED).softmax(-1),
    ),
    case(
        "softmax over a fully masked row",
        "all keys masked, log_softmax",
        bad=lambda: scores(SECOND_MASKED).log_softmax(-1),
        healthy=lambda: scores(LAST_KEY_MASKED).log_softmax(-1),
    ),
    case(
        "softmax over a fully masked row",
        "sample 1: all keys masked",
        bad=lambda: attend(SECOND_MASKED),
        healthy=lambda: attend(SECOND_MASKED, need_weights=False),
    ),
    case(
        "softmax over a fully masked row",
        "sample 1: all keys masked",
        bad=lambda: attend(SECOND_MASKED, heads=2),
        healthy=lambda: attend(LAST_KEY_MASKED, heads=2),
    ),
    case(
        "softmax over a fully masked row",
        "sample 1: all keys masked",
        "(at [1, 0, 0, 0])",
        bad=lambda: attend_4d(SECOND_MASKED),
        healthy=lambda: attend_4d(LAST_KEY_MASKED),
    ),
    case(
        "softmax over a fully masked row",
        "row 2 of batch * heads: all keys masked",
        bad=lambda: attend_without_gradients(SECOND_MASKED),
        healthy=lambda: attend_without_gradients(LAST_KEY_MASKED),
    ),
    case(
        "fused attention with a fully masked row",
        "sample 1: all keys masked, row [1] of the mask [2, 3]",
        bad=lambda: encode(SECOND_MASKED),
        healthy=lambda: encode(LAST_KEY_MASKED),
    ),
    case(
        "softmax of +inf",
        "a score of the row at [0] is +inf",
        bad=lambda: leaf(INF, 1.0).softmax(-1),
        healthy=lambda: leaf(1e38, 1.0).softmax(-1),
    ),
    case(
        "mask added twice",
        "finfo.min + finfo.min = -inf in float16",
        bad=lambda: add_masks(-65504.0, -65504.0).softmax(-1),
        healthy=lambda: add_masks(-65504.0, 0.0).softmax(-1),
    ),
    case(
        "mask added twice",
        "finfo.min = -inf in float16",
        bad=lambda: add_mask_in_place(-65504.0).softmax(-1),
        healthy=lambda: add_mask_in_place(-1000.0).softmax(-1),
    ),
]

LOSSES = [
    case(
        "cross-entropy with every target ignored",
        "all 2 targets equal ignore_index -100",
        bad=lambda: class_loss([-100, -100]),
        healthy=lambda: class_loss([-100, 1]),
    ),
    case(
        "cross-entropy with every target ignored",
        "all 32 targets equal ignore_index 255",
        bad=lambda: F.cross_entropy(torch.randn(2, 3, 4, 4), torch.full((2, 4, 4), 255), ignore_index=255),
        healthy=lambda: F.cross_entropy(
            torch.randn(2, 3, 4, 4), torch.full((2, 4, 4), 255), ignore_index=255, reduction="sum"
        ),
    ),
    case(
        "cross-entropy with weights of 0",
        "target classes in the batch ([1]) are 0",
        bad=lambda: class_loss([1, 1], weight=torch.tensor([1.0, 0.0, 1.0])),
        healthy=lambda: class_loss([1, 2], weight=torch.tensor([1.0, 0.0, 1.0])),
    ),
    case(
        "cross-entropy of a masked class",
        "sample 1 has target class 2, whose log-probability is -inf (1 of 2 targets)",
        bad=lambda: F.cross_entropy(scores(LAST_KEY_MASKED), torch.tensor([0, 2])),
        healthy=lambda: F.cross_entropy(scores(LAST_KEY_MASKED), torch.tensor([0, -100])),
    ),
    case(
        "CTC without a possible alignment",
        "sample 0: its target needs 4 time steps (labels and repeats), its input has 3",
        "zero_infinity=True",
        bad=lambda: ctc(3),
        healthy=lambda: ctc(3, zero_infinity=True),
    ),
    case(
        "CTC without a possible alignment",
        "its input has 2",
        bad=lambda: ctc(2),
        healthy=lambda: ctc(4),
    ),
    case(
        "cross-entropy of an empty batch",
        "cross_entropy of an empty batch",
        bad=lambda: F.cross_entropy(torch.zeros(0, 3), torch.zeros(0, 3)),
        healthy=lambda: F.cross_entropy(torch.zeros(0, 3), torch.zeros(0, 3), reduction="sum"),
    ),
    case(
        "soft targets against -inf",
        "a target of 0 met a log-probability of -inf at [0, 1]",
        bad=lambda: F.cross_entropy(torch.tensor([[0.0, -INF]], requires_grad=True), torch.tensor([[1.0, 0.0]])),
        healthy=lambda: F.cross_entropy(torch.tensor([[0.0, -INF]], requires_grad=True), torch.tensor([0])),
    ),
    case(
        "kl_div with a target that is no probability",
        "the target of kl_div is -1 at [0]",
        bad=lambda: F.kl_div(leaf(0.1, 0.9).log(), torch.tensor([-1.0, 0.5]), reduction="sum"),
        healthy=lambda: F.kl_div(leaf(0.1, 0.9).log(), torch.tensor([0.0, 0.5]), reduction="sum"),
    ),
    case(
        "p * log p by hand",
        "log(0) at [0] in a sum of p * log(p)",
        bad=lambda: plogp(torch.tensor([0.0, 1.0])),
        healthy=lambda: torch.special.xlogy(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0])),
    ),
]

HALF_PRECISION = [
    case(
        "eps that is 0 in float16",
        "eps 1e-8 is 0 in float16",
        bad=lambda: torch.zeros(2, dtype=HALF) / (torch.zeros(2, dtype=HALF) + 1e-8),
        healthy=lambda: torch.zeros(2, dtype=HALF) / (torch.zeros(2, dtype=HALF) + 1e-4),
    ),
    case(
        "eps that is 0 in float16",
        "in spite of an eps",
        bad=lambda: normalised_in_half(1e-8),
        healthy=lambda: normalised_in_half(1e-4),
    ),
    case(
        "optimizer with an eps of 0",
        "in float16 an eps of 1e-8",
        bad=lambda: step(torch.optim.Adam, HALF, foreach=False),
        healthy=lambda: step(torch.optim.Adam, HALF, foreach=False, eps=1e-4),
    ),
    case(
        "optimizer with an eps of 0",
        "0 / 0 at [0]",
        bad=lambda: step(torch.optim.AdamW, HALF, foreach=True),
        healthy=lambda: step(torch.optim.AdamW, torch.float32, foreach=True),
    ),
    case(
        "eps that is 0 in float16",
        "in spite of an eps",
        bad=lambda: F.normalize(torch.zeros(2, 3, dtype=HALF, requires_grad=True)),
        healthy=lambda: F.normalize(torch.zeros(2, 3, dtype=HALF), eps=1e-4),
    ),
    case(
        "cast beyond the range",
        "1e+06 at [0] was cast to float8_e5m2, which ends at 57344",
        bad=lambda: torch.tensor([1e6, 1.0]).to(torch.float8_e5m2),
        healthy=lambda: torch.tensor([4e4, 1.0]).to(torch.float8_e5m2),
    ),
    case(
        "cast beyond the range",
        "100000 at [0] was cast to float16, which ends at 65504",
        bad=lambda: leaf(1e5, 1.0).half(),
        healthy=lambda: leaf(1e5, 1.0).bfloat16(),
    ),
]

CASES: list[Case] = [*REDUCTIONS, *NORMALISATION, *ATTENTION, *LOSSES, *HALF_PRECISION]


@params(CASES)
def test_the_row_speaks_in_its_words_and_not_of_its_healthy_twin(given: Case) -> None:
    check(given)
