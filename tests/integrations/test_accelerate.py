"""Accelerate and the guard agree on which steps were skipped, whichever of `prepare` and `wrap` comes first."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

import nanscan
from nanscan.integrations.accelerate import PreparedOptimizer, keep_guard_state, prepare
from tests.guarded import INF, NAN, bits
from tests.ranks import Ranks

pytestmark = pytest.mark.filterwarnings("ignore::nanscan.NonFiniteWarning", "ignore:.*lr_scheduler.*:UserWarning")


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Accelerators share their state within a process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def make(order: str, scaler: Any = None, accumulate: int = 1, **options: Any) -> tuple[Any, Any, Any, Any]:
    """An accelerator, a model of two layers, its guarded optimizer and a scheduler that halves the learning rate."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    if scaler is not None:  # Accelerate makes one only for a GPU, with float16: put where it would be
        accelerator.scaler = scaler("cpu", init_scale=8.0)
        accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if order == "prepare()":
        model, optimizer = prepare(accelerator, model, optimizer, **options)
    elif order == "wrap, prepare":
        model, optimizer = accelerator.prepare(model, nanscan.wrap(optimizer, model, **options))
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
        optimizer = nanscan.wrap(optimizer, model, **options)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    return accelerator, model, optimizer, scheduler


def forward(accelerator: Any, model: Any, bad: bool = False) -> None:
    loss = torch.nn.Sequential.forward(model, torch.ones(4, 2)).square().mean()
    if bad:
        loss = loss + model[1].bias.sum() * NAN  # spoils this gradient alone
    accelerator.backward(loss)


ORDERS = ["wrap, prepare", "prepare, wrap", "prepare()"]


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler, nanscan.GradScaler], ids=["", "torch's", "nanscan's"])
@pytest.mark.parametrize("order", ORDERS)
def test_optimizer_accelerator_and_scheduler_agree_on_a_skipped_step(order: str, scaler: Any) -> None:
    accelerator, model, optimizer, scheduler = make(order, scaler, accumulate=2)
    assert isinstance(optimizer, PreparedOptimizer) and isinstance(optimizer, nanscan.GuardedOptimizer)
    seen = []
    for micro in range(8):
        with accelerator.accumulate(model):
            before = bits(list(model.parameters()))
            forward(accelerator, model, bad=micro == 2)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                moved = bits(list(model.parameters())) != before
                assert moved != optimizer.step_was_skipped == accelerator.optimizer_step_was_skipped
                seen.append((optimizer.step_was_skipped, optimizer.param_groups[0]["lr"], bool(norm.isfinite())))
    assert seen == [(False, 0.05, True), (True, 0.05, False), (False, 0.025, True), (False, 0.0125, True)]
    assert optimizer.skipped_steps == 1 and [report.step for report in optimizer.history] == [0, 1, 2, 3]
    bad = [row.name for row in optimizer.history[1].bad if row.name != "loss[0]"]
    assert bad == ["1.bias"]  # torch's clipping would blame all four
    assert "1 skipped so far  last bad: step 1 " in optimizer.health()
    assert optimizer.history[0].norm == pytest.approx(0.5, rel=1e-4)
    assert scaler is None or accelerator.scaler.get_scale() == 4.0


@pytest.mark.parametrize("order", ORDERS)
def test_it_is_one_object_that_shows_all_of_the_guard(order: str, tmp_path: Path) -> None:
    accelerator, model, optimizer, _ = make(order, clip_norm=0.25, log=tmp_path / "log.jsonl")
    assert accelerator._optimizers == [optimizer] and type(optimizer.optimizer) is nanscan.GuardedOptimizer
    forward(accelerator, model)
    optimizer.step()
    report = optimizer.last_report
    assert report.norm * report.clip_factor == pytest.approx(0.25, rel=1e-4) and len(optimizer.history) == 1
    assert nanscan.wrap(optimizer, clip_norm=0.5) is optimizer and optimizer.policy.clip_norm == 0.5
    optimizer.observe(NAN)
    optimizer.step()
    assert optimizer.consecutive_skips == 1 and optimizer.first_skipped_step == 1
    assert [row.name for row in optimizer.last_report.bad] == ["loss"]
    assert (tmp_path / "log.jsonl").read_text().count("\n") == 2
    assert set(optimizer.state_dict()) == {"state", "param_groups"}
    missing = [name for name in dir(nanscan.GuardedOptimizer) if name[0] != "_" and not hasattr(optimizer, name)]
    assert missing == [] and "GuardedOptimizer(SGD" in repr(optimizer)


