"""A healthy run with `NanScanCallback` ends with the bits of one without, whatever else the Trainer is asked to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    RichProgressBar,
    StochasticWeightAveraging,
)
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, ReduceLROnPlateau

from nanscan.integrations.lightning import NanScanCallback
from tests.integrations.lightning_runs import Regression, half, loader, trainer, weights

pytestmark = pytest.mark.filterwarnings("ignore")

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "64-true": {"precision": "64-true"},
    "anomaly": {"detect_anomaly": True},
    "fast-dev-run": {"fast_dev_run": 2},
    "accumulation": {"accumulate_grad_batches": 4, "val_check_interval": 0.25},
    "max-steps": {"max_steps": 13, "max_epochs": -1},
    "overfit": {"overfit_batches": 2},
}
CALLBACKS: dict[str, Any] = {
    "swa": lambda: StochasticWeightAveraging(0.005, swa_epoch_start=1),
    "ema": lambda: EMAWeightAveraging(),
    "accumulation-scheduler": lambda: GradientAccumulationScheduler({0: 1, 1: 3}),
    "rich": lambda: RichProgressBar(),
}


class Norms(Callback):
    """Another callback that looks at the gradients before the step."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in pl_module.parameters()])))


def run(make: Any, callbacks: Any, **options: Any) -> tuple[Any, ...]:
    torch.manual_seed(1)
    net = make()
    made = trainer(*callbacks, **{"max_epochs": 2, **options})
    made.fit(net, loader(), loader())
    rates = [group["lr"] for optimizer in made.optimizers for group in optimizer.param_groups]
    return weights(net), rates, made.global_step


def same(make: Any = Regression, others: Any = lambda: [], guarded: Any = None, **options: Any) -> NanScanCallback:
    """The guard's callback, after two runs that were compared."""
    guard = NanScanCallback(**(guarded or {}))
    assert run(make, [guard, *others()], **options) == run(make, others(), **options)
    assert guard.optimizer.skipped_steps == 0
    return guard


@pytest.mark.parametrize("name", OPTIONS)
def test_with_every_option(name: str) -> None:
    guard = same(guarded={"find_origin": True, "check_params_every": 1, "log_metrics": True}, **OPTIONS[name])
    assert len(guard.optimizer.history) > 1


@pytest.mark.parametrize("name", CALLBACKS)
def test_beside_other_callbacks(name: str) -> None:
    same(others=lambda: [CALLBACKS[name]()], enable_progress_bar=name == "rich", max_epochs=3)


def test_where_the_learning_rate_is_looked_for_first(tmp_path: Any) -> None:
    class Found(Regression):
        lr = 0.01

    options = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    guard = same(Found, lambda: [LearningRateFinder(num_training_steps=15)], **options)
    assert len(guard.optimizer.history) == 20  # without the steps of the search


def test_with_parameters_that_join_later() -> None:
    def make() -> Regression:
        net = Regression(lambda params: torch.optim.Adam(net.head.parameters(), lr=0.01))
        net.backbone = net.body
        return net

    guard = same(make, lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1)])
    assert len(guard.optimizer.param_groups) == 2


@pytest.mark.parametrize("form", ["list", "tuple", "dict", "dicts", "pair"])
def test_with_every_form_of_optimizers_and_schedulers(form: str) -> None:
    class Formed(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            plateau = {"scheduler": ReduceLROnPlateau(optimizer, patience=0), "monitor": "loss", "frequency": 2}
            steps = {"scheduler": LinearLR(optimizer, total_iters=30), "interval": "step"}
            forms = {
                "list": [optimizer],
                "tuple": (optimizer,),
                "dict": {"optimizer": optimizer, "lr_scheduler": plateau},
                "dicts": [{"optimizer": optimizer, "lr_scheduler": steps}],
                "pair": ([optimizer], [steps, ExponentialLR(optimizer, 0.9)]),
            }
            return forms[form]

    same(Formed, max_epochs=3)


def test_another_callback_finds_the_gradients_without_the_loss_scale() -> None:
    seen = []
    for guards in ([], [NanScanCallback()]):
        norms = Norms()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        seen.append((run(Regression, [norms, *guards], plugins=half(scaler)), norms.norms))
    assert seen[0] == seen[1]


def test_barebones() -> None:
    bare = dict.fromkeys(("enable_checkpointing", "logger", "enable_progress_bar", "enable_model_summary"))
    assert len(same(guarded={"log_metrics": True}, barebones=True, **bare).optimizer.history) == 20
