"""Checkpoints of a guarded `Trainer`: a resumed run ends as one that never stopped, with and without nanscan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import nanscan
from nanscan.integrations.transformers import NanScanCallback
from tests.integrations.tiny_transformers import BadGradient, Tokens, logged, make_trainer, same, tiny_gpt, weights

BAD = "transformer.h.0.attn.c_attn.bias"
SAVED = {"save_strategy": "steps", "save_steps": 3}

pytestmark = pytest.mark.filterwarnings("ignore::nanscan.NonFiniteWarning")


def spoilt(folder: Path, *callbacks: Any, **options: Any) -> Any:
    model = tiny_gpt()
    return make_trainer(folder, *callbacks, BadGradient(model, BAD, (1, 4)), model=model, **SAVED, **options)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_a_resumed_run_ends_bit_for_bit_where_an_uninterrupted_one_does(tmp_path: Path, optim: str) -> None:
    whole = spoilt(tmp_path, NanScanCallback(), optim=optim)
    whole.train()
    resumed = spoilt(tmp_path / "more", NanScanCallback(), optim=optim)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert same(weights(whole.model), weights(resumed.model))
    assert logged(resumed, "nanscan/skipped_steps") == [0, 1, 1, 1, 2, 2] == logged(whole, "nanscan/skipped_steps")
    assert [report.step for report in resumed.optimizer.history][-3:] == [3, 4, 5]
    assert resumed.optimizer.first_skipped_step == 1
    assert logged(resumed, "learning_rate") == logged(whole, "learning_rate")


def test_checkpoints_load_without_nanscan_and_those_without_it_load_with_it(tmp_path: Path) -> None:
    make_trainer(tmp_path / "guarded", NanScanCallback(), **SAVED).train()
    make_trainer(tmp_path / "plain", **SAVED).train()
    plain, guarded = (
        make_trainer(tmp_path / "more", **SAVED),
        make_trainer(tmp_path / "still more", NanScanCallback(), **SAVED),
    )
    plain.train(resume_from_checkpoint=str(tmp_path / "guarded" / "checkpoint-3"))
    guarded.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-3"))
    for name, value in weights(plain.model).items():
        torch.testing.assert_close(guarded.model.state_dict()[name], value, rtol=1e-3, atol=1e-4)
    saved = torch.load(tmp_path / "guarded" / "checkpoint-3" / "optimizer.pt", weights_only=True)
    assert set(saved) == {"state", "param_groups"}
    text = (tmp_path / "still more" / "checkpoint-6" / "trainer_state.json").read_text()
    assert json.loads(text)["stateful_callbacks"]["NanScanCallback"]["attributes"]["guard_state"] is not None


def test_callbacks_restored_from_a_checkpoint_keep_the_options_that_json_holds(tmp_path: Path) -> None:
    def callback() -> NanScanCallback:
        return NanScanCallback(clip_norm=0.25, on_nonfinite=lambda report: "skip")

    spoilt(tmp_path, callback()).train()
    resumed = spoilt(tmp_path / "more", callback(), restore_callback_states_from_checkpoint=True)
    with pytest.warns(UserWarning, match="on_nonfinite of NanScanCallback can't be restored"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.optimizer.policy.clip_norm == 0.25 and resumed.optimizer.skipped_steps == 2


def test_the_history_of_an_adaptive_clip_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    def trainer(folder: Path) -> Any:
        return spoilt(folder, NanScanCallback(clip_norm=nanscan.AdaptiveClip("autoclip")))

    whole, resumed = trainer(tmp_path), trainer(tmp_path / "more")
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert same(weights(whole.model), weights(resumed.model))
    assert logged(whole, "nanscan/clip_factor") == logged(resumed, "nanscan/clip_factor")


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    options = {**SAVED, "eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True, "learning_rate": 0.5}
    trainer = make_trainer(tmp_path, NanScanCallback(), eval_dataset=Tokens(8), **options)
    trainer.train()
    best = make_trainer(
        tmp_path / "more",
        eval_dataset=Tokens(8),
        model=type(trainer.model).from_pretrained(trainer.state.best_model_checkpoint),
    )
    assert same(weights(trainer.model), weights(best.model))
    assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric
