"""Giving up, and what is remembered of the rollbacks and of the copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

import nanscan
from nanscan.recovery import Rollback
from tests.guarded import NAN, bits
from tests.recovery_support import everything, guarded, make_batch, make_model, quiet, run, train, without_lr

pytestmark = pytest.mark.filterwarnings("ignore::nanscan.NonFiniteWarning")


def test_gives_up_after_max_rollbacks_with_a_full_report_in_the_last_good_state() -> None:
    model = make_model()
    optimizer = guarded(model)
    recovery = nanscan.Recovery(model, optimizer, max_rollbacks=2, patience=1, snapshot_every=2)
    run(model, optimizer, recovery, 2)
    saved = without_lr(everything(model, optimizer))
    for step in range(2):
        train(model, optimizer, make_batch(step, NAN))
        assert recovery.step() is True
    train(model, optimizer, make_batch(2, NAN))
    with pytest.raises(nanscan.TrainingDiverged) as caught:
        recovery.step()
    lines = str(caught.value).splitlines()
    assert "diverged at step 2" in lines[0] and "2 rollbacks so far" in lines[0] and "step 2" in lines[0]
    assert lines[1].startswith("  1. step 2 back to step 2: ") and lines[1].endswith("learning rate 0.01 -> 0.005")
    assert lines[2].endswith("learning rate 0.005 -> 0.0025")
    assert "grad of '0.weight (= 4.weight)' has 16 NaN" in lines[2]
    assert caught.value.report is not None and caught.value.report.bad
    assert without_lr(everything(model, optimizer)) == saved
    assert len(recovery.rollbacks) == 2


def test_giving_up_is_not_swallowed_by_its_own_with_block() -> None:
    model = make_model()
    optimizer = guarded(model)
    recovery = nanscan.Recovery(model, optimizer, max_rollbacks=0, patience=1)
    with pytest.raises(nanscan.TrainingDiverged, match="0 rollbacks so far"), recovery:
        train(model, optimizer, make_batch(0, NAN))
        recovery.step()
    again = guarded(make_model(), on_nonfinite="raise")
    recovery = nanscan.Recovery(model, again, max_rollbacks=0)
    with pytest.raises(nanscan.TrainingDiverged, match="max_rollbacks"), recovery:
        again.observe(NAN)
        again.step()


def test_each_rollback_is_warned_about_once_and_points_at_the_caller() -> None:
    model = make_model()
    recovery = nanscan.Recovery(model, optim.SGD(model.parameters(), lr=0.1))
    with pytest.warns(nanscan.NonFiniteWarning) as caught:
        recovery.step(loss=NAN)
    assert [str(w.message) for w in caught] == [
        "nanscan: step 0 back to step 0: the loss is nan; learning rate 0.1 -> 0.05."
    ]
    assert caught[0].filename == __file__


def test_learning_rate_backs_off_from_the_snapshot_that_is_used() -> None:
    model = make_model()
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    recovery = nanscan.Recovery(model, optimizer, snapshot_every=1, max_rollbacks=9)
    rates = []
    for loss in (NAN, NAN, 1.0, NAN, NAN):
        recovery.step(loss=loss)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.5, 0.25, 0.25, 0.125, 0.0625]


def test_a_snapshot_taken_on_the_way_to_the_divergence_is_given_up_for_the_older_one() -> None:
    model = nn.Linear(2, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    recovery = nanscan.Recovery(model, optimizer, snapshot_every=1)
    recovery.step()
    good = bits(model.weight)
    with torch.no_grad():
        model.weight.mul_(1e6)
    recovery.step()
    recovery.step(loss=NAN)
    assert model.weight.abs().max() > 1e4
    recovery.step(loss=NAN)
    assert bits(model.weight) == good and recovery.rolled_back_to == 1


def test_a_copy_changed_from_outside_is_not_used() -> None:
    model = make_model()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    recovery = nanscan.Recovery(model, optimizer, snapshot_every=1)
    run(model, optimizer, recovery, 3)
    recovery._memory.newest.work.targets[0].fill_(NAN)
    assert recovery.step(loss=NAN)
    assert recovery.rolled_back_to == 2 and nanscan.scan(model).finite
    recovery._memory.newest.work.targets[0].fill_(NAN)
    with pytest.raises(nanscan.TrainingDiverged, match="snapshots in memory were changed.*no manager"):
        recovery.step(loss=NAN)


def test_failure_in_the_middle_of_a_snapshot_leaves_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    optimizer = optim.Adam(model.parameters())
    recovery = nanscan.Recovery(model, optimizer, snapshot_every=2, lr_backoff=1.0)
    run(model, optimizer, recovery, 4)
    saved = everything(model, optimizer)
    run(model, optimizer, recovery, 1)
    train(model, optimizer, make_batch(9))

    def interrupted(*args: Any, **kwargs: Any) -> None:
        for tensor in spare:
            tensor.fill_(3)
        raise KeyboardInterrupt

    spare = recovery._memory.older.work.targets
    monkeypatch.setattr("nanscan.state_copy.StateCopy.run_finite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recovery.step()
    monkeypatch.undo()
    assert recovery.step(loss=NAN)
    assert everything(model, optimizer) == saved


def test_a_repeated_snapshot_allocates_no_tensor_memory() -> None:
    model = make_model()
    optimizer = optim.Adam(model.parameters())
    recovery = nanscan.Recovery(model, optimizer, snapshot_every=1)
    run(model, optimizer, recovery, 3)
    first = {t.data_ptr() for saved in (recovery._memory.newest, recovery._memory.older) for t in saved.work.targets}
    run(model, optimizer, recovery, 3)
    again = {t.data_ptr() for saved in (recovery._memory.newest, recovery._memory.older) for t in saved.work.targets}
    assert again == first


def test_records_survive_a_restart() -> None:
    model = make_model()
    optimizer = guarded(model)
    recovery = nanscan.Recovery(model, optimizer, patience=1, snapshot_every=2)
    run(model, optimizer, recovery, 2)
    train(model, optimizer, make_batch(0, NAN))
    recovery.step(batch="a")
    run(model, optimizer, recovery, 1)
    state = recovery.state_dict()
    other = nanscan.Recovery(model, optimizer, patience=1)
    other.load_state_dict(state)
    assert other.rollbacks == recovery.rollbacks and other.bad_batches == ("a",) and other.step_index == 3
    assert isinstance(other.rollbacks[0], Rollback) and other.rollbacks[0].bad[0].name.startswith("0.weight")
    lr = optimizer.param_groups[0]["lr"]
    train(model, optimizer, make_batch(0, NAN))
    assert other.step() and other.rolled_back_to == 3
    assert optimizer.param_groups[0]["lr"] == lr / 2
    with pytest.raises(ValueError, match="not the state of a Recovery: bad_batches, rollbacks missing"):
        other.load_state_dict({"step": 1})


def test_dropping_a_recovery_frees_it_although_the_guard_lives() -> None:
    import gc
    import weakref

    model = make_model()
    optimizer = guarded(model)
    recovery = weakref.ref(nanscan.Recovery(model, optimizer))
    gc.collect()
    assert recovery() is None
    with quiet():
        train(model, optimizer, make_batch(0, NAN))
