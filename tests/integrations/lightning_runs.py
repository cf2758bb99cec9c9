"""What the tests of the Lightning callback share: a small module, its data with planted rows, and a quiet Trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from nanscan.integrations.lightning import NanScanCallback

NAN = float("nan")
BATCH, BATCHES = 4, 10


class Regression(lightning.LightningModule):
    """Two layers; a batch whose first target is above 100 has a loss of NaN by the logarithm of a negative number."""

    def __init__(self, make: Callable[[Any], Any] | None = None, schedule: Any = None, none_at: Sequence[int] = ()):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(8, 1)
        self.make = make or (lambda params: torch.optim.Adam(params, lr=0.01))
        self.schedule = schedule
        self.none_at = none_at
        self.calls = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        self.calls += 1
        if batch_idx in self.none_at:
            return None
        x, y = batch
        loss = (self.head(self.body(x)) - y).square().mean()
        if y[0] > 100:
            loss = loss * torch.log(100 - y[0])
        self.log("loss", loss)
        self.log("batches", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", (self.head(self.body(batch[0])) - batch[1]).square().mean())

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.head(self.body(batch[0]))

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        return optimizer if self.schedule is None else ([optimizer], [self.schedule(optimizer)])


def fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, fused=True)


def half(scaler: Any) -> MixedPrecision:
    """What `precision="16-mixed"` is on a GPU, for a CPU."""
    return MixedPrecision("16-mixed", device="cpu", scaler=scaler)


def loader(nan: Sequence[int] = (), log: Sequence[int] = (), shuffle: bool = False, keep: Any = None) -> DataLoader:
    """Ten batches; those in `nan` have NaN in their input, those in `log` a target that makes the loss NaN."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCHES * BATCH, 4, generator=generator)
    y = x.sum(1, keepdim=True)
    for batch in nan:
        x[batch * BATCH] = NAN
    for batch in log:
        y[batch * BATCH] = 200.0
    if keep is not None:
        rows = torch.cat([torch.arange(batch * BATCH, (batch + 1) * BATCH) for batch in keep])
        x, y = x[rows], y[rows]
    return DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=shuffle)


def trainer(*callbacks: Any, package: Any = lightning, **options: Any) -> Any:
    """A Trainer on the CPU that writes and prints nothing unless asked to."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return package.Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_epochs": 1, **quiet, **options}, callbacks=list(callbacks)
    )


def module(*args: Any, **options: Any) -> Regression:
    """The same initial weights each time."""
    torch.manual_seed(1)
    made = Regression(*args, **options)
    torch.manual_seed(2)
    return made


def fitted(
    data: DataLoader | None = None, guarded: dict[str, Any] | None = None, net: Regression | None = None, **options: Any
) -> tuple[Regression, NanScanCallback | None]:
    """A module after `fit`, with a callback of the options `guarded` (None: without one)."""
    net = net or module()
    callback = None if guarded is None else NanScanCallback(**guarded)
    trainer(*([callback] if callback else []), **options).fit(net, data or loader())
    return net, callback


def weights(net: nn.Module) -> list[float]:
    return [value for parameter in net.parameters() for value in parameter.flatten().tolist()]
