"""The usual cure: look at every gradient in a Python loop, skip the step if one is bad, clip, save state_dicts."""

import os

import torch
from diary import Diary
from task import Task
from torch import nn


def bad_gradient(model: nn.Module) -> str | None:
    """The name of the first parameter whose gradient holds a NaN or Inf."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            return name
    return None


def train(model: nn.Module, task: Task, diary: Diary) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
    for epoch in range(task.epochs):
        for images, masks in task.batches(epoch):
            optimizer.zero_grad()
            loss = task.loss(model(images), masks)
            loss.backward()
            bad = bad_gradient(model)
            if bad is None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
                optimizer.step()
            else:
                print(f"epoch {epoch}: step skipped, the gradient of {bad} is not finite")
            diary.step(loss, skipped=bad is not None)
        with diary.save():
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, diary.folder / "last.pt.tmp")
            os.replace(diary.folder / "last.pt.tmp", diary.folder / "last.pt")
        diary.end_epoch(model)
