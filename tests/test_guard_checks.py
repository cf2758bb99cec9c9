"""What the gradients do not show: losses, buffers, parameters and optimizer state."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import nanscan
from nanscan import engine
from nanscan.errors import NonFiniteWarning
from tests.guarded import INF, NAN, one, step

pytestmark = pytest.mark.usefixtures("either_way_of_clipping")

quiet = pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")


@quiet
@pytest.mark.parametrize(
    "loss",
    [NAN, np.float32(NAN), torch.tensor(NAN), torch.tensor([1.0, NAN]), torch.tensor(INF, dtype=torch.bfloat16)],
    ids=str,
)
def test_bad_loss_skips_the_step_although_gradients_are_zero(loss):
    weight, optimizer = one([1.0], inner={"weight_decay": 0.1})
    optimizer.observe(loss)
    step(optimizer, weight, [0.0])
    assert weight.item() == 1.0
    assert [(row.name, row.kind) for row in optimizer.last_report.bad] == [("loss", "loss")]
    assert optimizer.last_report.norm == 0.0, "the loss is no part of the norm"
    step(optimizer, weight, [1.0])
    assert not optimizer.step_was_skipped, "a loss joins one scan only"


def test_healthy_losses_are_rows_of_the_report():
    weight, optimizer = one([1.0])
    optimizer.observe(2.5)
    optimizer.observe(torch.tensor(3, dtype=torch.int64))
    step(optimizer, weight, [1.0])
    rows = optimizer.last_report.tensors
    assert [(row.name, row.norm) for row in rows] == [("group0.param0", 1.0), ("loss[0]", 2.5), ("loss[1]", 3.0)]
    assert optimizer.last_report.norm == 1.0


def test_observe_keeps_no_graph_and_refuses_what_is_no_loss():
    weight, optimizer = one([1.0])
    optimizer.observe((weight * 2).sum())
    assert not optimizer._losses[0].requires_grad
    with pytest.raises(TypeError, match="loss must be a tensor or a number, got str"):
        optimizer.observe("0.5")


def test_poisoned_batchnorm_buffers_are_named_when_a_step_is_skipped():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=1.0), model)
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    assert optimizer.last_report.buffers == ()
    model(torch.tensor([[NAN, 1.0], [1.0, 1.0]])).sum().backward()
    with pytest.warns(NonFiniteWarning, match="spoiled what a skip can't restore: buffer '1.running_mean' has 3 NaN"):
        optimizer.step()
    assert [row.name for row in optimizer.last_report.buffers] == ["1.running_mean", "1.running_var"]


def float16_adam(foreach, **options):
    weight = nn.Parameter(torch.ones(3, dtype=torch.float16))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer = nanscan.wrap(torch.optim.Adam([weight], lr=0.1, foreach=foreach), **options)
    weight.grad = torch.tensor([0.0, 1e-4, 1.0], dtype=torch.float16)
    return weight, optimizer, [str(w.message) for w in seen]


@pytest.mark.parametrize("foreach", [True, False])
def test_update_that_makes_nan_of_finite_gradients_is_found_named_and_counted(foreach):
    _, optimizer, _ = float16_adam(foreach, check_params_every=1)
    with pytest.warns(NonFiniteWarning) as seen:
        optimizer.step()
    assert str(seen[0].message) == (
        "nanscan: after step 0, finite gradients, non-finite update: parameter 'group0.param0' has 1 NaN, 1 Inf of 3 "
        "(first at [0]); eps=1e-08 is 0 in float16. The step can't be undone here; go back to a checkpoint."
    )
    assert optimizer.last_report.finite
    assert [row.name for row in optimizer.last_report.parameters] == ["group0.param0"]
    assert (optimizer.bad_parameter_steps, optimizer.skipped_steps) == (1, 0)


@pytest.mark.parametrize("rate", [float("nan"), torch.tensor(float("nan"))], ids=["number", "tensor"])
def test_a_learning_rate_that_a_schedule_made_nan_is_named_as_the_cause(rate):
    weight = nn.Parameter(torch.ones(2))
    optimizer = nanscan.wrap(torch.optim.Adam([("p", weight)]), check_params_every=1)
    optimizer.param_groups[0]["lr"] = rate
    weight.grad = torch.ones(2)
    with pytest.warns(NonFiniteWarning, match="parameter 'p' has 2 NaN.*; lr of group 0 is nan: look at what sets it"):
        optimizer.step()


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaler"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adamax])
def test_eps_of_zero_is_said_at_once_and_its_damage_is_found_by_one_read_of_the_parameters(kind, scaled, monkeypatch):
    weight = nn.Parameter(torch.ones(3))
    with pytest.warns(NonFiniteWarning, match="eps=0 for 'p': an update divides 0 by 0"):
        optimizer = nanscan.wrap(kind([("p", weight)], lr=0.1, eps=0.0), check_params_every=1)
    reads, real = [], engine.scan
    monkeypatch.setattr(engine, "scan", lambda tensors, *a: reads.append(list(tensors)) or real(tensors, *a))
    loss = (weight * torch.tensor([0.0, 1.0, 2.0])).sum()
    scaler = nanscan.GradScaler("cpu", init_scale=64.0, enabled=scaled)
    scaler.scale(loss).backward()
    with pytest.warns(
        NonFiniteWarning, match="finite gradients, non-finite update: parameter 'p' has 1 NaN.*; eps=0, so"
    ):
        scaler.step(optimizer)
    scaler.update()
    assert optimizer.bad_parameter_steps == 1
    assert scaler.get_scale() == (64.0 if scaled else 1.0), "the gradients were finite"
    assert sum(weight in set(tensors) for tensors in reads) == 1


@pytest.mark.parametrize("action", ["skip", "raise"])
def test_weight_that_was_nan_before_the_step_is_named_when_it_is_refused(action):
    """Every step of a model loaded from a bad checkpoint is skipped: the gradients alone don't say why."""
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight[0, 1] = NAN
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, on_nonfinite=action)
    model(torch.ones(1, 2)).square().sum().backward()
    words = r"Bad before this step: parameter 'weight' has 1 NaN, 0 Inf of 2 \(first at \[0, 1\]\). No skip mends that"
    said = pytest.warns(NonFiniteWarning, match=words) if action == "skip" else pytest.raises(RuntimeError, match=words)
    with said:
        optimizer.step()
    assert [row.name for row in optimizer.last_report.parameters] == ["weight"]
    assert optimizer.bad_parameter_steps == 0


