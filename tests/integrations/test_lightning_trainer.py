"""`NanScanCallback` among the Trainer's other parts: schedulers, loggers, Recovery, both package names, versions."""

from __future__ import annotations

import csv
import math
from typing import Any

import lightning
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger

import nanscan
from nanscan.integrations import versions
from nanscan.integrations.lightning import NanScanCallback
from nanscan.integrations.lightning.package import callback_bases
from tests.integrations.lightning_runs import fitted, loader, module, trainer, weights

pytestmark = pytest.mark.filterwarnings("ignore")


def halving(interval: str) -> Any:
    return lambda o: {"scheduler": torch.optim.lr_scheduler.ExponentialLR(o, 0.5), "interval": interval}


@pytest.mark.parametrize(("interval", "hold", "halvings"), [("step", True, 8), ("step", False, 10), ("epoch", True, 1)])
def test_a_scheduler_advances_with_real_steps_only(interval: str, hold: bool, halvings: int) -> None:
    net = module(schedule=halving(interval))
    with pytest.warns() as seen:
        _, callback = fitted(loader(nan=[0, 3]), {"hold_schedulers": hold}, net)
    assert callback.optimizer.skipped_steps == 2
    assert callback.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**halvings)
    assert [str(w.message) for w in seen if "lr_scheduler.step()" in str(w.message)] == []


def test_a_plateau_scheduler_hears_of_its_metric() -> None:
    def plateau(optimizer: Any) -> dict[str, Any]:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e6)
        return {"scheduler": scheduler, "interval": "step", "monitor": "loss"}

    _, callback = fitted(loader(), {}, module(schedule=plateau))
    assert callback.optimizer.param_groups[0]["lr"] < 0.01


def rows(folder: Any) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_metrics_go_to_the_logger_of_the_trainer_and_other_names_stay(tmp_path: Any) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    callback = NanScanCallback(log_metrics=True, clip_norm=0.5)
    run = trainer(callback, LearningRateMonitor("step"), logger=logger, log_every_n_steps=2)
    run.fit(module(schedule=halving("step")), loader(nan=[3]))
    logged = [row for row in rows(tmp_path) if row["nanscan/norm"]]
    assert [int(row["step"]) for row in logged] == [1, 3, 5, 7, 9]
    assert [float(row["nanscan/skipped_steps"]) for row in logged] == [0, 1, 1, 1, 1]
    assert math.isnan(float(logged[1]["nanscan/norm"])) and float(logged[2]["nanscan/clip_factor"]) < 1
    names = {name for name in rows(tmp_path)[0] if name.startswith("lr-")}
    assert names == {"lr-Adam"}


def test_a_run_can_be_stopped_by_the_metrics() -> None:
    stop = EarlyStopping("nanscan/skipped_steps", mode="min", patience=0, check_on_train_epoch_end=True)
    run = trainer(NanScanCallback(log_metrics=True), stop, max_epochs=5, log_every_n_steps=1)
    run.fit(module(), loader(nan=[3]))
    assert run.current_epoch == 2


def test_recovery_goes_back_and_the_run_finishes() -> None:
    def diverging(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=50.0)

    options = {"patience": 2, "snapshot_every": 5, "lr_backoff": 0.001}
    with pytest.warns(nanscan.NonFiniteWarning):
        net, callback = fitted(loader(), {"recovery": options, "max_consecutive_skips": None}, module(diverging))
    assert len(callback.recovery.rollbacks) == 1 and callback.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert torch.isfinite(torch.tensor(weights(net))).all() and max(map(abs, weights(net))) < 10


def test_the_run_is_given_up_after_too_many_skips() -> None:
    with pytest.raises(nanscan.TrainingDiverged):
        fitted(loader(nan=range(10)), {"max_consecutive_skips": 4})


def test_a_module_without_an_optimizer_runs() -> None:
    _, callback = fitted(loader(), {}, module(lambda params: None))
    assert callback.optimizers == []


def test_optimizers_guarded_by_the_module_get_the_options_of_the_callback() -> None:
    net = module()
    net.make = lambda params: nanscan.wrap(torch.optim.SGD(params, lr=0.1), net, on_nonfinite="zero")
    _, callback = fitted(loader(), {"clip_norm": 0.5}, net)
    assert callback.optimizer is net.trainer.optimizers[0]
    assert (callback.optimizer.policy.on_nonfinite, callback.optimizer.policy.clip_norm) == ("zero", 0.5)
    assert len(callback.optimizer.history) == 10


@pytest.mark.parametrize("package", [lightning, pytorch_lightning], ids=lambda package: package.__name__)
def test_both_packages_take_the_callback_whichever_is_imported_first(package: Any) -> None:
    NanScanCallback.__bases__ = (lightning.Callback,)  # as if the other had not been imported by now

    class Net(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [halving("step")(optimizer)]

    callback = NanScanCallback(clip_norm=0.5, find_origin=True, log_metrics=True)
    trainer(callback, package=package).fit(Net(), loader(nan=[3]))
    assert callback.optimizer.skipped_steps == 1 and callback.optimizer.history[3].origin.op == "input"
    assert callback.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**9)
    assert isinstance(callback, lightning.Callback) and isinstance(callback, pytorch_lightning.Callback)


def test_a_version_that_does_not_fit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_warned", set())
    monkeypatch.setattr(lightning, "__version__", "2.7.0")
    with pytest.warns(UserWarning, match=r"tested with lightning >= .*, < 2\.7; 2\.7\.0 is installed"):
        callback_bases()
    monkeypatch.setattr(lightning, "__version__", "1.9.5")
    with pytest.raises(ImportError, match=r"needs lightning >= .*version 1\.9\.5 is installed: pip install --upgrade"):
        callback_bases()
