"""When `Recovery` goes back, what it restores, and when it gives up."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

import nanscan
from nanscan.recovery import Rollback
from tests.guarded import INF, NAN, VARIANTS, Variant, bits
from tests.recovery_support import everything, make_batch, make_model, quiet, spoil, train, without_lr

pytestmark = pytest.mark.filterwarnings("ignore::nanscan.NonFiniteWarning")


def guarded(model: nn.Module, **options: Any) -> nanscan.GuardedOptimizer:
    return nanscan.wrap(optim.Adam(model.parameters(), lr=0.01), model, **options)


def run(model: nn.Module, optimizer: optim.Optimizer, recovery: nanscan.Recovery, steps: int) -> None:
    for step in range(steps):
        train(model, optimizer, make_batch(step))
        assert recovery.step() is False


# ---- triggers --------------------------------------------------------------------------------------------------------


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


# ---- what goes back --------------------------------------------------------------------------------------------------


def test_everything_is_as_it_was_at_the_snapshot() -> None:
    model = make_model()
    inner = optim.AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.5}], lr=0.01)
    optimizer = nanscan.wrap(inner, model)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    recovery = nanscan.Recovery(model, optimizer, scheduler=scheduler, scaler=scaler, snapshot_every=3, lr_backoff=1.0)
    for step in range(3):
        train(model, optimizer, make_batch(step))
        scheduler.step()
        recovery.step()
    saved = everything(model, optimizer, scheduler, scaler)
    for step in range(2):
        train(model, optimizer, make_batch(step))
        scheduler.step()
        recovery.step()
    inner.param_groups[0]["weight_decay"] = 7.0
    inner.param_groups[0]["new"] = 1
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    spoil(model)
    assert recovery.step(loss=NAN)
    assert everything(model, optimizer, scheduler, scaler) == saved
    assert recovery.step_index == recovery.rolled_back_to == 3
    assert all(p.grad is None for p in model.parameters())


def test_draws_after_a_rollback_are_those_after_the_snapshot() -> None:
    model = make_model()
    recovery = nanscan.Recovery(model, optim.SGD(model.parameters(), lr=0.1))
    drawn = [(random.random(), np.random.rand(), torch.rand(1).item())]
    assert recovery.step(loss=NAN)
    drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.leaf and not v.sparse], ids=str)
def test_state_of_every_optimizer_goes_back_twice(variant: Variant) -> None:
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3, 5))
    optimizer = variant.make(list(model.parameters()))

    def step() -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model.a.square().sum() + model.b.square().sum()).sqrt()
            loss.backward()
            return loss

        optimizer.step(closure)

    step()
    recovery = nanscan.Recovery(model, optimizer, lr_backoff=1.0)
    saved = bits([*model.parameters()]), bits(optimizer.state_dict())
    for _ in range(2):
        step()
        step()
        assert (bits([*model.parameters()]), bits(optimizer.state_dict())) != saved
        assert recovery.step(loss=NAN)
        assert (bits([*model.parameters()]), bits(optimizer.state_dict())) == saved


def test_a_snapshot_is_never_an_alias() -> None:
    model = make_model()
    optimizer = optim.Adam(model.parameters())
    recovery = nanscan.Recovery(model, optimizer, snapshot_every=1, lr_backoff=1.0)
    run(model, optimizer, recovery, 3)
    saved = everything(model, optimizer)
    for _ in range(2):
        for tensor in [*model.parameters(), *model.buffers(), *optimizer.state[model[0].weight].values()]:
            tensor.data.fill_(1)
        assert recovery.step(loss=NAN)
        assert everything(model, optimizer) == saved


def test_sparse_gradients_and_their_state_go_back() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = optim.SparseAdam(model.parameters())
    recovery = nanscan.Recovery(model, optimizer)
    saved = bits(model.weight)
    model(torch.tensor([1, 3])).sum().backward()
    optimizer.step()
    assert recovery.step(loss=NAN)
    assert bits(model.weight) == saved and not optimizer.state[model.weight]


def test_an_optimizer_that_holds_another_goes_back_with_it() -> None:
    class Outer(optim.Optimizer):
        def __init__(self, base: optim.Optimizer) -> None:
            self.base = base
            self.calls = 0
            super().__init__(base.param_groups, {})

        def step(self, closure: Any = None) -> None:
            self.calls += 1
            self.base.step()

    model = make_model()
    optimizer = Outer(optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    recovery = nanscan.Recovery(model, optimizer, lr_backoff=0.5)
    train(model, optimizer, make_batch(0))
    assert recovery.step(loss=NAN)
    assert optimizer.calls == 0 and not optimizer.base.state
    assert [group["lr"] for group in optimizer.base.param_groups] == [0.05]


def test_a_group_added_after_the_snapshot_is_in_the_next() -> None:
    model = make_model()
    optimizer = optim.Adam(model[0].parameters(), lr=0.1)
    recovery = nanscan.Recovery(model, optimizer, snapshot_every=100)
    train(model, optimizer, make_batch(0))
    recovery.step()
    optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.2})
    train(model, optimizer, make_batch(1))
    assert recovery.step() is False
    saved = bits(optimizer.state_dict()["state"])
    train(model, optimizer, make_batch(2, NAN))
    assert recovery.step() is True
    assert recovery.rolled_back_to == 2
    assert bits(optimizer.state_dict()["state"]) == saved
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.1]


def test_a_group_added_just_before_the_failure_stays_and_its_weights_go_back() -> None:
    model = make_model()
    optimizer = optim.Adam(model[0].parameters(), lr=0.1)
    recovery = nanscan.Recovery(model, optimizer)
    saved = bits(dict(model.state_dict()))
    optimizer.add_param_group({"params": list(model[1].parameters())})
    train(model, optimizer, make_batch(1, NAN))
    assert recovery.step() is True
    assert len(optimizer.param_groups) == 2 and not optimizer.state
    assert bits(dict(model.state_dict())) == saved


def test_replaced_and_resized_tensors_go_back() -> None:
    model = nn.Module()
    model.p = nn.Parameter(torch.ones(2))
    model.register_buffer("cache", torch.ones(3))
    model.register_buffer("none", None)
    recovery = nanscan.Recovery(model, optim.SGD(model.parameters(), lr=0.1))
    parameter = model.p
    parameter.data = torch.zeros(5)
    model.cache, model.none = torch.zeros(7), torch.zeros(1)
    assert recovery.step(loss=NAN)
    assert parameter.tolist() == [1, 1] and model.cache.tolist() == [1, 1, 1] and model.none is None


def test_extra_state_of_modules_goes_back() -> None:
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self) -> Any:
            return {"count": self.count}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]

    model = Counting(2, 1)
    recovery = nanscan.Recovery(model, optim.SGD(model.parameters(), lr=0.1))
    model.count = 5
    assert recovery.step(loss=NAN)
    assert model.count == 0


# ---- finite states only ----------------------------------------------------------------------------------------------


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


# ---- giving up, and what is remembered -------------------------------------------------------------------------------


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
    recovery._memory.newest.floats[0].fill_(NAN)
    assert recovery.step(loss=NAN)
    assert recovery.rolled_back_to == 2 and nanscan.scan(model).finite
    recovery._memory.newest.floats[0].fill_(NAN)
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

    spare = recovery._memory.older.floats
    monkeypatch.setattr("nanscan.engine.copy_finite", interrupted)
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
    first = {t.data_ptr() for saved in (recovery._memory.newest, recovery._memory.older) for t in saved.floats}
    run(model, optimizer, recovery, 3)
    again = {t.data_ptr() for saved in (recovery._memory.newest, recovery._memory.older) for t in saved.floats}
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
