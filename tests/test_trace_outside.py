"""What was NaN or Inf before any traced op: data and weights that are Inf, masks that are not, memory never written."""

from __future__ import annotations

import ctypes
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import nanscan

INF = math.inf
CAUSAL = torch.triu(torch.full((4, 4), -INF), 1)


def origins_of(function: Callable[[], object], model: nn.Module | None = None) -> list[nanscan.Origin]:
    with nanscan.trace(model) as traced:
        kept = function()
    del kept
    return traced.origins


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


LAYERS = {
    "linear": lambda: nn.Linear(4, 2),
    "convolution": lambda: nn.Conv1d(5, 2, 3, padding=1),
    "batch norm": lambda: nn.BatchNorm1d(5),
    "layer norm": lambda: nn.LayerNorm(4),
    "lstm, finite in forward": Recurrent,
}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_an_inf_in_the_batch_is_named_as_the_input_and_not_the_layer_that_spreads_it(
    make: Callable[[], nn.Module], sign: int
) -> None:
    torch.manual_seed(0)
    model, features = make(), torch.randn(3, 5, 4)
    features[1, 2, 0] = sign * INF
    origin = nanscan.find_origin(lambda: model(features).mean().backward(), model)
    assert origin is not None and (origin.op, origin.kind, origin.phase) == ("input", "inf", "forward")
    assert origin.name in ("input", "x")
    assert "the Inf comes in with the batch" in str(origin.hint) and "first in sample 1" in str(origin.hint)
    assert "nanscan.check_batch" in str(origin.hint)


def test_an_inf_target_is_named_in_a_loss_by_name_and_by_hand() -> None:
    model, x, target = nn.Linear(2, 1), torch.randn(3, 2), torch.tensor([[1.0], [INF], [2.0]])
    for loss in (F.mse_loss, lambda p, y: ((p - y) ** 2).mean(), F.l1_loss):
        origin = origins_of(lambda loss=loss: loss(model(x), target).backward(), model)[0]
        assert origin.op == "input" and origin.name in ("target", "y")
    hidden = -target
    origin = origins_of(lambda: ((model(x) - hidden) ** 2).mean().backward(), model)[0]
    assert "-Inf came in with hidden" in str(origin.note)  # it may be a mask: the op that gave the loss is named


@pytest.mark.parametrize("shape", [(1,), (1, 1), (2,)])
@pytest.mark.parametrize("loss", [F.mse_loss, F.huber_loss, lambda x, y: (x - y).abs().mean()])
def test_an_inf_target_is_named_in_a_batch_of_one_too(shape: tuple[int, ...], loss: Callable[..., Tensor]) -> None:
    target = torch.full(shape, 1.0)
    target.view(-1)[0] = INF
    (origin, *_) = origins_of(lambda: loss(torch.zeros(shape, requires_grad=True), target).backward())
    assert (origin.op, origin.kind) == ("input", "inf") and origin.name in ("target", "y")


def test_an_inf_weight_is_named_also_where_its_layer_makes_nan_of_it() -> None:
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight[0, 0] = -INF
    origin = origins_of(lambda: model(torch.zeros(2, 4)).sum().backward(), model)[0]
    assert (origin.op, origin.kind, origin.name) == ("parameter", "inf", "weight")


def test_an_inf_that_the_op_which_makes_nan_of_it_overwrites_is_named_as_what_it_was() -> None:
    table = nn.Embedding(4, 3, max_norm=1.0)
    with torch.no_grad():
        table.weight[1] = INF
    weight = origins_of(lambda: table(torch.tensor([1, 2])), table)[0]
    assert (weight.op, weight.kind, weight.name) == ("parameter", "inf", "weight")
    assert "held Inf before this pass (3 of 12 elements" in str(weight.hint)
    features = torch.tensor([INF, 1.0])
    data = origins_of(lambda: features.mul_(0.0))[0]
    assert (data.op, data.kind, data.name) == ("input", "inf", "features")
    mask = torch.tensor([-INF, 1.0])
    assert [o.op for o in origins_of(lambda: mask.mul_(0.0))] == ["aten.mul_"]  # -Inf only: it may be a mask


