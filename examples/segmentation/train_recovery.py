"""The same with recovery: snapshots in memory, back to the last good one if three steps in a row are bad."""

import torch
from diary import Diary
from task import Task
from torch import nn

import nanscan


def train(model: nn.Module, task: Task, diary: Diary) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
    optimizer = nanscan.wrap(optimizer, model, clip_norm=1.0, log=diary.folder / "run.jsonl")
    manager = nanscan.CheckpointManager(diary.folder / "checkpoints", keep=1)
    recovery = nanscan.Recovery(model, optimizer, snapshot_every=task.steps_per_epoch)
    for epoch in range(task.epochs):
        for images, masks in task.batches(epoch):
            optimizer.zero_grad()
            loss = task.loss(model(images), masks)
            loss.backward()
            optimizer.observe(loss)
            optimizer.step()
            diary.step(loss, skipped=optimizer.step_was_skipped, rolled_back=recovery.step())
        with diary.save():
            manager.save(epoch, model=model, optimizer=optimizer)
        diary.end_epoch(model)
    manager.close()
