"""`NanScanCallback` with clipping and mixed precision: the guard clips, once, in whichever way it was asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nanscan
from nanscan.integrations.lightning import NanScanCallback
from tests.integrations.lightning_runs import Regression, fitted, fused, half, loader, module, trainer, weights

pytestmark = pytest.mark.filterwarnings("ignore")

SCALERS = {
    "torch": lambda: torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5),
    "nanscan": lambda: nanscan.GradScaler("cpu", init_scale=2.0**10, growth_interval=5),
}


class ByHand(Regression):
    """Decides by itself when to clip, in Lightning's hook."""

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **algorithm: Any) -> None:
        if self.calls % 2 == 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")


def close_to(first: Any, second: Any) -> bool:
    return torch.allclose(torch.tensor(weights(first)), torch.tensor(weights(second)), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_every_way_to_ask_gives_what_lightning_gives(algorithm: str) -> None:
    asked = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": algorithm}
    plain, _ = fitted(**asked)
    taken, callback = fitted(guarded={}, **asked)
    own, _ = fitted(guarded={f"clip_{algorithm}": 0.5})
    assert close_to(taken, plain) and weights(taken) == weights(own)
    assert weights(plain) != weights(fitted()[0])
    factors = [report.clip_factor for report in callback.optimizer.history]
    assert all(factor < 1 for factor in factors) == (algorithm == "norm")
    assert callback.optimizer.policy.clip_norm is None and callback.optimizer.policy.clip_value is None


def test_a_request_holds_for_one_step() -> None:
    torch.manual_seed(1)
    plain = fitted(net=ByHand())[0]
    torch.manual_seed(1)
    net, callback = fitted(net=ByHand(), guarded={})
    assert close_to(net, plain)
    clipped = [report.clip_factor < 1 for report in callback.optimizer.history]
    assert clipped == [False, True] * 5


class LooksAndClips(Regression):
    """Reads the norm in one hook and clips by itself in another."""

    norms: list[float]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])))

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **algorithm: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)


@pytest.mark.parametrize("kind", SCALERS)
def test_hooks_find_the_gradients_without_the_loss_scale(kind: str) -> None:
    def run(scaler: Any, *callbacks: Any) -> tuple[list[float], list[float]]:
        torch.manual_seed(1)
        net = LooksAndClips()
        net.norms = []
        trainer(*callbacks, plugins=half(scaler)).fit(net, loader(nan=[7]))
        return net.norms[:7], weights(net)

    callback, scaler = NanScanCallback(), SCALERS[kind]()
    assert run(scaler, callback) == run(SCALERS["torch"]())
    assert callback.optimizer.skipped_steps == 1 and callback.optimizer.history[7].skipped
    assert scaler.get_scale() == 2.0**10  # doubled after five steps, halved at the skip


def test_clipping_names_the_one_bad_parameter_although_lightning_was_asked() -> None:
    class OneBad(Regression):
        def on_after_backward(self) -> None:
            if self.calls == 4:
                self.head.bias.grad.fill_(float("nan"))

    _, callback = fitted(net=OneBad(), guarded={}, gradient_clip_val=0.5)
    assert [row.name for row in callback.optimizer.history[3].bad] == ["head.bias"]


def test_two_limits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gradient_clip_val=0\.5\) is set, and NanScanCallback has clip_norm=1\.0"):
        fitted(guarded={"clip_norm": 1.0}, gradient_clip_val=0.5)
    with pytest.raises(ValueError, match=r"asked to clip by 0\.5, and NanScanCallback has .*give the limit once"):
        fitted(net=ByHand(), guarded={"clip_value": 1.0})


@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize("ask", ["callback", "trainer"])
def test_fused_optimizer_scaler_and_clipping_together(kind: str, ask: str) -> None:
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fitted(net=module(fused), plugins=half(SCALERS["torch"]()), gradient_clip_val=0.5)
    scaler = SCALERS[kind]()
    guarded, options = ({"clip_norm": 0.5}, {}) if ask == "callback" else ({}, {"gradient_clip_val": 0.5})
    net, callback = fitted(loader(nan=[3]), guarded, module(fused), plugins=half(scaler), **options)
    history = callback.optimizer.history
    assert [report.skipped for report in history] == [i == 3 for i in range(10)]
    assert scaler.get_scale() == 2.0**10  # halved at the skip, doubled after five good steps
    full = fitted(loader(nan=[3]), {"clip_norm": 0.5}, module(fused))[1].optimizer.history
    for mixed, single in zip(history, full, strict=True):
        assert mixed.skipped or mixed.norm == pytest.approx(single.norm, rel=0.02)  # unscaled, in half precision
        assert mixed.skipped or mixed.clip_factor == pytest.approx(single.clip_factor, rel=0.02)
    assert torch.isfinite(torch.tensor(weights(net))).all()


def test_a_nan_loss_behind_a_scaler_is_named() -> None:
    _, callback = fitted(loader(log=[5]), {}, module(fused), plugins=half(SCALERS["torch"]()))
    assert callback.optimizer.history[5].bad[-1].name == "loss"
    assert callback.optimizer.history[4].finite


def test_origin_under_autocast_and_scale() -> None:
    _, callback = fitted(loader(log=[5]), {"find_origin": True}, module(fused), plugins=half(SCALERS["torch"]()))
    assert callback.optimizer.history[5].origin.op == "aten.log"


def test_bfloat16_needs_no_scaler() -> None:
    _, callback = fitted(loader(nan=[3]), {"clip_norm": 0.5}, module(fused), precision="bf16-mixed")
    assert callback.optimizer.skipped_steps == 1 and callback.optimizer.history[9].clip_factor < 1


def test_lbfgs_with_a_scaler_is_refused() -> None:
    net = module(lambda params: torch.optim.LBFGS(params))
    with pytest.raises(ValueError, match="LBFGS needs a closure, which a gradient scaler can't give"):
        trainer(NanScanCallback(), plugins=half(SCALERS["torch"]())).fit(net, loader())
