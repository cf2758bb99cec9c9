"""The training as it was first written: plain PyTorch, and the whole model saved after every epoch."""

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
            optimizer.step()
            diary.step(loss)
        with diary.save():
            torch.save(model, diary.folder / "last.pt")
        diary.end_epoch(model)