def test_a_nan_that_one_branch_throws_away_and_another_uses_is_named() -> None:
    x = torch.tensor([-1.0, 1.0])

    def used_twice() -> Tensor:
        y = x.log()
        return torch.where(x > 0, y, 0.0).sum() + (y * 2).sum()

    def thrown_away_at_the_end() -> Tensor:
        return torch.where(x > 0, x.log() * 2, 0.0).sum()

    assert [o.op for o in origins_of(used_twice)] == ["aten.log"]
    assert origins_of(thrown_away_at_the_end) == []


def _in_place(y: Tensor, keep: Tensor) -> Tensor:
    y[~keep] = 0.0
    return y.square()


CHOICES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked_select": lambda y, keep: y.masked_select(keep).square(),
    "index by mask": lambda y, keep: y[keep].square(),
    "index_select": lambda y, keep: y.index_select(0, keep.nonzero()[:, 0]).square(),
    "gather": lambda y, keep: y.gather(0, keep.nonzero()[:, 0]).square(),
    "written in place": _in_place,
    "overwritten": lambda y, keep: y.copy_(keep).square(),
}


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES.keys())
def test_a_missing_label_that_is_left_out_by_index_or_overwritten_is_no_fault(
    choose: Callable[[Tensor, Tensor], Tensor],
) -> None:
    labels = torch.tensor([math.nan, 1.0])
    predicted = torch.zeros(2, requires_grad=True)
    keep = ~labels.isnan()
    assert origins_of(lambda: choose((predicted - labels), keep).sum().backward()) == []
    assert origins_of(lambda: choose((predicted - labels), ~keep).sum().backward()) or choose is CHOICES["overwritten"]


class Several(nn.Module):
    def forward(self, first: Tensor, *rest: Tensor) -> Tensor:
        return first + sum(rest)


