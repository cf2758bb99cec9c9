"""`NanScanCallback` in manual optimization: several optimizers, and what `self.optimizers()` returns."""

from __future__ import annotations

from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn

import nanscan
from nanscan.integrations.lightning import NanScanCallback
from tests.integrations.lightning_runs import fused, half, loader, trainer, weights

pytestmark = pytest.mark.filterwarnings("ignore")


class Adversarial(lightning.LightningModule):
    """A generator and a discriminator, each with an optimizer; the generator's also has a scheduler."""

    def __init__(self, make: Any = torch.optim.SGD, clip: float | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(3)
        self.generator, self.discriminator = nn.Linear(4, 4), nn.Linear(4, 1)
        self.make = make
        self.clip = clip
        self.seen: list[tuple[bool, float]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        of_generator, of_discriminator = self.optimizers()
        x = batch[0]
        with of_generator.toggle_model():
            loss = -self.discriminator(self.generator(x)).tanh().mean()
            of_generator.observe(loss)
            of_generator.zero_grad()
            self.manual_backward(loss)
            if self.clip is not None:
                self.clip_gradients(of_generator, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")
            of_generator.step()
        self.seen.append((of_generator.step_was_skipped, of_generator.last_report.norm))
        if not of_generator.step_was_skipped:
            self.lr_schedulers().step()
        loss = self.discriminator(self.generator(x.nan_to_num()).detach()).square().mean()
        of_discriminator.zero_grad()
        self.manual_backward(loss)
        of_discriminator.step()

    def configure_optimizers(self) -> Any:
        first, second = (self.make(part.parameters(), lr=0.1) for part in (self.generator, self.discriminator))
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(first, 0.5)]


def run(net: Adversarial, data: Any, **options: Any) -> NanScanCallback:
    callback = NanScanCallback(**options.pop("guarded", {}))
    trainer(callback, **options).fit(net, data)
    return callback


def test_each_optimizer_is_guarded_by_itself() -> None:
    net = Adversarial()
    callback = run(net, loader(nan=[3]))
    first, second = callback.optimizers
    assert (first.skipped_steps, first.first_skipped_step, second.skipped_steps) == (1, 3, 0)
    assert {row.name for row in first.history[3].bad} == {"generator.weight", "generator.bias", "loss"}
    assert torch.isfinite(torch.tensor(weights(net))).all()
    with pytest.raises(RuntimeError, match=r"several optimizers: use callback\.optimizers"):
        _ = callback.optimizer


def test_what_optimizers_returns_shows_the_guard_of_this_very_step() -> None:
    net = Adversarial()
    callback = run(net, loader(nan=[3]))
    assert [skipped for skipped, _ in net.seen] == [step == 3 for step in range(10)]
    norms = [report.norm for report in callback.optimizers[0].history]
    assert [norm for _, norm in net.seen] == pytest.approx(norms, nan_ok=True)
    assert callback.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**9)
    seen = net.optimizers()[0]
    assert isinstance(seen, torch.optim.Optimizer) and isinstance(seen, nanscan.GuardedOptimizer)
    assert isinstance(net.trainer.optimizers[0], torch.optim.SGD)
    seen.param_groups[0]["lr"] = 0.25
    seen.anything = 1
    assert callback.optimizers[0].optimizer.param_groups[0]["lr"] == 0.25 and callback.optimizers[0].anything == 1


def test_clip_gradients_is_done_by_the_guard_and_for_this_optimizer_only() -> None:
    net, plain = Adversarial(clip=0.01), Adversarial(clip=0.01)
    callback = run(net, loader(nan=[3]))
    first, second = ([report.clip_factor for report in o.history] for o in callback.optimizers)
    assert all(factor < 1 for i, factor in enumerate(first) if i != 3) and set(second) == {1.0}
    assert {row.name for row in callback.optimizers[0].history[3].bad} == {"generator.weight", "generator.bias", "loss"}
    run(net := Adversarial(clip=0.01), loader())
    plain.training_step = lambda batch, batch_idx: _unguarded(plain, batch)
    trainer().fit(plain, loader())
    assert torch.allclose(torch.tensor(weights(net)), torch.tensor(weights(plain)), rtol=1e-5, atol=1e-7)


def _unguarded(net: Adversarial, batch: list[Tensor]) -> None:
    of_generator, of_discriminator = net.optimizers()
    of_generator.zero_grad()
    net.manual_backward(-net.discriminator(net.generator(batch[0])).tanh().mean())
    net.clip_gradients(of_generator, gradient_clip_val=net.clip, gradient_clip_algorithm="norm")
    of_generator.step()
    net.lr_schedulers().step()
    of_discriminator.zero_grad()
    net.manual_backward(net.discriminator(net.generator(batch[0]).detach()).square().mean())
    of_discriminator.step()


def test_clip_gradients_with_a_fused_optimizer_and_a_scaler() -> None:
    net = Adversarial(make=lambda params, lr: fused(params), clip=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    callback = run(net, loader(), plugins=half(scaler))
    assert all(report.clip_factor < 1 for report in callback.optimizers[0].history)
    assert callback.optimizers[0].skipped_steps == 0


class Logarithm(lightning.LightningModule):
    """One optimizer, two backward passes for each step, and a logarithm in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(3)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).log()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for part in batch[0].chunk(2):
            self.manual_backward(self(part).mean())
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_with_one_optimizer_the_losses_join_and_the_origin_is_looked_for_in_forward() -> None:
    report = run(Logarithm(), loader(), guarded={"find_origin": True}, limit_train_batches=1).optimizer.history[0]
    assert [row.name for row in report.bad] == ["loss[0]", "loss[1]"]  # the gradient of log is finite below 0
    assert report.skipped and report.origin.op == "aten.log"


def test_logs_of_several_optimizers_are_several_files(tmp_path: Any) -> None:
    heard: list[Any] = []
    run(Adversarial(), loader(), guarded={"log": [tmp_path / "run.jsonl", heard.append]})
    assert [len((tmp_path / name).read_text().splitlines()) for name in ("run.jsonl", "run.1.jsonl")] == [10, 10]
    assert len(heard) == 20


def test_a_guard_made_by_the_module_shows_its_last_report_without_the_callback() -> None:
    class Guarded(Logarithm):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            steps.append(self.optimizers().last_report.step)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return nanscan.wrap(super().configure_optimizers(), self)

    steps: list[int] = []
    trainer().fit(Guarded(), loader())
    assert steps == list(range(10))
