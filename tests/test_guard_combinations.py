"""Every option with every other, drawn at random: a guarded run beside a plain one that is worked out in float64."""

from __future__ import annotations

import copy
import math
import pickle
import random
import warnings
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

import nanscan
from nanscan.clipping import clip_step, spikes
from nanscan.clipping.autoclip import AutoClip
from nanscan.clipping.zclip import ZClip
from tests.guarded import INF, NAN, bits

STEPS = 30
OPTIMIZERS = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "AdamW": {"lr": 0.01},
    "Adagrad": {"lr": 0.05},
    "RMSprop": {"lr": 0.01},
}
CLIPS = (None, 0.7, "autoclip", "zclip", "agc")


def always_skip(report):
    return "skip"


@dataclass
class Draw:
    """The options of one run; `rng` draws what happens in it."""

    seed: int
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        self.optimizer = rng.choice(list(OPTIMIZERS))
        self.way = rng.choice(["fused", "foreach", "loop"] if self.optimizer != "RMSprop" else ["foreach", "loop"])
        self.scaler = rng.choice([None, "torch", "nanscan"])
        other = [torch.float32, torch.float64, torch.bfloat16]
        other += [torch.float16] if self.optimizer == "SGD" and self.scaler is None else []  # no eps, no overflow
        self.dtypes = [torch.float32, *rng.choices(other, k=2)]
        self.sparse = self.optimizer == "Adagrad" and self.way == "loop"
        self.clip = rng.choice(CLIPS)
        self.clip_value = rng.choice([None, None, 0.6])
        self.action = rng.choice(["skip", "skip", "raise", "zero", "warn", "called"])
        self.on_spike = rng.choice([None, None, "warn", "clip", "skip"])
        if self.way != "fused" and self.scaler != "torch" and rng.random() < 0.5:
            self.dtypes.append(torch.complex64)
        self.unscale = rng.random() < 0.3
        self.coarse = not {torch.bfloat16, torch.float16}.isdisjoint(self.dtypes)
        self.some_none = not (self.optimizer == "SGD" and self.way == "fused")  # torch's kernel fails there
        self.micro = rng.choice([0, 0, 1, 3])
        self.set_to_none = rng.random() < 0.5
        self.expands = not self.micro and self.set_to_none and self.scaler != "torch"  # whose kernel refuses it
        self.history = rng.choice([0, 3, 1024])
        self.params_every = rng.choice([0, 0, 1])
        self.find_origin = rng.random() < 0.3
        self.log = [].append if rng.random() < 0.3 else None

    def clip_norm(self):
        limits = {
            "autoclip": {"percentile": 60.0, "window": self.rng.choice([None, 5])},
            "zclip": {"warmup": 4, "z_threshold": 1.5},
            "agc": {"ratio": 0.3},
        }
        return nanscan.AdaptiveClip(self.clip, **limits[self.clip]) if self.clip in limits else self.clip

    def make(self, params):
        flags = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}[self.way]
        groups = [{"params": params[:2]}, {"params": params[2:4], "lr": 0.02}]
        groups += [{"params": params[4:], "lr": 0.03}] if params[4:] else []
        return getattr(torch.optim, self.optimizer)(groups, **OPTIMIZERS[self.optimizer], **flags)


