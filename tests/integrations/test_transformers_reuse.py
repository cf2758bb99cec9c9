"""Around one healthy `train()`: callbacks used again or removed, broken-off runs, Trainers of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

import nanscan
from nanscan.integrations.transformers import NanScanCallback
from tests.integrations.tiny_transformers import BadGradient, Tokens, arguments, logged, make_trainer, tiny_gpt

BAD = "transformer.h.1.mlp.c_fc.weight"

pytestmark = pytest.mark.filterwarnings("ignore::nanscan.NonFiniteWarning")


def test_a_callback_in_a_second_trainer_begins_anew_there(tmp_path: Path) -> None:
    callback = NanScanCallback(clip_norm=nanscan.AdaptiveClip("autoclip"))
    model = tiny_gpt()
    first = make_trainer(tmp_path, callback, BadGradient(model, BAD, (1,)), model=model, max_steps=4)
    second = make_trainer(tmp_path, callback, max_steps=3)
    first.train()
    second.train()
    assert (first.optimizer.skipped_steps, second.optimizer.skipped_steps) == (1, 0)
    assert second.optimizer.last_report.step == 2 and callback.optimizer is second.optimizer
    assert len(second.optimizer.guard_state_dict()["clip"]["norms"]) == 3  # none of another model's


def test_what_a_broken_off_training_left_is_not_held_against_the_next(tmp_path: Path) -> None:
    class Impatient(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    impatient = Impatient()
    trainer = make_trainer(
        tmp_path, NanScanCallback(), impatient, data=Tokens(32, tuple(range(32))), gradient_accumulation_steps=2
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()  # after a loss that is NaN
    trainer.remove_callback(impatient)
    trainer.train_dataset = Tokens(32)
    trainer.train()
    assert trainer.optimizer.skipped_steps == 0 and len(trainer.optimizer.history) == 6


def test_without_the_callback_the_trainers_own_clipping_is_back(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, NanScanCallback(), max_steps=2)
    trainer.train()
    trainer.remove_callback(NanScanCallback)
    trainer.args.max_grad_norm = 1e-3
    trainer.train()
    norms = [report.norm for report in trainer.optimizer.history]
    assert min(norms[:2]) > 0.5 and norms[2:] == pytest.approx([1e-3, 1e-3], rel=1e-2)
    assert min(logged(trainer, "grad_norm")) > 0.5


def test_norms_that_a_trainer_of_ones_own_collects_are_each_of_their_step(tmp_path: Path) -> None:
    class Collecting(Trainer):
        norms: list[Any] = []

        def _clip_grad_norm(self, model: Any) -> Any:
            self.norms.append(super()._clip_grad_norm(model))
            return self.norms[-1]

    args = arguments(tmp_path, max_steps=3)
    trainer = Collecting(tiny_gpt(), args, train_dataset=Tokens(32), callbacks=[NanScanCallback(history=2)])
    trainer.train()
    expected = [report.norm for report in trainer.optimizer.history]
    assert torch.stack(trainer.norms[1:]).tolist() == pytest.approx(expected)
    assert float(torch.add(0, other=trainer.norms[1])) == pytest.approx(expected[0])
    with pytest.raises(RuntimeError, match="norm of step 0 is no longer known"):
        float(trainer.norms[0])


def test_a_limit_that_a_trainer_or_callback_of_ones_own_decides_holds_as_without_the_guard(tmp_path: Path) -> None:
    class Halving(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            args.max_grad_norm = 0.5**state.global_step

    class OfOneLayer(Trainer):
        def _clip_grad_norm(self, model: Any) -> Any:
            self.accelerator.clip_grad_norm_(model.transformer.h[1].parameters(), 0.01)
            return super()._clip_grad_norm(model)

    def trained(*callbacks: Any) -> Any:
        args = arguments(tmp_path, max_steps=3, optim="sgd", learning_rate=0.5)
        trainer = OfOneLayer(tiny_gpt(), args, train_dataset=Tokens(32), callbacks=[*callbacks, Halving()])
        trainer.train()
        return trainer

    plain, guarded = trained(), trained(NanScanCallback())
    assert logged(guarded, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=1e-5)
    for one, other in zip(plain.model.parameters(), guarded.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_gradients_of_weights_that_the_optimizer_does_not_hold_count_as_without_the_guard(tmp_path: Path) -> None:
    def trained(*callbacks: Any) -> Any:
        model = tiny_gpt()
        optimizer = torch.optim.SGD(model.transformer.h[1].parameters(), lr=0.1)
        trainer = make_trainer(tmp_path, *callbacks, model=model, optimizers=(optimizer, None), max_grad_norm=0.5)
        trainer.train()
        return trainer

    plain, guarded = trained(), trained(NanScanCallback())
    assert logged(guarded, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=1e-5)
    for one, other in zip(plain.model.parameters(), guarded.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
