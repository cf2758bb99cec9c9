"""Checkpoints of a guarded Lightning run: loadable with and without the callback, and resumed to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import nanscan
from nanscan.integrations.lightning import NanScanCallback
from tests.integrations.lightning_runs import Regression, fused, half, loader, module, trainer, weights

pytestmark = pytest.mark.filterwarnings("ignore")


def run(folder: Path, epochs: int, guarded: dict[str, Any] | None, **fit: Any) -> tuple[Regression, Any]:
    """Shuffled batches and dropout: what an epoch does depends on the random numbers before it."""
    net = module(schedule=lambda o: {"scheduler": torch.optim.lr_scheduler.ExponentialLR(o, 0.9), "interval": "step"})
    keep = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    callbacks = [keep] if guarded is None else [NanScanCallback(**guarded), keep]
    options = {"enable_checkpointing": True, "accumulate_grad_batches": 2}
    trainer(*callbacks, max_epochs=epochs, **options).fit(net, loader(nan=[3], shuffle=True), **fit)
    return net, callbacks[0]


@pytest.mark.parametrize("weights_only", [None, True])
def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_interrupted(tmp_path: Path, weights_only: Any) -> None:
    options = {"clip_norm": 0.5, "recovery": {"snapshot_every": 2}, "max_consecutive_skips": None}
    whole, _ = run(tmp_path / "whole", 4, options)
    run(tmp_path / "part", 2, options)
    resume = {"ckpt_path": tmp_path / "part" / "epoch=1.ckpt", "weights_only": weights_only}
    resumed, callback = run(tmp_path / "rest", 4, options, **resume)
    assert weights(resumed) == weights(whole)
    assert callback.recovery.step_index == 20
    torch.manual_seed(77)
    again, _ = run(tmp_path / "again", 4, {**options, "save_rng": False}, **resume)
    assert weights(again) != weights(whole)


def test_a_state_that_validate_loads_does_not_touch_the_next_fit(tmp_path: Path) -> None:
    net, callback = run(tmp_path, 1, {})
    net.trainer.validate(net, loader(), ckpt_path=tmp_path / "epoch=0.ckpt", verbose=False)
    torch.manual_seed(77)
    expected = torch.rand(3)
    net.on_fit_start = lambda: drawn.append(torch.rand(3))
    drawn: list[torch.Tensor] = []
    torch.manual_seed(77)
    net.trainer.fit_loop.max_epochs = 2
    net.trainer.fit(net, loader())
    assert torch.equal(drawn[0], expected) and callback.optimizer.skipped_steps == 0


def test_the_guards_state_goes_along(tmp_path: Path) -> None:
    limit = {"clip_norm": nanscan.AdaptiveClip("autoclip")}
    whole, _ = run(tmp_path / "whole", 4, limit)
    run(tmp_path / "part", 2, limit)
    resumed, callback = run(tmp_path / "rest", 4, limit, ckpt_path=tmp_path / "part" / "epoch=1.ckpt")
    assert weights(resumed) == weights(whole)
    saved = torch.load(tmp_path / "part" / "epoch=1.ckpt", weights_only=True)
    assert "guards" in saved["callbacks"]["NanScanCallback"]


@pytest.mark.parametrize(("first", "then"), [({}, None), (None, {})], ids=["without-nanscan", "with-nanscan"])
def test_a_checkpoint_goes_from_guarded_to_plain_and_back(tmp_path: Path, first: Any, then: Any) -> None:
    run(tmp_path / "first", 1, first)
    checkpoint = tmp_path / "first" / "epoch=0.ckpt"
    assert Regression.load_from_checkpoint(checkpoint, weights_only=True) is not None
    state = torch.load(checkpoint, weights_only=True)["optimizer_states"][0]
    torch.optim.Adam(module().parameters()).load_state_dict(state)
    _, second = run(tmp_path / "second", 2, then, ckpt_path=checkpoint)
    after = torch.load(tmp_path / "second" / "epoch=1.ckpt", weights_only=True)
    assert after["global_step"] == 10 and after["optimizer_states"][0].keys() == state.keys()


def test_the_loss_scale_is_resumed(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    first = trainer(NanScanCallback(), plugins=half(scaler))
    first.fit(module(fused), loader())
    first.save_checkpoint(tmp_path / "one.ckpt")
    again = torch.amp.GradScaler("cpu", init_scale=2.0)
    second = trainer(NanScanCallback(), plugins=half(again), max_epochs=2, limit_train_batches=0)
    second.fit(module(fused), loader(), ckpt_path=tmp_path / "one.ckpt")
    assert again.get_scale() == scaler.get_scale() == 2.0**13
