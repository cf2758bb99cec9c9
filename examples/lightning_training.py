"""Handwritten digits with Lightning: half precision, a fused optimizer and clipping, and two blank images in the data.

Each image is scaled to mean 0 and deviation 1; a blank one becomes 0/0, NaN. Without nanscan the weights are NaN in the
first epoch. With the callback the two steps of each epoch are left out, and the report says where the NaN was made.

Run: python examples/lightning_training.py   (needs lightning, and scikit-learn for its handwritten digits)
"""

import logging
import sys
import tempfile
import warnings
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nanscan
from nanscan.integrations.lightning import NanScanCallback


class Digits(lightning.LightningModule):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.classify = nn.Linear(64, 128), nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        centred = images - images.mean(1, keepdim=True)
        scaled = centred / images.std(1, keepdim=True)
        return self.classify(nn.functional.gelu(self.hidden(scaled)))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, fused=True)


def make_loaders() -> tuple[DataLoader, DataLoader]:
    """1,500 images for training, two of them blank, and 297 for validation."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    images[[200, 900]] = 0.0
    train = DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=50)
    return train, DataLoader(TensorDataset(images[1500:], labels[1500:]), batch_size=297)


def train(folder: str, epochs: int, ckpt_path: str | None = None, **options: Any) -> tuple[float, Digits]:
    """The validation accuracy after `epochs`, and the module."""
    torch.manual_seed(0)
    model = Digits()
    quiet = {"logger": False, "enable_progress_bar": sys.stdout.isatty(), "enable_model_summary": False}
    callbacks = [*options.pop("callbacks", []), ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)]
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", callbacks=callbacks, **quiet, **options)
    trainer.fit(model, *make_loaders(), ckpt_path=ckpt_path)
    return float(trainer.callback_metrics["accuracy"]), model


def half() -> MixedPrecision:
    """On a GPU, `Trainer(precision="16-mixed")` is the same with torch's scaler."""
    return MixedPrecision("16-mixed", device="cpu", scaler=nanscan.GradScaler("cpu", init_scale=1024.0))


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")  # of Lightning, and of nanscan: what it warns about is printed below
    with tempfile.TemporaryDirectory() as folder:
        accuracy, model = train(f"{folder}/plain", 2, gradient_clip_val=1.0)
        print(f"plain, float32:    accuracy {accuracy:.1%}, weights finite: {bool(nanscan.scan(model).finite)}")
        try:
            train(f"{folder}/refused", 1, gradient_clip_val=1.0, plugins=half())
        except RuntimeError as error:
            print(f"plain, half:       {error}")

        guard = NanScanCallback(clip_norm=1.0, find_origin=True)
        accuracy, model = train(f"{folder}/guarded", 8, callbacks=[guard], plugins=half())
        history = guard.optimizer.history
        skips = [report for report in history if report.skipped]
        print(f"with the callback: accuracy {accuracy:.1%}, skipped {len(skips)} of {len(history)} steps")
        print(f"    clipped {sum(report.clip_factor < 1 for report in history)} steps")
        for report in skips[:2]:
            made = f"{report.origin.kind} of {report.origin.op} in {report.origin.code.strip()}"
            print(f"    step {report.step}: {report.bad[0].name}; {made}")

        half_way = f"{folder}/guarded/epoch=3.ckpt"
        again = {"callbacks": [NanScanCallback(clip_norm=1.0)], "plugins": half()}
        _, resumed = train(f"{folder}/resumed", 8, half_way, **again)
        same = all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))
        print(f"    resumed after four epochs, it ends with the same weights: {same}")


if __name__ == "__main__":
    main()
