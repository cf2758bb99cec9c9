"""A GPT of 20 thousand weights, made from a config, and a Trainer around it that writes where a test says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    logging,
)

logging.set_verbosity_error()

VOCABULARY, LENGTH = 32, 8
SPECIAL = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
CONFIG = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, **SPECIAL)


class Tokens(Dataset):
    """Random sequences, each sample always the same; in those of `ignored` every target is to be ignored."""

    def __init__(self, size: int, ignored: tuple[int, ...] = ()) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(1, VOCABULARY, (size, LENGTH), generator=generator)
        self.ignored = ignored

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.ids[index]
        return {"input_ids": ids, "labels": torch.full_like(ids, -100) if index in self.ignored else ids}


def tiny_gpt() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(CONFIG)


class BadGradient(TrainerCallback):
    """Plants a NaN in one parameter's gradient in the backward passes of the steps given."""

    def __init__(self, model: nn.Module, name: str, steps: tuple[int, ...]) -> None:
        self.step, self.steps = 0, steps
        dict(model.named_parameters())[name].register_hook(self.spoil)

    def spoil(self, gradient: Tensor) -> Tensor:
        if self.step not in self.steps:
            return gradient
        gradient = gradient.clone()
        gradient.view(-1)[3] = float("nan")
        return gradient

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    known: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "max_steps": 6,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "learning_rate": 1e-2,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**{**known, **options})


def make_trainer(
    folder: Path, *callbacks: Any, model: Any = None, data: Dataset | None = None, **options: Any
) -> Trainer:
    more = {name: options.pop(name) for name in ("optimizers", "eval_dataset") if name in options}
    model = tiny_gpt() if model is None else model
    args = arguments(folder, **options)
    trainer = Trainer(model, args, train_dataset=data or Tokens(32), callbacks=list(callbacks), **more)
    trainer.remove_callback(PrinterCallback)
    return trainer


def logged(trainer: Trainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry and "loss" in entry]


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