@quiet
def test_poisoned_optimizer_state_is_named_with_its_parameter():
    weight, optimizer = one([1.0], torch.optim.Adam, check_params_every=1, on_nonfinite="warn")
    step(optimizer, weight, [INF])
    assert [(row.kind, row.name) for row in optimizer.last_report.parameters] == [
        ("parameter", "group0.param0"),
        ("state", "exp_avg of 'group0.param0'"),
        ("state", "exp_avg_sq of 'group0.param0'"),
    ]


def test_state_that_became_inf_while_the_weight_is_finite_is_found():
    """One huge finite gradient: its square is Inf in exp_avg_sq, and the weight never moves again."""
    weight, optimizer = one([1.0, 1.0], torch.optim.Adam, check_params_every=1)
    with pytest.warns(NonFiniteWarning, match="finite gradients, non-finite update: optimizer state exp_avg_sq of "):
        step(optimizer, weight, [1.0, 1e22])
    assert torch.isfinite(weight).all()
    (row,) = optimizer.last_report.parameters
    assert (row.name, row.first_bad, row.inf_count) == ("exp_avg_sq of 'group0.param0'", (1,), 1)
    assert optimizer.bad_parameter_steps == 1


def test_check_of_the_parameters_can_raise():
    _, optimizer, _ = float16_adam(True, check_params_every=1, on_nonfinite="raise")
    with pytest.raises(nanscan.NonFiniteError, match="after step 0, finite gradients, non-finite update"):
        optimizer.step()
    assert len(optimizer.history) == 1


@quiet
def test_parameters_are_checked_every_so_many_steps_and_warned_about_once():
    weight, optimizer = one([1.0], check_params_every=3)
    with torch.no_grad():
        weight.fill_(NAN)
    found = []
    for _ in range(7):
        step(optimizer, weight, [0.5])
        found.append(len(optimizer.last_report.parameters))
    assert found == [0, 0, 1, 0, 0, 1, 0]
    assert optimizer.bad_parameter_steps == 2


@pytest.mark.parametrize(
    "dtype, options, warned",
    [
        (torch.float16, {}, True),
        (torch.float16, {"eps": 1e-4}, False),
        (torch.float16, {"fused": True}, False),
        (torch.float32, {}, False),
        (torch.bfloat16, {}, False),
    ],
)
def test_eps_that_float16_cannot_hold_is_warned_about_when_wrapping(dtype, options, warned):
    weight = nn.Parameter(torch.ones(3, dtype=dtype))
    inner = torch.optim.AdamW([("fc.weight", weight)], **options)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        nanscan.wrap(inner)
    starts = [str(w.message)[:60] for w in seen]
    assert starts == (["nanscan: eps=1e-08 is 0 in float16, the dtype of 'fc.weight'"] if warned else [])


def test_fused_adam_in_float16_with_that_eps_stays_finite():
    weight = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = torch.optim.Adam([weight], lr=0.1, fused=True)
    weight.grad = torch.tensor([0.0, 1e-4, 1.0], dtype=torch.float16)
    optimizer.step()
    assert torch.isfinite(weight).all(), "else the guard must warn about fused optimizers too"