class Twin:
    """The plain run: torch's optimizer on gradients that are unscaled, judged and clipped here, in float64."""

    def __init__(self, draw: Draw, params: list[Tensor], adaptive) -> None:
        self.draw, self.params, self.adaptive = draw, params, adaptive
        self.inner = draw.make(params)
        self.limit: float | None = draw.clip if isinstance(draw.clip, float) else None
        self.rule = None
        if draw.clip == "autoclip":
            self.rule = AutoClip(adaptive.percentile, adaptive.window)
        elif draw.clip == "zclip":
            self.rule = ZClip(adaptive.alpha, adaptive.z_threshold, adaptive.warmup, adaptive.eps)
        self.spikes = spikes.SpikeDetector(draw.on_spike, 6.0) if draw.on_spike else None
        self.scale, self.good = 2.0**10, 0
        self.skipped = self.consecutive = self.found = self.bad_weights = 0
        self.first = None

    def step(self, grads, loss, overflow, number, lost):
        """`grads` unscaled, in float64 or complex128, or None; returns (action, norm, factor)."""
        there = [g for g in grads if g is not None]
        self._move_scale(overflow or not all(bool(g.isfinite().all()) for g in there), bool(there))
        if lost:
            return self._skip("raise" if self.draw.action == "raise" else "skip", number, NAN)
        finite = all(bool(g.isfinite().all()) for g in there) and (loss is None or math.isfinite(loss))
        norm = _norm(there)
        if not finite:
            action = "skip" if self.draw.action == "called" else self.draw.action
            if action in ("skip", "raise"):
                return self._skip(action, number, norm)
            factor = 1.0
            if action == "zero":
                grads = [g if g is None else torch.where(g.isfinite(), g, 0) for g in grads]
                grads, factor = self._clipped(grads, math.inf)
            self._apply(grads)
            return action, norm, factor
        spike = None if self.spikes is None else self.spikes.judge(norm, loss)
        self.found += spike is not None
        if spike is not None and self.draw.on_spike == "skip":
            self.spikes.enter(norm, loss)
            return self._skip("skip", number, norm)
        held = self.spikes.norm.limit() if self.draw.on_spike == "clip" else math.inf
        grads, factor = self._clipped(grads, held, enter=True)
        if self.spikes is not None:
            self.spikes.enter(norm, loss)
        self._apply(grads)
        return "step", norm, factor

    def _move_scale(self, overflow, gradients):
        if self.draw.scaler is None or not gradients:
            return
        self.good = 0 if overflow else self.good + 1
        if overflow or self.good == 5:
            least = 1.0 if self.draw.scaler == "nanscan" else 0.0  # min_scale
            self.scale = max(self.scale * (0.5 if overflow else 2.0), least)
            self.good = 0

    def _skip(self, action, number, norm):
        self.skipped += 1
        self.consecutive += 1
        self.first = number if self.first is None else self.first
        return action, norm, 1.0

    def _clipped(self, grads, held, enter=False):
        bound = self.draw.clip_value
        if bound is not None:
            grads = [g if g is None else _clamped(g, bound) for g in grads]
        norm = _norm([g for g in grads if g is not None])
        if self.draw.clip == "agc":
            grads = [
                g if g is None else _unitwise(g, p, self.adaptive) for g, p in zip(grads, self.params, strict=True)
            ]
        left = _norm([g for g in grads if g is not None])
        factor = min(1.0, held / left) if left else 1.0
        if self.limit is not None:
            factor = min(factor, self.limit / (left + 1e-6))
        if self.rule is not None and left > 0:
            factor = min(factor, self.rule.limit(left) / left)
            if enter:
                self.rule.enter(left)
        return [g if g is None else g * factor for g in grads], factor * (left / norm if norm else 1.0)

    def _apply(self, grads):
        self.consecutive = 0
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = None if grad is None else grad.to(param.dtype)
        if self.draw.sparse and self.params[0].grad is not None:
            self.params[0].grad = _rows(self.params[0].grad)
        self.inner.step()
        if self.draw.params_every and not all(bool(p.isfinite().all()) for p in self.params):
            self.bad_weights += 1


def _norm(grads):
    return math.sqrt(sum(float(g.abs().square().sum()) for g in grads)) if grads else 0.0


def _clamped(grad, bound):
    if grad.is_complex():
        return torch.view_as_complex(torch.view_as_real(grad).clamp(-bound, bound))
    return grad.clamp(-bound, bound)


def _unitwise(grad, weights, options):
    dims = tuple(range(1, grad.dim())) or None
    keep = {"dim": dims, "keepdim": dims is not None}
    wide = torch.complex128 if weights.is_complex() else torch.float64
    norms = torch.linalg.vector_norm(grad, **keep)
    most = torch.linalg.vector_norm(weights.detach().to(wide), **keep).clamp_min(options.eps) * options.ratio
    return grad * torch.where(norms > most, most / norms, torch.ones_like(norms))


def _rows(grad):
    """A sparse gradient that holds two rows, one of them in two parts."""
    index = torch.tensor([[0, 2, 0]])
    return torch.sparse_coo_tensor(index, torch.stack([grad[0] / 2, grad[2], grad[0] / 2]), grad.shape)