def test_copies_and_pickles_go_on_counting() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    optimizer = accelerator.prepare(nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model))
    optimizer.observe(INF)
    optimizer.step()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(other) is PreparedOptimizer and other.optimizer is not optimizer.optimizer
        other.observe(INF)
        other.step()
        assert (other.skipped_steps, optimizer.skipped_steps) == (2, 1)


@pytest.mark.parametrize("observe_loss", [True, False])
def test_prepare_observes_the_loss_of_backward(observe_loss: bool) -> None:
    accelerator, model, optimizer, _ = make("prepare()", observe_loss=observe_loss)
    logits = torch.nn.Sequential.forward(model, torch.ones(3, 2)).expand(3, 4)
    accelerator.backward(torch.nn.functional.cross_entropy(logits, torch.full((3,), -100)))  # NaN, of gradients 0
    optimizer.step()
    assert optimizer.step_was_skipped == observe_loss
    assert [row.name for row in optimizer.last_report.bad] == (["loss"] if observe_loss else [])


def test_a_micro_batch_whose_loss_alone_is_bad_is_dropped_without_being_told_the_loss_twice() -> None:
    accelerator, model, optimizer, _ = make("prepare()", accumulate=3)
    for micro in range(3):
        with accelerator.accumulate(model):
            logits = torch.nn.Sequential.forward(model, torch.ones(3, 2)).expand(3, 4) * torch.arange(4)
            targets = torch.full((3,), -100 if micro == 1 else 1)  # ignored: the loss is NaN, of gradients 0
            accelerator.backward(torch.nn.functional.cross_entropy(logits, targets))
            report = optimizer.check_microbatch(drop=True)
            assert [row.name for row in report.bad] == (["loss"] if micro == 1 else [])
            optimizer.step()
            optimizer.zero_grad()
    assert not optimizer.step_was_skipped and optimizer.last_report.dropped == (1,)


def test_state_is_saved_and_loaded_with_and_without_nanscan(tmp_path: Path) -> None:
    accelerator, model, optimizer, _ = make("prepare()", clip_norm=nanscan.AdaptiveClip("autoclip"))
    for step in range(4):
        forward(accelerator, model, bad=step == 1)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(tmp_path / "guarded"))
    expected = optimizer.guard_state_dict()

    fresh_accelerator, _, fresh, _ = make("prepare()", clip_norm=nanscan.AdaptiveClip("autoclip"))
    fresh_accelerator.load_state(str(tmp_path / "guarded"))
    assert fresh.skipped_steps == 1 and bits(fresh.guard_state_dict()) == bits(expected)
    assert bits(fresh.state_dict()) == bits(optimizer.state_dict())

    plain = Accelerator(cpu=True)
    plain_model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    inner = torch.optim.SGD(plain_model.parameters(), lr=0.1, momentum=0.9)
    plain_model, inner = plain.prepare(plain_model, inner)
    plain.prepare(torch.optim.lr_scheduler.StepLR(inner, 1, 0.5))
    plain.load_state(str(tmp_path / "guarded"))
    assert bits(inner.state_dict()) == bits(optimizer.state_dict())
    plain.save_state(str(tmp_path / "plain"))
    fresh_accelerator.load_state(str(tmp_path / "plain"))
    assert fresh.skipped_steps == 1  # nothing said about it: it stays


def test_two_optimizers_have_a_verdict_each() -> None:
    accelerator = Accelerator(cpu=True)
    one, two = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    inner = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, two)]
    one, two, first, second = prepare(accelerator, one, two, *inner)
    accelerator.backward(one(torch.ones(1, 2)).sum() * NAN)
    accelerator.backward(two(torch.ones(1, 2)).sum())
    first.step()
    second.step()
    assert first.step_was_skipped and not second.step_was_skipped and accelerator.optimizer_step_was_skipped
    assert first.last_report.bad[0].name == "weight" and second.last_report.finite


def test_a_loss_counts_for_no_guard_where_an_unguarded_optimizer_trains_too() -> None:
    accelerator, model, optimizer, _ = make("prepare()")
    other = torch.nn.Linear(2, 1)
    accelerator.prepare(torch.optim.SGD(other.parameters(), lr=0.1))
    accelerator.backward(other(torch.ones(1, 2)).sum() * NAN)
    forward(accelerator, model)
    optimizer.step()
    assert not optimizer.step_was_skipped


