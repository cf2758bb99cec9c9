"""A guarded `Trainer` trains as the plain one, skips what is bad, and says so in its logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, TrainerCallback

import nanscan
from nanscan.integrations.transformers import NanScanCallback, wrap_trainer
from tests.integrations.tiny_transformers import BadGradient, Tokens, logged, make_trainer, same, tiny_gpt, weights

BAD = "transformer.h.1.mlp.c_fc.weight"

pytestmark = pytest.mark.filterwarnings("ignore::nanscan.NonFiniteWarning")


def trained(folder: Path, *callbacks: Any, **options: Any) -> Any:
    trainer = make_trainer(folder, *callbacks, **options)  # it seeds the generators
    trainer.train()
    return trainer


def spoilt_trainer(folder: Path, *callbacks: Any, steps: tuple[int, ...] = (2,), **options: Any) -> Any:
    model = tiny_gpt()
    return make_trainer(folder, *callbacks, BadGradient(model, BAD, steps), model=model, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"optim": "sgd", "learning_rate": 0.5},
        {"optim": "adamw_torch_fused", "gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
        {"bf16": True, "gradient_accumulation_steps": 2, "max_grad_norm": 100.0},  # not reached: the same bits
    ],
    ids=["sgd", "fused-accumulated", "bf16"],
)
def test_a_healthy_run_ends_as_without_the_guard_and_logs_the_same_norms(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    plain, guarded = trained(tmp_path, **options), trained(tmp_path, NanScanCallback(), **options)
    for name, value in weights(plain.model).items():
        torch.testing.assert_close(guarded.model.state_dict()[name], value, rtol=1e-3, atol=1e-3, msg=name)
    assert logged(guarded, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=1e-3)
    assert logged(guarded, "learning_rate") == logged(plain, "learning_rate")
    limit = options.get("max_grad_norm", 1.0)
    expected = [min(1.0, limit / (norm + 1e-6)) for norm in logged(guarded, "grad_norm")]
    assert logged(guarded, "nanscan/clip_factor") == pytest.approx(expected, rel=1e-5)
    assert len(guarded.optimizer.history) == 6 and (min(expected) < 1) == (limit < 100)


def test_without_clipping_the_weights_are_the_same_bit_for_bit(tmp_path: Path) -> None:
    plain, guarded = trained(tmp_path, max_grad_norm=0), trained(tmp_path, NanScanCallback(), max_grad_norm=0)
    assert same(weights(plain.model), weights(guarded.model))
    assert logged(guarded, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=1e-5)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_a_bad_step_is_skipped_named_and_moves_neither_weights_nor_learning_rate(tmp_path: Path, optim: str) -> None:
    class Around(TrainerCallback):
        seen: dict[int, Any] = {}

        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.seen[state.global_step] = weights(model)

    trainer = spoilt_trainer(tmp_path, NanScanCallback(), Around(), optim=optim)
    trainer.train()
    assert [report.skipped for report in trainer.optimizer.history] == [False, False, True, False, False, False]
    assert [row.name for row in trainer.optimizer.history[2].bad] == [BAD]  # the Trainer's clipping would blame all
    assert same(Around.seen[2], Around.seen[3]) and not same(Around.seen[3], Around.seen[4])
    rates = logged(trainer, "learning_rate")
    assert rates[2] == rates[3] and len(set(rates)) == 5
    assert logged(trainer, "nanscan/skipped_steps") == [0, 0, 1, 1, 1, 1]
    norms = logged(trainer, "grad_norm")
    assert norms[2] != norms[2] and all(0 < norm < 10 for norm in norms[:2] + norms[3:])
    assert "nanscan/skipped_steps" in trainer.state.log_history[-1]


def test_a_loss_of_only_ignored_targets_is_skipped_although_the_logs_filter_it(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    torch.manual_seed(0)
    data = Tokens(32, ignored=tuple(range(32)))
    trainer = make_trainer(tmp_path, NanScanCallback(), model=BertForMaskedLM(config), data=data, max_steps=2)
    before = weights(trainer.model)
    trainer.train()
    assert trainer.optimizer.skipped_steps == 2 and "loss" in [row.name for row in trainer.optimizer.history[0].bad]
    assert same(before, weights(trainer.model))
    assert all(loss == loss for loss in logged(trainer, "loss"))  # logging_nan_inf_filter


def test_one_ignored_micro_batch_of_an_accumulation_is_named(tmp_path: Path) -> None:
    class Shifted(TrainerCallback):  # divides by 0 in the loss of the second micro-batch of step 1
        calls = 0

        def hook(self, module: Any, inputs: Any, output: Any) -> Any:
            self.calls += 1
            if self.calls == 4:
                output.loss = output.loss / 0
            return output

    model, shifted = tiny_gpt(), Shifted()
    model.register_forward_hook(shifted.hook)
    trainer = make_trainer(tmp_path, NanScanCallback(), model=model, max_steps=2, gradient_accumulation_steps=2)
    trainer.train()
    names = [row.name for row in trainer.optimizer.history[1].bad]
    assert "loss[1]" in names and "loss[0]" not in names


def test_raise_leaves_train_with_the_name(tmp_path: Path) -> None:
    trainer = spoilt_trainer(tmp_path, NanScanCallback(on_nonfinite="raise"))
    with pytest.raises(nanscan.NonFiniteError, match=f"grad of '{BAD}' has 1 NaN"):
        trainer.train()
    assert trainer.state.global_step == 2


def test_wrap_trainer_comes_before_the_reporters_which_see_its_entries(tmp_path: Path) -> None:
    class Reporter(TrainerCallback):
        entries: list[dict[str, Any]] = []

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            self.entries.append(dict(logs))

    trainer = spoilt_trainer(tmp_path, Reporter())
    assert wrap_trainer(trainer, clip_norm=0.5, history=3) is trainer
    trainer.train()
    assert [entry["nanscan/skipped_steps"] for entry in Reporter.entries] == [0, 0, 1, 1, 1, 1, 1]
    assert trainer.optimizer.policy.clip_norm == 0.5 and len(trainer.optimizer.history) == 3
    with pytest.raises(ValueError, match="has a NanScanCallback already"):
        wrap_trainer(trainer)


def test_wrong_use_is_said_where_it_is_written() -> None:
    with pytest.raises(TypeError, match=r"transformers\.Trainer, got Linear"):
        wrap_trainer(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="on_nonfinite must be"):
        NanScanCallback(on_nonfinite="stop")
    with pytest.raises(TypeError, match="model is the Trainer's own"):
        NanScanCallback(model=None)
    with pytest.raises(TypeError, match="clip_nrom"):
        NanScanCallback(clip_nrom=1.0)


def test_an_optimizer_and_scheduler_of_ones_own_are_guarded(tmp_path: Path) -> None:
    model = tiny_gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    spoil = BadGradient(model, BAD, (1, 2))
    trainer = make_trainer(tmp_path, NanScanCallback(), spoil, model=model, optimizers=(optimizer, scheduler))
    trainer.train()
    assert trainer.optimizer.skipped_steps == 2 and trainer.optimizer.optimizer.optimizer is optimizer
    assert optimizer.param_groups[0]["lr"] == 0.5**4


@pytest.mark.parametrize("callbacks", [(), (NanScanCallback(),)], ids=["alone", "with-callback"])
def test_an_optimizer_that_is_guarded_already_keeps_its_options(tmp_path: Path, callbacks: Any) -> None:
    model = tiny_gpt()
    optimizer = nanscan.wrap(torch.optim.AdamW(model.parameters()), model, clip_norm=0.3)
    trainer = make_trainer(
        tmp_path, *callbacks, BadGradient(model, BAD, (2,)), model=model, optimizers=(optimizer, None)
    )
    trainer.train()
    assert trainer.optimizer.optimizer is optimizer and optimizer.policy.clip_norm == 0.3
    assert [row.name for row in optimizer.history[2].bad] == [BAD]
    rates = logged(trainer, "learning_rate")
    assert rates[2] == rates[3] and optimizer.skipped_steps == 1


def test_train_twice_goes_on_counting_with_the_limit_of_the_arguments(tmp_path: Path) -> None:
    trainer = spoilt_trainer(tmp_path, NanScanCallback())
    trainer.train()
    guard = trainer.optimizer.optimizer
    trainer.args.max_grad_norm = 0.0
    trainer.train()
    assert trainer.optimizer.optimizer is guard
    assert (guard.skipped_steps, guard.last_report.step, guard.policy.clip_norm) == (2, 11, None)


def test_a_gradient_scaler_shows_the_guard_unscaled_gradients(tmp_path: Path) -> None:
    """Accelerate makes a scaler only for a GPU; on a CPU one is put where it would be."""
    plain = trained(tmp_path)
    trainer = spoilt_trainer(tmp_path, NanScanCallback())
    trainer.accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer.train()
    assert scaler.get_scale() == 512.0 and trainer.optimizer.skipped_steps == 1
    assert [row.name for row in trainer.optimizer.history[2].bad] == [BAD]
    assert logged(trainer, "grad_norm")[:2] == pytest.approx(logged(plain, "grad_norm")[:2], rel=1e-5)
    rates = logged(trainer, "learning_rate")
    assert rates[2] == rates[3] and len(set(rates)) == 5
