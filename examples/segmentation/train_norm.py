"""The shortest cure: clip, and leave out the step if the norm that `clip_grad_norm_` returns is not finite."""

import os

import torch
from diary import Diary
from task import Task
from torch import nn


def train(model: nn.Module, task: Task, diary: Diary) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
    for epoch in range(task.epochs):
        for images, masks in task.batches(epoch):
            optimizer.zero_grad()
            loss = task.loss(model(images), masks)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            if norm.isfinite():
                optimizer.step()
            else:
                print(f"epoch {epoch}: step skipped, the norm of the gradients is {norm}")
            diary.step(loss, skipped=not norm.isfinite())
        with diary.save():
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, diary.folder / "last.pt.tmp")
            os.replace(diary.folder / "last.pt.tmp", diary.folder / "last.pt")
        diary.end_epoch(model)