def test_an_argument_is_called_as_in_the_forward_of_the_users_own_module() -> None:
    good, bad = torch.ones(2), torch.tensor([1.0, math.nan])
    wrapped = torch.compile(nn.Linear(2, 1), backend="eager"), nn.DataParallel(nn.Linear(2, 1))
    for model, args, name in (
        (wrapped[0], (bad,), "input"),
        (wrapped[1], (bad,), "input"),
        (Several(), (bad, good), "first"),
        (Several(), (good, good, bad), "rest[1]"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a compiled model is traced as the eager one
            (origin, *_) = origins_of(lambda model=model, args=args: model(*args), model)
        assert (origin.op, origin.name) == ("input", name)


def test_a_bad_weight_is_described_as_the_parameter_and_not_as_the_view_that_was_read() -> None:
    linear, lstm = nn.Linear(3, 4), nn.LSTM(2, 3)
    flat = nn.utils.parameters_to_vector(lstm.parameters()).detach()  # one piece of memory, as in cuDNN
    nn.utils.vector_to_parameters(flat, lstm.parameters())
    for model, name, index, x in ((linear, "weight", (1, 2), (2, 3)), (lstm, "weight_hh_l0", (4, 1), (2, 1, 2))):
        weight = model.get_parameter(name)
        with torch.no_grad():
            weight[index] = math.nan
        (origin, *_) = origins_of(lambda model=model, x=x: model(torch.ones(x)), model)
        (row,) = origin.outputs
        assert (origin.op, origin.name, row.shape, row.first_bad) == ("parameter", name, tuple(weight.shape), index)


def attention(need_weights: bool) -> None:
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 4, 8)
    layer(x, x, x, attn_mask=CAUSAL, need_weights=need_weights)[0].sum().backward()


def nearest() -> Tensor:
    points, diagonal = torch.randn(3, 2, requires_grad=True), torch.zeros(3, 3).fill_diagonal_(INF)
    return (torch.cdist(points, points) + diagonal).topk(1, largest=False).values.sum()


GIVEN = torch.tensor([0.0, -INF, -INF])
LEGITIMATE = {
    "attention with weights": lambda: attention(True),
    "attention without": lambda: attention(False),
    "forbidden actions": lambda: F.cross_entropy(torch.randn(1, 3, requires_grad=True) + GIVEN, torch.tensor([0])),
    "start of a forward algorithm": lambda: (GIVEN[:, None] + torch.randn(3, 3, requires_grad=True)).logsumexp(0).sum(),
    "distance to itself": nearest,
    "filtered": lambda: nn.Linear(2, 1)(torch.nan_to_num(torch.tensor([[INF, -INF]]), posinf=9.0, neginf=-9.0)).sum(),
    "a mask that is left as it is": lambda: torch.randn(3) + GIVEN,
}


@pytest.mark.parametrize("function", LEGITIMATE.values(), ids=LEGITIMATE.keys())
def test_an_inf_from_outside_that_does_no_harm_is_no_fault(function: Callable[[], object]) -> None:
    def run() -> None:
        made = function()
        if isinstance(made, Tensor) and made.requires_grad and made.dim() == 0:
            made.backward()

    assert origins_of(run) == []


class NumpyLog(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        with np.errstate(invalid="ignore"):
            return torch.from_numpy(np.log(-np.ones(x.shape, dtype=np.float32)))

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return NumpyLog.apply(self.fc(x))


def test_a_custom_function_that_makes_nan_with_numpy_is_named_and_the_loss_is_not_blamed() -> None:
    model = Custom()
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, find_origin=True)
    loss = model(torch.randn(2, 4)).sum()
    loss.backward()
    optimizer.observe(loss)
    with pytest.warns(nanscan.NonFiniteWarning):
        optimizer.step()
    origin = optimizer.last_report.origin
    assert origin.op == "NumpyLog" and origin.name == "output of NumpyLog"
    assert "custom autograd.Function made NaN" in origin.hint


class HalfWritten(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        table = torch.empty(2, 4)
        ctypes.memset(table.data_ptr(), 255, 32)  # what was there before, as bad as it can be
        table[0] = 1.0
        return x + table  # the second row was forgotten


def test_memory_that_was_never_written_is_named_where_it_was_made() -> None:
    origin = origins_of(lambda: HalfWritten()(torch.randn(2, 4, requires_grad=True)).sum().backward())[0]
    assert origin.op == "aten.empty" and origin.name == "table" and origin.module == "HalfWritten"
    assert origin.code == "table = torch.empty(2, 4)"
    assert "memory that nobody wrote to" in str(origin.hint) and "4 of 8 elements" in str(origin.hint)


def test_the_element_that_is_described_is_a_nan_where_nan_was_made() -> None:
    origin = origins_of(lambda: torch.tensor([0.0, -1.0]).log())[0]
    assert origin.kind == "nan" and origin.inputs[0].value_at == -1.0
    assert str(origin.hint).startswith("log(-1) at [1] has no real value")


@pytest.mark.parametrize(
    ("function", "word"),
    [
        (lambda x: (x**2).sum(-1).sqrt(), "sqrt at 0"),
        (lambda x: x**0.5, "fractional power at 0"),
        (lambda x: torch.where(x > 0, x.sqrt(), x), "where trick"),
    ],
)
def test_a_checkpoint_that_keeps_no_values_gets_the_hint_of_the_usual_cause(
    function: Callable[[Tensor], Tensor], word: str
) -> None:
    x = torch.zeros(2, 3, requires_grad=True)
    origin = origins_of(lambda: checkpoint(function, x, use_reentrant=False).sum().backward())[0]
    assert origin.phase == "backward" and word in str(origin.hint)


class Inverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient / x


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_custom_function_within_a_checkpoint_gives_its_values_once_and_is_named(use_reentrant: bool) -> None:
    x = torch.zeros(2, 3, requires_grad=True)
    origin = origins_of(lambda: checkpoint(Inverse.apply, x, use_reentrant=use_reentrant).sum().backward())[0]
    assert (origin.op, origin.phase, origin.kind) == ("InverseBackward", "backward", "inf")
