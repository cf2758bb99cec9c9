"""Only finite states are kept, and what is refused at construction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

import nanscan
from tests.guarded import INF, NAN, bits
from tests.recovery_support import guarded, make_batch, make_model, run, spoil, train

pytestmark = pytest.mark.filterwarnings("ignore::nanscan.NonFiniteWarning")


@pytest.mark.parametrize("where", ["weight", "buffer", "state"])
def test_a_state_that_is_not_finite_is_refused_at_construction_by_name(where: str) -> None:
    model = make_model()
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, make_batch(0))
    if where == "weight":
        spoil(model)
    elif where == "buffer":
        model[1].running_var[0] = NAN
    else:
        optimizer.state[model[1].bias]["exp_avg"][2] = INF
    name = {"weight": "parameter '0.weight", "buffer": "buffer '1.running_var'", "state": "exp_avg of '1.bias'"}[where]
    with pytest.raises(nanscan.NonFiniteError, match="nothing to go back to") as caught:
        nanscan.Recovery(model, optimizer)
    assert name in str(caught.value)


def test_a_poisoned_buffer_is_never_kept() -> None:
    model = make_model()
    optimizer = guarded(model)
    recovery = nanscan.Recovery(model, optimizer, snapshot_every=2)
    train(model, optimizer, make_batch(0))
    recovery.step()
    model[1].running_var[0] = INF
    model.eval()  # the statistics don't change any more
    assert recovery.step() is True
    assert recovery.rollbacks[0].cause == "weights" and "1.running_var" in recovery.rollbacks[0].reason
    assert nanscan.scan(model).finite


def test_buffers_that_a_skipped_step_spoiled_are_put_back_without_a_rollback() -> None:
    model = make_model()
    optimizer = guarded(model)
    recovery = nanscan.Recovery(model, optimizer, snapshot_every=1)
    run(model, optimizer, recovery, 3)
    before = bits(dict(model.named_buffers())), bits(model[0].weight)
    train(model, optimizer, make_batch(0, NAN))
    assert not nanscan.scan(model).finite
    with pytest.warns(nanscan.NonFiniteWarning, match="spoiled buffers: buffer '1.running_mean'"):
        assert recovery.step() is False
    after = bits(dict(model.named_buffers())), bits(model[0].weight)
    assert nanscan.scan(model).finite and after[1] == before[1]
    assert after[0]["1.running_mean"] == before[0]["1.running_mean"]
    assert recovery.rollbacks == []


def test_buffers_that_a_dropped_micro_batch_spoiled_are_put_back_without_a_rollback() -> None:
    model = make_model()
    optimizer = guarded(model)
    recovery = nanscan.Recovery(model, optimizer, snapshot_every=1)
    run(model, optimizer, recovery, 3)
    before = bits(model[1].running_mean)
    optimizer.zero_grad()
    for value in (None, NAN):
        (model(make_batch(0, value)).square().mean() / 2).backward()
        optimizer.check_microbatch(drop=True)
    optimizer.step()
    assert optimizer.last_report.dropped == (1,) and not nanscan.scan(model).finite
    with pytest.warns(nanscan.NonFiniteWarning, match="spoiled buffers: buffer '1.running_mean'"):
        assert recovery.step() is False
    assert nanscan.scan(model).finite and bits(model[1].running_mean) == before
    assert recovery.rollbacks == [] and not optimizer.step_was_skipped


def test_a_mask_of_infinities_does_not_block_snapshots_but_new_ones_do() -> None:
    model = make_model()
    model.register_buffer("mask", torch.full((3, 3), -INF).triu(1))
    optimizer = guarded(model)
    recovery = nanscan.Recovery(model, optimizer, snapshot_every=1)
    run(model, optimizer, recovery, 2)
    model.register_buffer("late", torch.full((2,), -INF))
    assert recovery.step() is False
    model[1].running_mean[0] = -INF
    assert recovery.step() is True
    model.mask[0, 0] = NAN
    assert recovery.step() is True
    assert model.mask.isnan().sum() == 0


def test_meta_and_lazy_parameters_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"'0.weight' is on the meta device.*to_empty"):
        nanscan.Recovery(model, optim.SGD(model.parameters(), lr=0.1))
    lazy = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"'0.weight' is not initialized yet.*once before"):
        nanscan.Recovery(lazy, optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"snapshot_every": 0}, ValueError, "snapshot_every must be at least 1, got 0"),
        ({"patience": True}, TypeError, "patience must be an int, got True"),
        ({"max_rollbacks": -1}, ValueError, "max_rollbacks must be at least 0"),
        ({"scaler": 3}, TypeError, "scaler must be a torch.amp.GradScaler, got int"),
        ({"manager": "run"}, TypeError, "manager must be a nanscan.CheckpointManager, got str"),
        ({"lr_backoff": 0.0}, ValueError, "lr_backoff must be greater than 0 and at most 1"),
        ({"lr_backoff": NAN}, ValueError, "lr_backoff"),
        ({"lr_backoff": 1.5}, ValueError, "lr_backoff"),
        ({"scheduler": 3}, TypeError, "scheduler must have state_dict"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    model = make_model()
    with pytest.raises(kind, match=words):
        nanscan.Recovery(model, optim.SGD(model.parameters(), lr=0.1), **options)