class Run:
    """One guarded run and its twin, step by step."""

    def __init__(self, draw: Draw) -> None:
        self.draw, self.rng = draw, draw.rng
        self.generator = torch.Generator().manual_seed(draw.seed)
        shapes = ((3, 4), (5,), (2, 3), (2, 2))
        made = [self._random(s, d) for s, d in zip(shapes, draw.dtypes, strict=False)]
        self.model = nn.ParameterList([*(nn.Parameter(t) for t in made), nn.Parameter(torch.ones(1), False)])
        self.params = list(self.model)[:-1]
        self.first, self.recorded = len(self.params), 0
        adaptive = draw.clip_norm()
        self.twin = Twin(draw, [nn.Parameter(t.clone()) for t in made], adaptive)
        self.options = {
            "clip_norm": adaptive,
            "clip_value": draw.clip_value,
            "on_nonfinite": always_skip if draw.action == "called" else draw.action,
            "on_spike": draw.on_spike,
            "max_consecutive_skips": None,
            "history": draw.history,
            "check_params_every": draw.params_every,
            "find_origin": draw.find_origin,
            "log": draw.log,
        }
        self.optimizer = nanscan.wrap(draw.make(self.params), self.model, **self.options)
        kinds = {"torch": torch.amp.GradScaler, "nanscan": nanscan.GradScaler}
        self.scaler = kinds[draw.scaler]("cpu", init_scale=2.0**10, growth_interval=5) if draw.scaler else None
        if self.scaler is not None:
            self.scaler.scale(torch.zeros(1))

    def _random(self, shape, dtype):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(dtype)

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def _micro(self, size, bad):
        """The unscaled gradients of one micro-batch, exact in the parameters' dtypes."""
        grads = []
        for i, param in enumerate(self.params):
            grad = (self._random(param.shape, param.dtype) * size).to(param.dtype)
            if self.draw.sparse and i == 0:
                grad[1] = 0.0
            if i == 1 and self.draw.some_none and self.rng.random() < 0.2:
                grad = None
            if grad is not None and i == 1 and self.rng.random() < 0.3:
                grad[1:] = grad[0]
            if bad is not None and i == 2:
                grad.view(-1)[1] = bad
            grads.append(grad)
        return grads

    def _put(self, grads):
        """As a backward pass does: set or add, times the loss scale; some gradients in other layouts."""
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        for i, (param, grad) in enumerate(zip(self.params, grads, strict=True)):
            if grad is None:
                continue
            scaled = grad * scale
            if self.draw.sparse and i == 0:
                scaled = _rows(scaled)
            elif i == 2 and not self.draw.micro and self.draw.way != "fused":  # which reads flat memory
                scaled = scaled.t().contiguous().t()
            elif i == 1 and self.draw.expands and bool((grad == grad[0]).all()):
                scaled = scaled[:1].expand(5)
            if param.grad is None:
                param.grad = scaled
            else:
                param.grad = param.grad + scaled if scaled.is_sparse else param.grad.add_(scaled)

    def _exact(self, parts, factor):
        """Their sum in float64; parameters that no part has a gradient for: None."""
        total = []
        for i, param in enumerate(self.params):
            wide = torch.complex128 if param.is_complex() else torch.float64
            own = [part[i].to(wide) for part in parts if part[i] is not None]
            kept = param.grad is not None and not self.draw.set_to_none and not own
            total.append(sum(own) * factor if own else torch.zeros(param.shape, dtype=wide) if kept else None)
        return total

    # ---- what happens between steps ----------------------------------------------------------------------------------

    def between(self):
        happens = self.rng.choices([None, "copy", "pickle", "resume", "load", "clip", "group"], [30, 1, 1, 1, 1, 1, 1])[
            0
        ]
        if happens == "copy":
            self._replace(copy.deepcopy((self.model, self.optimizer)))
        elif happens == "pickle":
            self._replace(pickle.loads(pickle.dumps((self.model, self.optimizer))))
        elif happens == "resume":
            fresh = nanscan.wrap(self.draw.make(self.params), self.model, **self.options)
            fresh.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
            fresh.load_guard_state_dict(self.optimizer.guard_state_dict())
            self.optimizer, self.recorded = fresh, 0
        elif happens == "load":
            self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        elif happens == "clip":
            assert nanscan.wrap(self.optimizer, self.model, clip_norm=0.5) is self.optimizer
            self.options["clip_norm"] = self.draw.clip = self.twin.limit = 0.5
            self.twin.rule = None
        elif happens == "group" and len(self.params) == self.first:
            made = self._random((3,), torch.float32)
            self.model.append(nn.Parameter(made))
            self.params.append(self.model[-1])
            self.twin.params.append(nn.Parameter(made.clone()))
            for optimizer, param in ((self.optimizer, self.params[-1]), (self.twin.inner, self.twin.params[-1])):
                optimizer.add_param_group({"params": [param], "lr": 0.03})

    def _replace(self, copied):
        self.model, self.optimizer = copied
        self.params = [p for p in self.model if p.requires_grad]

    # ---- one step ----------------------------------------------------------------------------------------------------

    def step(self, number):
        draw, rng = self.draw, self.rng
        event = rng.choices(["healthy", "nan", "inf", "loss", "spike", "none"], [14, 2, 2, 1, 2, 1])[0]
        size = 1e4 if event == "spike" else 10 ** rng.uniform(-0.5, 0.5)
        bad = {"nan": NAN, "inf": -INF}.get(event)
        bad_loss = NAN if event == "loss" else None
        count = max(draw.micro, 1) if event != "none" else 0
        worst = rng.randrange(count) if count else 0
        parts = [self._micro(size / count, bad if i == worst else None) for i in range(count)]
        for part in parts:
            self._put(part)
            if draw.micro:
                self.optimizer.check_microbatch(drop=True, scaler=self.scaler if draw.scaler == "torch" else None)
        overflow = False
        factor = 1.0
        if draw.micro and bad is not None:
            overflow = True
            if count > 1:
                del parts[worst]
                factor = count / (count - 1)
        loss = bad_loss if bad_loss is not None else (2.0 + rng.random() if rng.random() < 0.5 else None)
        if loss is not None:
            self.optimizer.observe(loss)
        exact = self._exact(parts, factor)
        lost = draw.micro and overflow and count == 1  # every micro-batch was dropped
        gone = draw.scaler == "torch" and all(p.grad is None for p in self.params) and not lost
        before = bits([list(self.params), self.optimizer.state_dict()])
        action, norm, clip_factor = self.twin.step(exact, loss, overflow, number, lost)
        raised = self._guarded_step(gone)
        self._compare(number, action, norm, clip_factor, raised, before)
        self.optimizer.zero_grad(set_to_none=draw.set_to_none)

    def _guarded_step(self, gone):
        raised = False
        unscale = self.draw.unscale and self.scaler is not None and not gone
        try:
            if self.scaler is None or gone:
                self.optimizer.step()
            else:
                if unscale:
                    self.scaler.unscale_(self.optimizer)
                self.scaler.step(self.optimizer)
        except nanscan.NonFiniteError:
            raised = True
        if self.scaler is not None and not gone:
            self.scaler.update()
        return raised

    def _compare(self, number, action, norm, factor, raised, before):
        optimizer, twin, report = self.optimizer, self.twin, self.optimizer.last_report
        self.recorded += 1
        assert (report.action, raised, report.step) == (action, action == "raise", number)
        skipped = action in ("skip", "raise")
        assert (report.skipped, optimizer.step_was_skipped) == (skipped, skipped)
        counters = (optimizer.skipped_steps, optimizer.consecutive_skips, optimizer.first_skipped_step)
        assert counters == (twin.skipped, twin.consecutive, twin.first)
        assert (optimizer.spikes, optimizer.bad_parameter_steps) == (twin.found, twin.bad_weights)
        tolerance = 2e-2 if self.draw.coarse else 1e-5
        if not report.dropped or not skipped:
            assert report.norm == pytest.approx(norm, rel=tolerance, nan_ok=True)
        assert report.clip_factor == pytest.approx(factor, rel=tolerance)
        if self.scaler is not None:
            assert self.scaler.get_scale() == twin.scale
        if skipped:
            assert bits([list(self.params), optimizer.state_dict()]) == before
            assert action == "raise" or all(p.grad is None for p in self.params)
        for own, other in zip(self.params, twin.params, strict=True):
            half = own.dtype in (torch.bfloat16, torch.float16)
            close = {"rtol": 0.05, "atol": 0.05} if half else {"rtol": 1e-2 if self.draw.coarse else 1e-3, "atol": 1e-3}
            torch.testing.assert_close(own, other, equal_nan=True, **close)
        assert len(optimizer.history) == min(self.recorded, self.draw.history)


@pytest.mark.parametrize("seed", range(40))
def test_guarded_run_is_the_plain_run_that_skips_and_clips_by_itself(seed, monkeypatch):
    monkeypatch.setattr(spikes, "WARMUP", 6)
    monkeypatch.setattr(clip_step, "_FUSED_DIVIDES_FROM", 0 if seed % 2 else 1 << 20)  # fused divides, or does not
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Run(Draw(seed))
        for number in range(STEPS):
            run.step(number)