def test_each_prepare_adds_its_guard_to_what_is_saved_and_free_memory_drops_it(tmp_path: Path) -> None:
    def guarded(accelerator: Any) -> Any:
        model = torch.nn.Linear(2, 1)
        return prepare(accelerator, torch.optim.SGD(model.parameters(), lr=0.1))

    def skip(optimizer: Any) -> None:
        optimizer.observe(NAN)
        optimizer.step()

    accelerator = Accelerator(cpu=True)
    first, second = guarded(accelerator), guarded(accelerator)
    skip(first)
    accelerator.save_state(str(tmp_path))
    skip(first)
    skip(second)
    accelerator.load_state(str(tmp_path))
    assert (first.skipped_steps, second.skipped_steps) == (1, 0)

    accelerator.free_memory()
    third = guarded(accelerator)
    skip(third)
    with pytest.raises(ValueError, match="the state of 2 guarded optimizers, and this accelerator has 1: prepare"):
        accelerator.load_state(str(tmp_path))
    accelerator.save_state(str(tmp_path / "third"))
    skip(third)
    accelerator.load_state(str(tmp_path / "third"))
    assert third.skipped_steps == 1


def test_clipping_by_value_does_not_hide_an_infinity() -> None:
    accelerator, model, optimizer, _ = make("prepare()")
    forward(accelerator, model)
    bias = model[1].bias
    bias.grad.fill_(-INF)
    model[0].bias.grad.copy_(torch.tensor([3.0, NAN]))
    accelerator.clip_grad_value_(model.parameters(), 0.5)
    assert model[0].bias.grad[0] == 0.5 and model[0].weight.grad.abs().max() <= 0.5
    optimizer.step()
    assert [(row.name, row.nan_count, row.inf_count) for row in optimizer.last_report.bad] == [
        ("0.bias", 1, 0),
        ("1.bias", 0, 1),
    ]


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, nanscan.GradScaler], ids=["torch's", "nanscan's"])
def test_a_loop_that_catches_the_error_of_a_step_goes_on(scaler: Any) -> None:
    accelerator, model, optimizer, _ = make("prepare()", scaler, on_nonfinite="raise")
    for bad in (False, True, False):
        forward(accelerator, model, bad)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        try:
            optimizer.step()
        except nanscan.NonFiniteError:
            assert bad
        optimizer.zero_grad()
    assert [report.action for report in optimizer.history] == ["step", "raise", "step"]
    assert accelerator.scaler.get_scale() == 4.0 and not accelerator.optimizer_step_was_skipped


def test_prepare_says_what_it_can_not_use_and_knows_a_model_prepared_before() -> None:
    with pytest.raises(TypeError, match=r"must be an accelerate\.Accelerator, got Linear"):
        prepare(torch.nn.Linear(2, 1))
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match="clip_norm given, but no optimizer among the objects"):
        prepare(accelerator, torch.nn.Linear(2, 1), clip_norm=1.0)
    with pytest.raises(TypeError, match="a SGD is not guarded"):
        keep_guard_state(accelerator, torch.optim.SGD(torch.nn.Linear(2, 1).parameters()))
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    optimizer = prepare(accelerator, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum() * NAN)
    optimizer.step()
    assert [row.name for row in optimizer.last_report.bad] == ["weight", "bias", "loss"]


def test_accelerators_without_a_guard_stay_as_they_are() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum() * NAN)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert not optimizer.step_was_skipped and type(optimizer) is not PreparedOptimizer
    assert all(bool(weight.isnan().all()) for weight in model.parameters())


def test_an_engine_that_steps_by_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1))
    monkeypatch.setattr(accelerator.state, "distributed_type", accelerate.DistributedType.DEEPSPEED)
    with pytest.raises(NotImplementedError, match="under DEEPSPEED: its engine steps by itself"):
        nanscan.wrap(optimizer)


def test_in_fresh_processes_nobody_names_the_integration_and_two_skip_together_when_one_has_a_bad_loss() -> None:
    ranks = Ranks(scenarios="tests.integrations.rank_accelerate")
    try:
        for found in ranks.run("a_guard_that_accelerate_meets_later"):
            assert found == {"known before": False, "kind": "PreparedOptimizer", "skipped": (True, 1)}
        one, two = ranks.run("a_bad_loss_on_rank_1")
        assert one == two
        assert one["skipped"] == [False, True, False] and one["bad"] == [("loss", 1)]
        assert one["rates"] == [0.1 * 0.5**2, 0.1 * 0.5**2, 0.1 * 0.5**4]  # a step for each process
        assert one["name"] == "MULTI_CPU"
    finally:
        ranks.close()
