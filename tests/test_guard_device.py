"""Steps that the device decides, run on a CPU with torch's fused CPU optimizers (and on CUDA where there is one)."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import nanscan
from nanscan import engine
from tests.guarded import FUSED, INF, NAN, bits, make_params, set_grads, whole_state

pytestmark = pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")
every_fused = pytest.mark.parametrize("variant", FUSED, ids=str)


def deferred(optimizer, model=None, **options):
    """A guarded optimizer that takes the path of one CUDA device."""
    guarded = nanscan.wrap(optimizer, model, **options)
    guarded._deferred = True
    guarded._replan()
    return guarded


def pair(variant, **options):
    mine, theirs = make_params(), make_params()
    return (theirs, variant.make(theirs)), (mine, deferred(variant.make(mine), **options))


def run(params, optimizer, steps, bad_at=(), bad=NAN):
    for step in steps:
        set_grads(params, step, bad=bad if step in bad_at else None)
        optimizer.step()


class NeverReady:
    """Wraps `engine.launch_grads` so that no answer arrives until it is asked for; counts the waits."""

    def __init__(self, monkeypatch):
        self.real, self.waits, self.ready_now = engine.launch_grads, 0, False
        monkeypatch.setattr(engine, "launch_grads", self)

    def __call__(self, *args, **kwargs):
        scan, outer = self.real(*args, **kwargs), self

        class Late:
            found_inf, grad_scale, separate = scan.found_inf, scan.grad_scale, scan.separate

            def ready(self):
                return outer.ready_now

            def result(self):
                outer.waits += 1
                return scan.result()

        return Late()


@every_fused
def test_good_steps_equal_the_bare_optimizer_bit_for_bit(variant):
    (theirs, bare), (mine, guarded) = pair(variant)
    run(theirs, bare, range(4))
    run(mine, guarded, range(4))
    assert whole_state(mine, guarded) == whole_state(theirs, bare)
    assert guarded.skipped_steps == 0
    assert [r.step for r in guarded.history] == [0, 1, 2, 3]


@every_fused
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("bad_at", [[0], [2], [0, 1, 4]], ids=str)
def test_run_with_skips_equals_the_bare_run_without_those_steps(variant, bad_at, bad):
    (theirs, bare), (mine, guarded) = pair(variant)
    run(mine, guarded, range(6), bad_at, bad)
    run(theirs, bare, [step for step in range(6) if step not in bad_at])
    assert whole_state(mine, guarded) == whole_state(theirs, bare)
    assert guarded.skipped_steps == len(bad_at)
    assert [r.step for r in guarded.history if r.skipped] == bad_at
    assert [row.name for row in guarded.history[bad_at[0]].bad] == ["group0.param1"]


@every_fused
def test_skipped_step_leaves_weights_and_state_and_clears_the_gradients(variant):
    _, (mine, guarded) = pair(variant, clip_norm=0.5)
    run(mine, guarded, range(2))
    before = whole_state(mine, guarded)
    run(mine, guarded, [2], bad_at=[2])
    assert whole_state(mine, guarded) == before
    assert guarded.step_was_skipped
    assert not any(p.grad.any() for p in mine)


@every_fused
def test_clipped_steps_equal_torch_clipping_and_stepping(variant):
    (theirs, bare), (mine, guarded) = pair(variant, clip_norm=0.5)
    for step in range(4):
        set_grads(theirs, step)
        norm = torch.nn.utils.clip_grad_norm_(theirs, 0.5).item()
        bare.step()
        run(mine, guarded, [step])
        assert guarded.last_report.norm == pytest.approx(norm, rel=1e-6)
        assert guarded.last_report.clip_factor == pytest.approx(0.5 / (norm + 1e-6), rel=1e-6)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_first_step_skip_of_sgd_with_momentum_starts_from_zeros_not_from_garbage():
    weight = nn.Parameter(torch.ones(1 << 12))
    guarded = deferred(torch.optim.SGD([weight], lr=1.0, momentum=0.9, fused=True))
    torch.full((1 << 12,), 1e30)  # what uninitialised memory may hold
    weight.grad = torch.full_like(weight, NAN)
    guarded.step()
    assert guarded.state[weight]["momentum_buffer"].abs().max() == 0
    weight.grad = torch.full_like(weight, 0.5)
    guarded.step()
    assert weight.unique().tolist() == [0.5]


def test_dampening_takes_the_host_for_the_first_step_only():
    weight = nn.Parameter(torch.ones(2))
    guarded = deferred(torch.optim.SGD([weight], lr=1.0, momentum=0.9, dampening=0.5, fused=True))
    on_device = []
    for _ in range(3):
        weight.grad = torch.ones(2)
        on_device.append(guarded._can_defer())
        guarded.step()
    assert on_device == [False, True, True]


@pytest.mark.parametrize(
    "change",
    ["hook", "global hook", "clip_value", "raise", "not fused"],
)
def test_what_the_device_cannot_do_is_decided_on_the_host(change, monkeypatch):
    launches = []
    real = engine.launch_grads
    monkeypatch.setattr(engine, "launch_grads", lambda *a, **k: launches.append(1) or real(*a, **k))
    weight = nn.Parameter(torch.ones(2))
    fused = None if change == "not fused" else True
    options = {"clip_value": {"clip_value": 1.0}, "raise": {"on_nonfinite": "raise"}}.get(change, {})
    guarded = deferred(torch.optim.SGD([weight], lr=1.0, fused=fused), **options)
    handle = None
    if change == "hook":
        guarded.register_step_post_hook(lambda *_: None)
    if change == "global hook":
        handle = register_optimizer_step_pre_hook(lambda *_: None)
    weight.grad = torch.ones(2)
    guarded.step()
    if handle is not None:
        handle.remove()
    assert launches == []
    assert weight.tolist() == [0.0, 0.0]
    assert guarded.last_report.norm == pytest.approx(2**0.5)


def test_a_closure_that_runs_once_is_followed_by_a_step_of_the_device(monkeypatch):
    late = NeverReady(monkeypatch)
    weight = nn.Parameter(torch.ones(2))
    guarded = deferred(torch.optim.SGD([weight], lr=1.0, fused=True))

    def evaluate(slope):
        guarded.zero_grad()
        loss = (weight * slope).sum()
        loss.backward()
        return loss

    losses = [guarded.step(lambda slope=slope: evaluate(slope)) for slope in (0.5, NAN, 0.25)]
    assert late.waits == 0 and [loss.item() for loss in losses[::2]] == [1.0, 0.25]
    assert weight.tolist() == [0.25, 0.25]
    assert [row.name for row in guarded.history[1].bad] == ["group0.param0", "loss"]


def test_stepping_never_waits_and_reading_does(monkeypatch):
    late = NeverReady(monkeypatch)
    params = make_params()
    guarded = deferred(torch.optim.AdamW(params, lr=0.1, fused=True), clip_norm=1.0)
    run(params, guarded, range(5), bad_at=[1, 4])
    report = guarded.last_report
    assert (report.step, late.waits) == (4, 0)
    assert report.skipped
    assert late.waits == 1, "one report was read, one answer was waited for"
    assert (guarded.skipped_steps, guarded.consecutive_skips, guarded.first_skipped_step) == (2, 1, 1)
    assert late.waits == 5


def test_answers_that_have_arrived_are_recorded_by_the_next_step(monkeypatch):
    late = NeverReady(monkeypatch)
    reports = []
    params = make_params()
    guarded = deferred(torch.optim.AdamW(params, lr=0.1, fused=True), log=reports.append)
    run(params, guarded, range(3), bad_at=[1])
    assert reports == []
    late.ready_now = True
    run(params, guarded, [3])
    assert [(r.step, r.skipped) for r in reports] == [(0, False), (1, True), (2, False)]


def test_answers_are_not_asked_for_while_a_graph_is_captured(monkeypatch):
    late = NeverReady(monkeypatch)
    reports = []
    params = make_params()
    guarded = deferred(torch.optim.AdamW(params, lr=0.1, fused=True), log=reports.append)
    run(params, guarded, [0])
    late.ready_now = True
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_initialized", lambda: True)
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        run(params, guarded, [1])
    assert reports == []
    run(params, guarded, [2])
    assert [r.step for r in reports] == [0, 1]


def test_read_reports_let_go_of_what_the_device_holds(monkeypatch):
    late = NeverReady(monkeypatch)
    scans = []
    launched = late.__call__
    monkeypatch.setattr(engine, "launch_grads", lambda *a, **k: remember(launched(*a, **k)))

    def remember(scan):
        scans.append(weakref.ref(scan))
        return scan

    params = make_params()
    guarded = deferred(torch.optim.AdamW(params, lr=0.1, fused=True))
    run(params, guarded, range(2))
    assert [scan() is None for scan in scans] == [False, False]
    assert [r.skipped for r in guarded.history] == [False, False]
    assert [scan() is None for scan in scans] == [True, True]


@pytest.mark.parametrize("on_device", [False, True])
def test_shared_gradient_is_clipped_once_for_all_its_parameters(on_device):
    first, second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    guarded = nanscan.wrap(torch.optim.SGD([first, second], lr=1.0, fused=True), clip_norm=0.5)
    guarded._deferred = on_device
    guarded._replan()
    first.grad = second.grad = torch.full((4,), 3.0)
    guarded.step()
    torch.testing.assert_close(first, torch.full((4,), 0.75), rtol=1e-5, atol=0, check_dtype=False)
    assert bits(first) == bits(second)


def test_answers_do_not_pile_up_without_bound(monkeypatch):
    NeverReady(monkeypatch)
    params = make_params()
    guarded = deferred(torch.optim.AdamW(params, lr=0.1, fused=True))
    run(params, guarded, range(200))
    assert len(guarded._device_steps) <= 65


def test_training_diverged_comes_with_a_later_step_when_the_answer_is_late(monkeypatch):
    late = NeverReady(monkeypatch)
    params = make_params()
    guarded = deferred(torch.optim.AdamW(params, lr=0.1, fused=True), max_consecutive_skips=2)
    before = bits(params)
    run(params, guarded, range(2), bad_at=[0, 1])
    late.ready_now = True
    with pytest.raises(nanscan.TrainingDiverged) as error:
        run(params, guarded, [2])
    assert error.value.report.step == 1
    assert bits(params) == before


def test_reading_a_counter_never_raises_what_the_next_step_will():
    params = make_params()
    guarded = deferred(torch.optim.AdamW(params, lr=0.1, fused=True), max_consecutive_skips=1)
    run(params, guarded, [0], bad_at=[0])
    assert guarded.consecutive_skips == 1
    with pytest.raises(nanscan.TrainingDiverged):
        run(params, guarded, [1])


def test_observed_loss_joins_the_launch():
    weight = nn.Parameter(torch.ones(2))
    guarded = deferred(torch.optim.SGD([weight], lr=1.0, fused=True))
    for loss in (1.0, NAN, torch.tensor(INF)):
        guarded.observe(loss)
        weight.grad = torch.full((2,), 0.25)
        guarded.step()
    assert weight.tolist() == [0.75, 0.75]
    assert [[row.name for row in r.bad] for r in guarded.history] == [[], ["loss"], ["loss"]]


def test_buffers_are_looked_at_when_the_skip_is_known():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    guarded = deferred(torch.optim.SGD(model.parameters(), lr=1.0, fused=True), model)
    model(torch.tensor([[NAN, 1.0], [1.0, 1.0]])).sum().backward()
    guarded.step()
    assert [row.name for row in guarded.last_report.buffers] == ["1.running_mean", "1.running_var"]


def test_no_gradient_is_hinted_at_once():
    guarded = deferred(torch.optim.SGD(make_params(), lr=1.0, fused=True))
    with pytest.warns(UserWarning, match="no gradients at step 0"):
        guarded.step()
        guarded.step()
        assert guarded.skipped_steps == 0


def test_schedulers_made_before_wrapping_are_not_alarmed_by_a_skip(recwarn):
    params = make_params()
    inner = torch.optim.SGD(params, lr=1.0, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1)
    guarded = deferred(inner)
    run(params, guarded, [0], bad_at=[0])
    scheduler.step()
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


@pytest.mark.parametrize(
    "copying", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
)
def test_copies_wait_for_pending_answers(copying, monkeypatch):
    NeverReady(monkeypatch)
    params = make_params()
    guarded = deferred(torch.optim.AdamW(params, lr=0.1, fused=True))
    run(params, guarded, range(3), bad_at=[1])
    twin = copying(guarded)
    assert (twin.skipped_steps, len(twin.history)) == (1, 3)


@pytest.mark.parametrize("unscale_first", [False, True])
@every_fused
def test_gradient_scaler_hands_its_flags_to_the_device(variant, unscale_first):
    (theirs, bare), (mine, guarded) = pair(variant, clip_norm=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step, bad in enumerate([None, INF, None, NAN, None]):
        set_grads(mine, step, bad=bad)
        scaler.scale(torch.zeros(()))
        for p in mine:
            p.grad = p.grad * scaler.get_scale()
        if unscale_first:
            scaler.unscale_(guarded)
        scaler.step(guarded)
        scaler.update()
        if bad is None:
            set_grads(theirs, step)
            norm = torch.nn.utils.clip_grad_norm_(theirs, 0.5).item()
            bare.step()
            assert guarded.last_report.norm == pytest.approx(norm, rel=1e-6)
            assert guarded.last_report.clip_factor == pytest.approx(0.5 / (norm + 1e-6), rel=1e-5)
    assert scaler.get_scale() == 16.0
    assert guarded.skipped_steps == 2
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("flag", [0.5, 2.0, NAN])
def test_found_inf_that_is_not_exactly_one_skips(flag):
    weight = nn.Parameter(torch.ones(2))
    guarded = deferred(torch.optim.AdamW([weight], lr=0.1, fused=True))
    weight.grad = torch.ones(2)
    guarded.found_inf, guarded.grad_scale = torch.tensor(flag), torch.tensor(2.0)
    guarded.step()
    assert weight.tolist() == [1.0, 1.0]
    assert guarded.step_was_skipped
    assert float(guarded.state[weight]["step"]) == 0.0


@pytest.mark.parametrize("scale", [0.0, INF, NAN])
@pytest.mark.parametrize("on_device", [False, True])
def test_loss_scale_that_went_to_zero_or_inf_skips(scale, on_device):
    weight = nn.Parameter(torch.ones(2))
    guarded = nanscan.wrap(torch.optim.AdamW([weight], lr=0.1, fused=True), clip_norm=1.0)
    guarded._deferred = on_device
    guarded._replan()
    weight.grad = torch.zeros(2)
    guarded.found_inf, guarded.grad_scale = torch.tensor(0.0), torch.tensor(scale)
    guarded.step()
    assert weight.tolist() == [1.0, 1.0]
    assert (guarded.step_was_skipped, guarded.last_report.norm) == (True, 0.0)


def test_settled_reports_hold_neither_the_guard_nor_the_model():
    params = make_params()
    guarded = deferred(torch.optim.AdamW(params, lr=0.1, fused=True))
    run(params, guarded, range(3), bad_at=[1])
    reports = list(guarded.history)
    gone = weakref.ref(guarded)
    del guarded
    gc.collect()
    assert gone() is None
    assert [r.skipped for r in reports] == [False, True, False]


@pytest.mark.cuda
@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_flags_of_any_device_and_dtype_are_read_on_cuda(where, dtype):
    weight = nn.Parameter(torch.ones(4, device="cuda"))
    weight.grad = torch.full_like(weight, 6.0)
    flags = {"grad_scale": torch.tensor([2.0], dtype=dtype), "found_inf": torch.tensor(1.0, dtype=dtype)}
    scan = engine.launch_grads(
        [{"params": [weight]}], clip_norm=1.0, **{name: flag.to(where) for name, flag in flags.items()}
    )
    assert (scan.found_inf.device, scan.found_inf.item()) == (weight.device, 1.0)
    assert scan.grad_scale.item() == pytest.approx(2 * (6 + 1e-6), rel=1e-6)


@pytest.mark.cuda
def test_answers_that_were_read_hold_no_device_memory():
    weight = nn.Parameter(torch.ones(1 << 10, device="cuda"))
    weight.grad = torch.ones_like(weight)
    groups = [{"params": [weight]}]
    engine.scan_grads(groups)  # makes the workspace
    before = torch.cuda.memory_allocated()
    kept = [engine.scan_grads(groups) for _ in range(100)]
    assert torch.cuda.memory_allocated() == before
    assert {scan.norm for scan in kept} == {32.0}


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_cuda_optimizers_take_this_path_by_themselves(name):
    weight = nn.Parameter(torch.ones(1000, device="cuda"))
    guarded = nanscan.wrap(getattr(torch.optim, name)([weight], lr=0.1, fused=True), clip_norm=1.0)
    weight.grad = torch.ones_like(weight)
    guarded.step()
    before = bits(weight.cpu())
    weight.grad = torch.full_like(weight, NAN)
    guarded.step()
    assert len(guarded._device_steps) > 0 or guarded.step_was_skipped
    assert guarded.step_was_skipped
    assert bits(weight.cpu()) == before


@pytest.mark.cuda
def test_model_that_moves_to_cuda_after_steps_on_the_cpu_lets_the_device_decide():
    model = nn.Linear(3, 1)
    guarded = nanscan.wrap(torch.optim.AdamW(model.parameters(), lr=0.1, fused=True))
    model(torch.ones(2, 3)).sum().backward()
    guarded.step()
    assert guarded._plain
    model.to("cuda")
    for state in guarded.state.values():
        state.update({key: value.cuda() for key, value in state.items()})
    for _ in range(2):
        model(torch.ones(2, 3, device="cuda")).sum().backward()
        guarded.step()
        assert not guarded._plain and guarded._can_defer()
    assert [r.step for r in guarded.history] == [0, 1, 2]
