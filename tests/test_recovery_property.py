"""Random runs: after each rollback everything is as it was at the last good snapshot, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import optim
from torch.optim import lr_scheduler as sched

import nanscan
from tests.guarded import NAN
from tests.recovery_support import everything, make_batch, make_model, quiet, spoil, train, without_lr

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda ps: optim.SGD(ps, lr=0.05, momentum=0.9),
    "Adam": lambda ps: optim.Adam(ps, lr=0.01, amsgrad=True),
    "AdamW fused": lambda ps: optim.AdamW(ps, lr=0.01, fused=True),
    "RMSprop": lambda ps: optim.RMSprop(ps, lr=0.01, centered=True),
    "Adagrad": lambda ps: optim.Adagrad(ps, lr=0.01),
    "tensor lr": lambda ps: optim.Adam(ps, lr=torch.tensor(0.01), foreach=False),
}
SCHEDULERS: dict[str, Any] = {
    "none": lambda o: None,
    "LambdaLR": lambda o: sched.LambdaLR(o, lambda step: 0.95**step),
    "OneCycleLR": lambda o: sched.OneCycleLR(o, 0.1, total_steps=100, cycle_momentum=False),
    "CosineWarmRestarts": lambda o: sched.CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: sched.SequentialLR(
        o, [sched.ConstantLR(o, 0.5), sched.ExponentialLR(o, 0.9)], milestones=[3]
    ),
}
KINDS = ["good", "good", "good", "good", "nan batch", "bad weights", "bad state", "bad loss"]


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
@settings(max_examples=60)
@given(
    st.sampled_from(list(OPTIMIZERS)),
    st.sampled_from(list(SCHEDULERS)),
    st.booleans(),
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=14),
)
def test_after_each_rollback_everything_is_as_at_the_last_snapshot(
    optimizer_name: str, scheduler_name: str, guard: bool, every: int, patience: int, kinds: list[str]
) -> None:
    model = make_model()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    optimizer = nanscan.wrap(optimizer, model) if guard else optimizer
    scheduler = SCHEDULERS[scheduler_name](optimizer)
    with quiet():
        recovery = nanscan.Recovery(
            model, optimizer, scheduler=scheduler, snapshot_every=every, patience=patience, max_rollbacks=99
        )
        saved = {recovery.step_index: without_lr(everything(model, optimizer, scheduler))}
        for number, kind in enumerate(kinds):
            went_back = one_step(model, optimizer, scheduler, recovery, kind, number)
            now = without_lr(everything(model, optimizer, scheduler))
            if went_back:
                assert now == saved[recovery.step_index]
                assert recovery.step_index == max(saved)
            elif recovery._memory.newest.moment.step == recovery.step_index:
                saved[recovery.step_index] = now
            if kind != "nan batch":
                assert went_back is (kind != "good")
            assert nanscan.scan(model).finite


def one_step(model: Any, optimizer: Any, scheduler: Any, recovery: nanscan.Recovery, kind: str, number: int) -> bool:
    train(model, optimizer, make_batch(number, NAN if kind == "nan batch" else None))
    if scheduler is not None:
        scheduler.step()
    if kind == "bad weights":
        spoil(model)
    if kind == "bad state":
        state = next(iter(optimizer.state.values()))
        next(t for t in state.values() if torch.is_tensor(t) and t.dim()).view(-1)[0] = NAN
    return recovery.step(loss=NAN if kind in ("bad loss", "bad weights", "bad state") else None)
