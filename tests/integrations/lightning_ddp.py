"""A Lightning run on two ranks, for `test_lightning_ddp.py`: FOLDER gets what each rank saw, as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from nanscan.integrations.lightning import NanScanCallback
from tests.integrations.lightning_runs import Regression, loader, trainer, weights


class BadOnOneRank(Regression):
    """Rank 1 has a bad gradient at step 3, after the ranks have shared theirs, and a bad loss at step 5."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + (0 * torch.tensor(float("nan")) if self.bad(5) else 0)

    def on_after_backward(self) -> None:
        if self.bad(3):
            self.head.bias.grad.fill_(float("nan"))

    def bad(self, step: int) -> bool:
        return self.calls == step + 1 and self.global_rank == 1


def main(folder: Path) -> None:
    torch.manual_seed(1)
    net, callback = BadOnOneRank(), NanScanCallback(clip_norm=0.5, log=folder / "run.jsonl")
    trainer(callback, strategy="ddp", devices=2, max_epochs=2).fit(net, loader())
    guard = callback.optimizer
    report = {
        "skipped": [report.step for report in guard.history if report.skipped],
        "bad": [[(row.name, row.rank) for row in report.bad][:1] for report in guard.history if report.skipped],
        "steps": len(guard.history),
        "weights": weights(net),
        "rng_saved": "rng" in callback.state_dict(),
    }
    (folder / f"{os.environ.get('LOCAL_RANK', '0')}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
