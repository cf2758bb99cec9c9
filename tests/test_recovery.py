"""When training goes back: bad steps in a row, a bad loss, poisoned weights, exceptions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

import nanscan
from tests.guarded import INF, NAN, bits
from tests.recovery_support import guarded, make_batch, make_model, run, spoil, train

pytestmark = pytest.mark.filterwarnings("ignore::nanscan.NonFiniteWarning")


def test_goes_back_after_patience_bad_steps_in_a_row_and_not_before() -> None:
    model = make_model()
    optimizer = guarded(model)
    recovery = nanscan.Recovery(model, optimizer, patience=3)
    for bad, expected in [(True, False), (True, False), (False, False), (True, False), (True, False), (True, True)]:
        train(model, optimizer, make_batch(0, NAN if bad else None))
        assert recovery.step() is expected
    assert [r.cause for r in recovery.rollbacks] == ["skips"]
    assert optimizer.consecutive_skips == 0


@pytest.mark.parametrize("action", ["zero", "warn"])
def test_steps_that_are_taken_although_bad_count_too(action: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = nanscan.wrap(optim.SGD(model.parameters(), lr=0.1), model, on_nonfinite=action)
    recovery = nanscan.Recovery(model, optimizer, patience=2)
    went_back = []
    for _ in range(2):
        train(model, optimizer, torch.full((1, 2), NAN))
        went_back.append(recovery.step())
    assert went_back == ([False, True] if action == "zero" else [True, True])
    assert nanscan.scan(model).finite


def test_weights_of_a_plain_optimizer_are_looked_at_after_every_step() -> None:
    model = make_model()
    optimizer = optim.Adam(model.parameters())
    recovery = nanscan.Recovery(model, optimizer, snapshot_every=100)
    run(model, optimizer, recovery, 3)
    train(model, optimizer, make_batch(0, NAN))
    assert not nanscan.scan(model).finite
    assert recovery.step() is True
    assert nanscan.scan(model).finite
    (rollback,) = recovery.rollbacks
    assert (rollback.step, rollback.to_step, rollback.cause) == (3, 0, "weights")
    assert "parameter '0.weight (= 4.weight)' has 16 NaN" in rollback.reason


def test_the_state_entry_is_named_and_goes_back_too() -> None:
    p = nn.Parameter(torch.tensor([1.0]))
    model = nn.Module()
    model.p = p
    optimizer = optim.Adam([p], lr=0.1)
    recovery = nanscan.Recovery(model, optimizer, lr_backoff=1.0)
    p.grad = torch.tensor([INF])
    optimizer.step()
    assert recovery.step()
    assert "optimizer state exp_avg of 'p' has 0 NaN, 1 Inf of 1" in recovery.rollbacks[0].reason
    p.grad = torch.tensor([1.0])
    optimizer.step()
    assert p.item() == pytest.approx(0.9)


def test_weights_found_by_check_params_every_trigger_at_once() -> None:
    model = nn.Linear(3, 1, bias=False).half()
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = nanscan.wrap(optim.Adam(model.parameters(), lr=0.1), model, check_params_every=1)
    recovery = nanscan.Recovery(model, optimizer, snapshot_every=1000)
    model.weight.grad = torch.tensor([[0.0, 1e-4, 1.0]], dtype=torch.float16)
    optimizer.step()
    assert recovery.step() is True
    assert model.weight.tolist() == [[1.0, 1.0, 1.0]]
    assert recovery.rollbacks[0].cause == "weights"


def test_poisoned_weights_of_a_guarded_optimizer_are_found_before_the_next_snapshot() -> None:
    model = make_model()
    optimizer = guarded(model)
    recovery = nanscan.Recovery(model, optimizer, snapshot_every=4)
    run(model, optimizer, recovery, 3)
    optimizer.optimizer.state[model[0].weight]["exp_avg_sq"][0, 0] = INF
    with torch.no_grad():
        optimizer.zero_grad()
    assert recovery.step() is True
    assert recovery.rollbacks[0].reason.startswith("the state is not finite: optimizer state exp_avg_sq of '0.weight")


def test_first_skip_already_shows_poisoned_weights() -> None:
    model = make_model()
    optimizer = guarded(model)
    recovery = nanscan.Recovery(model, optimizer, patience=10, snapshot_every=100)
    run(model, optimizer, recovery, 2)
    spoil(model)
    train(model, optimizer, make_batch(2))
    assert recovery.step() is True
    assert recovery.rollbacks[0].cause == "weights"


@pytest.mark.parametrize("loss", [NAN, INF, torch.tensor(NAN), torch.tensor([1.0, -INF])])
def test_bad_loss_goes_back_at_once(loss: Any) -> None:
    model = make_model()
    optimizer = guarded(model)
    recovery = nanscan.Recovery(model, optimizer)
    train(model, optimizer, make_batch(0))
    assert recovery.step(loss=1.0) is False
    train(model, optimizer, make_batch(1))
    assert recovery.step(loss=loss, batch="b") is True
    assert recovery.rollbacks[0].cause == "loss" and recovery.bad_batches == ("b",)


def test_bad_loss_of_a_skipped_step_waits_for_patience() -> None:
    model = make_model()
    optimizer = guarded(model)
    recovery = nanscan.Recovery(model, optimizer, patience=2)
    results = []
    for _ in range(2):
        loss = train(model, optimizer, make_batch(0, NAN))
        results.append(recovery.step(loss=loss))
    assert results == [False, True]


def test_observed_loss_counts_as_a_bad_step() -> None:
    model = make_model()
    optimizer = guarded(model)
    recovery = nanscan.Recovery(model, optimizer, patience=2)
    results = []
    for _ in range(2):
        optimizer.observe(NAN)
        train(model, optimizer, make_batch(0))
        results.append(recovery.step())
    assert results == [False, True]


def test_steps_that_the_device_decides_are_heard_of_at_the_latest_before_a_snapshot() -> None:
    model = nn.Linear(4, 1)
    optimizer = nanscan.wrap(optim.AdamW(model.parameters(), lr=0.01, fused=True), model)
    optimizer._deferred = True  # as on CUDA
    optimizer._replan()
    recovery = nanscan.Recovery(model, optimizer, patience=2, snapshot_every=4)
    weights, results = bits([*model.parameters()]), []
    for number in range(4):
        train(model, optimizer, make_batch(number, NAN))
        results.append(recovery.step(batch=number))
    assert any(results) and recovery.rollbacks[0].cause == "skips"
    assert recovery.bad_batches[:2] == (0, 1) and bits([*model.parameters()]) == weights
    assert optimizer.consecutive_skips < 2


@pytest.mark.parametrize("options", [{"max_consecutive_skips": 1}, {"on_nonfinite": "raise"}])
def test_with_block_swallows_what_the_guard_raises_and_goes_back(options: dict[str, Any]) -> None:
    model = make_model()
    optimizer = guarded(model, **options)
    recovery = nanscan.Recovery(model, optimizer)
    run(model, optimizer, recovery, 2)
    with recovery:
        train(model, optimizer, make_batch(0, NAN))
        pytest.fail("the guard did not raise")
    assert recovery.rollbacks[0].cause == "error"
    assert "grad of '0.weight (= 4.weight)' has 16 NaN" in recovery.rollbacks[0].reason
    assert recovery.step(batch=7) is True
    assert recovery.bad_batches == recovery.rollbacks[0].batches == (7,)
    with recovery:
        train(model, optimizer, make_batch(0))
    assert recovery.step() is False


def test_with_block_whose_result_nobody_asked_for_does_not_count_for_the_next() -> None:
    model = make_model()
    optimizer = guarded(model, on_nonfinite="raise")
    recovery = nanscan.Recovery(model, optimizer)
    results = []
    for bad in (NAN, None):
        with recovery:
            train(model, optimizer, make_batch(0, bad))
            results.append(recovery.step())
    assert results == [False] and len(recovery.rollbacks) == 1


def test_with_block_lets_other_exceptions_pass() -> None:
    model = make_model()
    recovery = nanscan.Recovery(model, guarded(model))
    with pytest.raises(KeyError), recovery:
        raise KeyError("other")
    assert recovery.rollbacks == []
