"""nanscan.GradScaler does what torch.amp.GradScaler does, step for step, with guarded optimizers and with bare ones."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import nanscan
from tests.guarded import INF, NAN, bits

pytestmark = pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")
MAKERS = {
    f"{name}({kind})": (getattr(torch.optim, name), {**options, **flags})
    for name, options in {"SGD": {"lr": 0.05, "momentum": 0.9}, "AdamW": {"lr": 0.02}}.items()
    for kind, flags in {"foreach": {"foreach": True}, "fused": {"fused": True}, "loop": {"foreach": False}}.items()
}
every_maker = pytest.mark.parametrize("maker", MAKERS.values(), ids=list(MAKERS))


def make(maker, seed=0):
    generator = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((7, 5), (11,), (1,))]
    kind, options = maker
    return params, kind(params, **options)


def half_loss(params, generator):
    """A float16 loss: its gradients overflow where the loss scale is above about 2^12, and now and then far below."""
    loss = torch.zeros(())
    for p in params:
        factors = torch.randn(p.shape, generator=generator).half() * 8
        if torch.rand((), generator=generator) < 0.02:
            factors = factors * 100
        loss = loss + (p.half() * factors).float().sum()
    return loss


class Run:
    """Some steps of training with a scaler; what happened to the scale, and which steps were skipped."""

    def __init__(self, maker, scaler, *, guard=None, clip=None, unscale=False):
        self.params, self.optimizer = make(maker)
        if guard is not None:
            self.optimizer = nanscan.wrap(self.optimizer, max_consecutive_skips=None, **guard)
        self.scaler, self.clip, self.unscale = scaler, clip, unscale
        self.scales, self.skips = [], []
        self.generator = torch.Generator().manual_seed(1)

    def steps(self, count):
        for _ in range(count):
            self.optimizer.zero_grad()
            self.scaler.scale(half_loss(self.params, self.generator)).backward()
            if self.unscale or self.clip is not None:
                self.scaler.unscale_(self.optimizer)
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.params, self.clip)
            before = bits(self.params[0])
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scales.append(self.scaler.get_scale())
            self.skips.append(bits(self.params[0]) == before)
        return self


OPTIONS = {"init_scale": 2.0**8, "growth_interval": 6}  # torch's fused SGD must not skip its first step


@every_maker
@pytest.mark.parametrize("clip", [None, 20.0])
def test_guarded_steps_follow_torchs_scale_and_weights_for_hundreds_of_steps(maker, clip):
    theirs = Run(maker, torch.amp.GradScaler("cpu", **OPTIONS), clip=clip).steps(200)
    mine = Run(maker, nanscan.GradScaler("cpu", **OPTIONS), guard={"clip_norm": clip}).steps(200)
    assert mine.scales == theirs.scales
    assert mine.skips == theirs.skips
    assert 15 < sum(mine.skips) < 120, "otherwise this shows little"
    assert len(set(mine.scales)) > 4
    torch.testing.assert_close(mine.params, theirs.params, rtol=2e-4, atol=2e-5)
    assert mine.optimizer.skipped_steps == sum(mine.skips)


@every_maker
@pytest.mark.parametrize("unscale", [False, True])
def test_bare_steps_equal_torchs_bit_for_bit(maker, unscale):
    theirs = Run(maker, torch.amp.GradScaler("cpu", **OPTIONS), unscale=unscale).steps(100)
    mine = Run(maker, nanscan.GradScaler("cpu", **OPTIONS), unscale=unscale).steps(100)
    assert (mine.scales, mine.skips) == (theirs.scales, theirs.skips)
    assert bits(mine.params) == bits(theirs.params)
    assert sum(mine.skips) > 5


@every_maker
def test_unscaling_and_clipping_by_hand_with_a_guard_clips_once(maker):
    theirs = Run(maker, torch.amp.GradScaler("cpu", **OPTIONS), clip=20.0).steps(100)
    mine = Run(maker, nanscan.GradScaler("cpu", **OPTIONS), clip=20.0, guard={"clip_norm": 20.0}).steps(100)
    assert (mine.scales, mine.skips) == (theirs.scales, theirs.skips)
    torch.testing.assert_close(mine.params, theirs.params, rtol=2e-4, atol=2e-5)
    assert all(report.clip_factor > 0.999 for report in mine.optimizer.history)


@pytest.mark.parametrize("maker", [MAKERS["AdamW(fused)"], MAKERS["SGD(fused)"]])
@pytest.mark.parametrize("clip", [None, 20.0])
def test_steps_that_the_device_decides_follow_torch_too(maker, clip):
    theirs = Run(maker, torch.amp.GradScaler("cpu", **OPTIONS), clip=clip).steps(100)
    mine = Run(maker, nanscan.GradScaler("cpu", **OPTIONS), guard={"clip_norm": clip})
    mine.optimizer._deferred = True  # as if the parameters were on one CUDA device
    mine.optimizer._replan()
    mine.steps(100)
    assert mine.scales == theirs.scales
    assert [report.loss_scale for report in mine.optimizer.history] == [OPTIONS["init_scale"], *mine.scales[:-1]]
    assert [report.skipped for report in mine.optimizer.history] == theirs.skips
    torch.testing.assert_close(mine.params, theirs.params, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_parameters_of_other_dtypes_step_as_with_torch(dtype, guarded):
    weights, scales = [], []
    for kind in (torch.amp.GradScaler, nanscan.GradScaler):
        p = nn.Parameter(torch.ones(8, dtype=dtype))
        optimizer = torch.optim.AdamW([p], lr=0.1, fused=True)
        if guarded and kind is nanscan.GradScaler:
            optimizer = nanscan.wrap(optimizer)
        scaler = kind("cpu", init_scale=4.0, growth_interval=2)
        for factor in (1.0, 2.0, INF, 3.0, 0.5):
            scaler.scale((p * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        weights.append(p)
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1]
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("bad", [None, INF, NAN])
def test_sparse_gradients_are_checked_and_unscaled(guarded, bad):
    table = nn.Embedding(5, 2, sparse=True)
    before = table.weight.detach().clone()
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    if guarded:
        optimizer = nanscan.wrap(optimizer, table)
    scaler = nanscan.GradScaler("cpu", init_scale=256.0)
    out = table(torch.tensor([1, 3, 1]))
    scaler.scale((out * (1.0 if bad is None else torch.tensor([1.0, bad]))).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    if bad is None:
        moved = (before - table.weight).tolist()
        assert torch.allclose(
            torch.tensor(moved), torch.tensor([[0.0] * 2, [2.0] * 2, [0.0] * 2, [1.0] * 2, [0.0] * 2])
        )
    else:
        assert bits(table.weight) == bits(before)
    assert scaler.get_scale() == (256.0 if bad is None else 128.0)


def test_it_is_a_torch_scaler_with_the_same_arguments():
    assert issubclass(nanscan.GradScaler, torch.amp.GradScaler)
    scaler = nanscan.GradScaler("cpu", 8.0, 3.0, 0.25, 7)
    assert (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor()) == (8.0, 3.0, 0.25)
    assert (scaler.get_growth_interval(), scaler.is_enabled()) == (7, True)
    assert (scaler.get_min_scale(), scaler.get_hysteresis()) == (1.0, 1)


def test_disabled_scaler_passes_everything_through():
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = nanscan.wrap(torch.optim.SGD([weight], lr=1.0))
    scaler = nanscan.GradScaler("cpu", enabled=False)
    loss = (weight * 0.5).sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (weight.item(), scaler.get_scale(), scaler.state_dict()) == (0.5, 1.0, {})
    scaler.load_state_dict({"scale": 3.0})
    lbfgs = torch.optim.LBFGS([weight])
    assert scaler.step(lbfgs, lambda: (weight * 0.0).sum()) == 0.0
    assert pickle.loads(pickle.dumps(scaler)).is_enabled() is False


def trained(kind, **options):
    run = Run(MAKERS["SGD(loop)"], kind("cpu", **OPTIONS, **options), guard={})
    return run.steps(15)


def test_state_goes_from_torch_to_nanscan_and_back():
    theirs = trained(torch.amp.GradScaler).scaler
    mine = nanscan.GradScaler("cpu", hysteresis=2, min_scale=2.0)
    mine.load_state_dict(theirs.state_dict())
    assert {key: mine.state_dict()[key] for key in theirs.state_dict()} == theirs.state_dict()
    assert (mine.get_hysteresis(), mine.get_min_scale()) == (2, 2.0)
    again = torch.amp.GradScaler("cpu")
    again.load_state_dict(mine.state_dict())
    assert again.state_dict() == theirs.state_dict()


def through_pickle(scaler):
    return pickle.loads(pickle.dumps(scaler))


def through_file(scaler):
    file = io.BytesIO()
    torch.save(scaler.state_dict(), file)
    file.seek(0)
    new = nanscan.GradScaler("cpu")
    new.load_state_dict(torch.load(file, weights_only=True))
    return new


@pytest.mark.parametrize("copying", [copy.deepcopy, through_pickle, through_file])
def test_copies_go_on_as_the_original_would(copying):
    run = trained(nanscan.GradScaler, hysteresis=3)
    twin = copying(run.scaler)
    assert type(twin) is nanscan.GradScaler
    assert twin.state_dict() == run.scaler.state_dict()
    for overflow in (True, False, True, True, True, True):
        for scaler in (run.scaler, twin):
            one_turn(scaler, overflow)
        assert twin.state_dict() == run.scaler.state_dict()


def one_turn(scaler, overflow):
    weight = nn.Parameter(torch.ones(2))
    optimizer = nanscan.wrap(torch.optim.SGD([weight], lr=0.1))
    scaler.scale((weight * (INF if overflow else 1.0)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def reference_scale(overflows, scale, growth_interval, hysteresis, min_scale):
    """The rule in plain Python."""
    scales, good, spent = [], 0, 0
    for overflow in overflows:
        if overflow:
            good, spent = 0, spent + 1
            if spent >= hysteresis:
                scale = max(scale * 0.5, min_scale)
        else:
            good, spent = good + 1, 0
            if good == growth_interval:
                scale, good = scale * 2, 0
        scales.append(scale)
    return scales


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("min_scale", [0.0, 1.0, 16.0])
def test_hysteresis_and_min_scale_follow_the_rule(hysteresis, min_scale):
    generator = torch.Generator().manual_seed(hysteresis)
    overflows = (torch.rand(150, generator=generator) < 0.4).tolist() + [True] * 12 + [False] * 9
    options = {"growth_interval": 3, "hysteresis": hysteresis, "min_scale": min_scale}
    scaler = nanscan.GradScaler("cpu", init_scale=64.0, **options)
    scales = []
    for overflow in overflows:
        one_turn(scaler, overflow)
        scales.append(scaler.get_scale())
    assert scales == reference_scale(overflows, 64.0, **options)
    assert min(scales) >= min_scale


def test_first_step_skip_of_bare_fused_sgd_with_momentum_starts_from_zeros_not_from_garbage():
    weight = nn.Parameter(torch.ones(1 << 12))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9, fused=True)
    scaler = nanscan.GradScaler("cpu", init_scale=4.0)
    torch.full((1 << 12,), 1e30)  # what uninitialised memory may hold
    for factor in (INF, 0.5):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert weight.unique().tolist() == [0.5]
