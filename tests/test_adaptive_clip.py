"""AdaptiveClip: each rule against a plain float64 implementation of its paper, and what a guarded step does with it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import nanscan
from nanscan import AdaptiveClip
from nanscan.demo.data import batches, load_digits
from tests.guarded import INF, NAN, bits, one, step

pytestmark = pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")


def norms_with_spikes(steps=1000, seed=0):
    """Norms that fall and scatter as in a training, with a spike every 97 steps and one of 1e12."""
    generator = np.random.default_rng(seed)
    norms = 5.0 * np.exp(-np.arange(steps) / 300) * generator.lognormal(0.0, 0.3, steps)
    norms[::97] *= 40.0
    norms[500] = 1e12
    return [float(np.float32(norm)) for norm in norms]


# ---- the papers' rules, as simply as they can be written -------------------------------------------------------------


def autoclip(norms, percentile, window=None):
    limits, seen = [], []
    for norm in norms:
        seen.append(norm)
        seen = seen[-window:] if window else seen
        limits.append(float(np.percentile(np.array(seen, dtype=np.float64), percentile)))
    return [min(1.0, limit / norm) for limit, norm in zip(limits, norms, strict=True)]


def zclip(norms, alpha=0.97, threshold=2.5, warmup=25, eps=1e-6):
    factors, first, mean, variance = [], [], None, None
    for norm in norms:
        if mean is None:
            first.append(norm)
            if len(first) == warmup:
                mean, variance = np.mean(first), np.var(first)
            factors.append(1.0)
            continue
        clipped, deviation = norm, math.sqrt(variance)
        z = (norm - mean) / (deviation + eps)
        if z > threshold:
            clipped = mean + threshold * deviation / (z / threshold)
        factors.append(min(1.0, clipped / norm))
        mean = alpha * mean + (1 - alpha) * clipped
        variance = alpha * variance + (1 - alpha) * (clipped - mean) ** 2
    return factors


def agc(weight, grad, ratio, eps):
    """Unit by unit, in float64."""
    weight, grad = weight.detach().double().clone(), grad.double().clone()
    units = range(len(grad)) if grad.dim() > 1 else [...]
    for unit in units:
        limit, norm = ratio * max(float(weight[unit].norm()), eps), float(grad[unit].norm())
        if norm > limit:
            grad[unit] *= limit / norm
    return grad


RULES = [
    pytest.param(AdaptiveClip("autoclip"), lambda n: autoclip(n, 10), id="autoclip"),
    pytest.param(AdaptiveClip("autoclip", percentile=77.5), lambda n: autoclip(n, 77.5), id="autoclip-77.5"),
    pytest.param(AdaptiveClip("autoclip", percentile=50, window=31), lambda n: autoclip(n, 50, 31), id="window"),
    pytest.param(AdaptiveClip("zclip"), zclip, id="zclip"),
    pytest.param(
        AdaptiveClip("zclip", alpha=0.9, z_threshold=1.5, warmup=40), lambda n: zclip(n, 0.9, 1.5, 40), id="zclip-0.9"
    ),
]


@pytest.mark.parametrize(("rule", "reference"), RULES)
def test_a_thousand_steps_are_clipped_as_the_paper_says(rule, reference):
    norms = norms_with_spikes()
    weight, optimizer = one([0.0, 0.0], clip_norm=rule)
    factors, moved = [], []
    for norm in norms:
        before = weight[0].item()
        step(optimizer, weight, [norm, 0.0])
        moved.append(before - weight[0].item())
        factors.append(optimizer.last_report.clip_factor)
        with torch.no_grad():
            weight.zero_()
    expected = reference(norms)
    assert factors == pytest.approx(expected, rel=1e-9)
    assert moved == pytest.approx([f * n for f, n in zip(expected, norms, strict=True)], rel=1e-5)
    assert sum(factor < 1 for factor in factors) >= 10


@pytest.mark.parametrize(("rule", "reference"), [RULES[0], RULES[3]])
def test_a_real_training_is_clipped_as_the_paper_says(rule, reference):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = nanscan.wrap(torch.optim.AdamW(model.parameters(), lr=3e-3), model, clip_norm=rule)
    for images, labels in batches(load_digits(), epochs=5, batch_size=32, seed=0):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    history = optimizer.history
    assert len(history) == 225
    assert [r.clip_factor for r in history] == pytest.approx(reference([r.norm for r in history]), rel=1e-9)
    for report in history:
        assert report.clip_limit is None or report.clip_factor == pytest.approx(min(1, report.clip_limit / report.norm))


SHAPES = [(), (7,), (5, 3), (4, 3, 3), (4, 2, 3, 3), (2, 1, 2, 2, 2), (3, 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_agc_clips_each_unit_as_the_paper_says(dtype):
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    weights.append(nn.Parameter(torch.zeros(3, 2, dtype=dtype)))  # units of zeros may begin to learn, by eps
    optimizer = nanscan.wrap(torch.optim.SGD(weights, lr=0.0), clip_norm=AdaptiveClip("agc", ratio=0.5))
    for number in range(20):
        before = []
        for weight in weights:
            grad = torch.randn(weight.shape, generator=generator)
            weight.grad = (grad * 10.0 ** (number % 3 - 1)).to(dtype)
            before.append(weight.grad.clone())
        optimizer.step()
        expected = [agc(w, g, 0.5, 1e-3) for w, g in zip(weights, before, strict=True)]
        for weight, wanted in zip(weights, expected, strict=True):
            torch.testing.assert_close(weight.grad, wanted.to(dtype))
        after = math.sqrt(sum(float(g.square().sum()) for g in expected))
        factor = after / math.sqrt(sum(float(g.double().square().sum()) for g in before))
        assert optimizer.last_report.clip_factor == pytest.approx(factor, rel=1e-2 if dtype.itemsize < 4 else 1e-5)


def test_agc_trains_as_the_plain_loop_over_a_thousand_steps():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 4, 9), nn.ReLU(), nn.Flatten(), nn.Linear(224, 10)).double()
    twin = nn.Sequential(nn.Conv1d(1, 4, 9), nn.ReLU(), nn.Flatten(), nn.Linear(224, 10)).double()
    twin.load_state_dict(model.state_dict())
    rule = AdaptiveClip("agc", ratio=0.05, exclude=("3",))
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.05), model, clip_norm=rule)
    plain = torch.optim.SGD(twin.parameters(), lr=0.05)
    clipped = 0
    for images, labels in batches(load_digits(), epochs=23, batch_size=32, seed=0):
        for net, opt in ((model, optimizer), (twin, plain)):
            opt.zero_grad()
            nn.functional.cross_entropy(net(images.double().unsqueeze(1)), labels).backward()
        for name, param in twin.named_parameters():
            if not name.startswith("3"):
                param.grad = agc(param, param.grad, 0.05, 1e-3)
        optimizer.step()
        plain.step()
        clipped += optimizer.last_report.clip_factor < 1
    assert optimizer.last_report.step >= 1000
    assert clipped > 100
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_agc_takes_sparse_rows_shared_expanded_and_complex_gradients():
    table, a, b = nn.Parameter(torch.ones(5, 2)), nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3))
    spiral = nn.Parameter(torch.ones(1, 1, dtype=torch.complex64))
    optimizer = nanscan.wrap(torch.optim.SGD([table, a, b, spiral], lr=0.0), clip_norm=AdaptiveClip("agc", ratio=1.0))
    rows = torch.tensor([[30.0, 40.0], [0.3, 0.4], [30.0, 40.0]])
    table.grad = torch.sparse_coo_tensor([[3, 1, 3]], rows, (5, 2), check_invariants=True)
    a.grad = b.grad = torch.full((1, 1), 5.0).expand(2, 3)
    spiral.grad = torch.tensor([[3 + 4j]])
    optimizer.step()
    root = math.sqrt(2)
    assert table.grad.to_dense()[3].tolist() == pytest.approx([root * 0.6, root * 0.8])
    assert table.grad.to_dense()[1].tolist() == pytest.approx([0.3, 0.4])
    assert a.grad.tolist() == b.grad.tolist() == [[1.0] * 3] * 2
    assert spiral.grad.item() == pytest.approx(0.6 + 0.8j)


def test_agc_exclude_takes_names_modules_and_patterns_and_names_what_is_missing():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = nanscan.wrap(
        torch.optim.SGD(model.parameters(), lr=0.0), model, clip_norm=AdaptiveClip("agc", exclude=("1", "*.bias"))
    )
    for param in model.parameters():
        param.grad = torch.full_like(param, 100.0)
    optimizer.step()
    changed = [name for name, p in model.named_parameters() if p.grad.max() < 100]
    assert changed == ["0.weight"]
    with pytest.raises(ValueError, match=r"exclude: no parameter is called 'head'; they are called 0.weight, 0.bias"):
        nanscan.wrap(torch.optim.SGD(model.parameters()), model, clip_norm=AdaptiveClip("agc", exclude=("head",)))


# ---- what may enter --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["autoclip", "zclip"])
@pytest.mark.parametrize("on_nonfinite", ["skip", "zero", "warn"])
def test_a_bad_step_leaves_no_trace_in_the_history(rule, on_nonfinite):
    weight, optimizer = one([0.0, 0.0], clip_norm=AdaptiveClip(rule), on_nonfinite=on_nonfinite)
    for norm in range(1, 31):
        step(optimizer, weight, [float(norm), 0.0])
    before = bits(optimizer.guard_state_dict()["clip"])
    for bad in (NAN, INF):
        step(optimizer, weight, [bad, 1e30])
        with torch.no_grad():
            weight.zero_()
    step(optimizer, weight, [0.0, 0.0])  # nor does a step without gradients
    assert bits(optimizer.guard_state_dict()["clip"]) == before


def test_non_finite_gradients_are_not_touched_before_the_decision():
    weight, optimizer = one([1.0, 1.0], clip_norm=AdaptiveClip("agc"), on_nonfinite="raise")
    with pytest.raises(nanscan.NonFiniteError, match="NaN"):
        step(optimizer, weight, [100.0, NAN])
    assert weight.grad[0] == 100.0


@pytest.mark.parametrize("fused", [True, False])
def test_max_norm_holds_in_the_warm_up_and_does_not_enter(fused, either_way_of_clipping):
    weight, optimizer = one([0.0, 0.0], inner={"fused": fused}, clip_norm=AdaptiveClip("zclip", max_norm=2.0))
    for _ in range(30):
        step(optimizer, weight, [3.0, 4.0])
        assert optimizer.last_report.clip_factor == pytest.approx(0.4)
        assert optimizer.last_report.clip_limit == 2.0
    assert optimizer.guard_state_dict()["clip"]["mean"] == pytest.approx(5.0)


@pytest.mark.parametrize("rule", ["autoclip", "zclip", "agc"])
def test_clip_value_comes_first_and_the_norm_that_is_left_counts(rule):
    weight, optimizer = one([1.0, 1.0], lr=0.0, clip_norm=AdaptiveClip(rule), clip_value=3.0)
    for _ in range(30):
        step(optimizer, weight, [30.0, -40.0])
    state = optimizer.guard_state_dict()["clip"]
    left = math.hypot(3.0, 3.0)
    if rule == "agc":
        assert float(weight.grad.norm()) == pytest.approx(0.01 * math.sqrt(2))
    else:
        assert (state["norms"].tolist() if rule == "autoclip" else [state["mean"]])[0] == pytest.approx(left)
        assert weight.grad.tolist() == pytest.approx([3.0, -3.0])


@pytest.mark.parametrize("rule", ["autoclip", "zclip", "agc"])
def test_with_a_gradient_scaler_the_unscaled_norm_counts(rule):
    runs = []
    for scale in (None, 2.0**10):
        torch.manual_seed(0)
        model = nn.Linear(4, 2).double()
        optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, clip_norm=AdaptiveClip(rule))
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for number in range(60):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4).double()).square().mean() * (1000.0 if number == 50 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        runs.append(([r.clip_factor for r in optimizer.history], model.weight.detach()))
    assert runs[1][0] == pytest.approx(runs[0][0], rel=1e-9)
    torch.testing.assert_close(runs[1][1], runs[0][1])
    assert min(runs[0][0]) < 0.5


def test_lbfgs_enters_one_norm_a_step():
    weight = nn.Parameter(torch.tensor([3.0, -2.0]))
    rule = AdaptiveClip("autoclip", percentile=100)
    optimizer = nanscan.wrap(torch.optim.LBFGS([weight], lr=0.1, max_iter=4), clip_norm=rule)

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    norms = optimizer.guard_state_dict()["clip"]["norms"]
    assert len(norms) == 3
    assert float(weight.detach().norm()) < 3.0


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "magic"}, r"rule must be 'autoclip', 'zclip', 'agc', got 'magic'"),
        ({"rule": "autoclip", "percentile": 101}, r"percentile must be a number from 0 to 100, got 101"),
        ({"rule": "autoclip", "window": 0}, r"window must be an int of at least 1, got 0"),
        ({"rule": "autoclip", "max_norm": 0}, r"max_norm must be a positive finite number, or None"),
        ({"rule": "zclip", "alpha": 1.0}, r"alpha must be a number above 0 and below 1, got 1.0"),
        ({"rule": "zclip", "z_threshold": NAN}, r"z_threshold must be a positive finite number, got nan"),
        ({"rule": "zclip", "warmup": 1}, r"warmup must be an int of at least 2, got 1"),
        ({"rule": "agc", "ratio": -0.1}, r"ratio must be a positive finite number, got -0.1"),
        ({"rule": "agc", "eps": -1}, r"eps must be a finite number that is not negative"),
        (
            {"rule": "agc", "warmup": 5},
            r"warmup is an option of rule 'zclip', not of 'agc', which has ratio, eps",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveClip(**arguments)


def test_a_rules_name_alone_is_answered_with_what_to_write():
    with pytest.raises(ValueError, match=r"clip_norm must be a positive number or nanscan.AdaptiveClip\('zclip'\)"):
        one(clip_norm="zclip")
    with pytest.raises(
        ValueError, match=r"clip_norm must be a positive number, got the text '1.0': make a float of it"
    ):
        one(clip_norm="1.0")


def test_one_adaptive_clip_serves_two_optimizers_that_keep_apart():
    rule = AdaptiveClip("autoclip")
    weight, optimizer = one([0.0, 0.0], clip_norm=rule)
    _, other = one([0.0, 0.0], clip_norm=rule)
    step(optimizer, weight, [3.0, 4.0])
    assert optimizer.guard_state_dict()["clip"]["norms"].tolist() == [5.0]
    assert other.guard_state_dict()["clip"]["norms"].tolist() == []


def test_a_second_wrap_keeps_the_history_of_the_same_rule_and_begins_another_rules_anew():
    weight, optimizer = one([0.0, 0.0], clip_norm=AdaptiveClip("autoclip"))
    step(optimizer, weight, [3.0, 4.0])
    nanscan.wrap(optimizer, clip_norm=AdaptiveClip("autoclip", percentile=50))
    assert optimizer.guard_state_dict()["clip"]["norms"].tolist() == [5.0]
    nanscan.wrap(optimizer, clip_norm=AdaptiveClip("zclip"))
    assert optimizer.guard_state_dict()["clip"]["first"].tolist() == []
    nanscan.wrap(optimizer, clip_norm=1.0)
    assert optimizer.guard_state_dict()["clip"] is None
    step(optimizer, weight, [3.0, 4.0])
    assert optimizer.last_report.clip_factor == pytest.approx(0.2)
    assert optimizer.last_report.clip_limit is None
