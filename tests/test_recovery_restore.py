"""What goes back: everything, bit for bit, whatever the optimizer, and never an alias."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

import nanscan
from tests.guarded import NAN, VARIANTS, Variant, bits
from tests.recovery_support import everything, make_batch, make_model, run, spoil, train

pytestmark = pytest.mark.filterwarnings("ignore::nanscan.NonFiniteWarning")


def test_everything_is_as_it_was_at_the_snapshot() -> None:
    model = make_model()
    inner = optim.AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.5}], lr=0.01)
    optimizer = nanscan.wrap(inner, model)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    recovery = nanscan.Recovery(model, optimizer, scheduler=scheduler, scaler=scaler, snapshot_every=3, lr_backoff=1.0)
    for step in range(3):
        train(model, optimizer, make_batch(step))
        scheduler.step()
        recovery.step()
    saved = everything(model, optimizer, scheduler, scaler)
    for step in range(2):
        train(model, optimizer, make_batch(step))
        scheduler.step()
        recovery.step()
    inner.param_groups[0]["weight_decay"] = 7.0
    inner.param_groups[0]["new"] = 1
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    spoil(model)
    assert recovery.step(loss=NAN)
    assert everything(model, optimizer, scheduler, scaler) == saved
    assert recovery.step_index == recovery.rolled_back_to == 3
    assert all(p.grad is None for p in model.parameters())


def test_draws_after_a_rollback_are_those_after_the_snapshot() -> None:
    model = make_model()
    recovery = nanscan.Recovery(model, optim.SGD(model.parameters(), lr=0.1))
    drawn = [(random.random(), np.random.rand(), torch.rand(1).item())]
    assert recovery.step(loss=NAN)
    drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.leaf and not v.sparse], ids=str)
def test_state_of_every_optimizer_goes_back_twice(variant: Variant) -> None:
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3, 5))
    optimizer = variant.make(list(model.parameters()))

    def step() -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model.a.square().sum() + model.b.square().sum()).sqrt()
            loss.backward()
            return loss

        optimizer.step(closure)

    step()
    recovery = nanscan.Recovery(model, optimizer, lr_backoff=1.0)
    saved = bits([*model.parameters()]), bits(optimizer.state_dict())
    for _ in range(2):
        step()
        step()
        assert (bits([*model.parameters()]), bits(optimizer.state_dict())) != saved
        assert recovery.step(loss=NAN)
        assert (bits([*model.parameters()]), bits(optimizer.state_dict())) == saved


def test_a_snapshot_is_never_an_alias() -> None:
    model = make_model()
    optimizer = optim.Adam(model.parameters())
    recovery = nanscan.Recovery(model, optimizer, snapshot_every=1, lr_backoff=1.0)
    run(model, optimizer, recovery, 3)
    saved = everything(model, optimizer)
    for _ in range(2):
        for tensor in [*model.parameters(), *model.buffers(), *optimizer.state[model[0].weight].values()]:
            tensor.data.fill_(1)
        assert recovery.step(loss=NAN)
        assert everything(model, optimizer) == saved


def test_sparse_gradients_and_their_state_go_back() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = optim.SparseAdam(model.parameters())
    recovery = nanscan.Recovery(model, optimizer)
    saved = bits(model.weight)
    model(torch.tensor([1, 3])).sum().backward()
    optimizer.step()
    assert recovery.step(loss=NAN)
    assert bits(model.weight) == saved and not optimizer.state[model.weight]


def test_an_optimizer_that_holds_another_goes_back_with_it() -> None:
    class Outer(optim.Optimizer):
        def __init__(self, base: optim.Optimizer) -> None:
            self.base = base
            self.calls = 0
            super().__init__(base.param_groups, {})

        def step(self, closure: Any = None) -> None:
            self.calls += 1
            self.base.step()

    model = make_model()
    optimizer = Outer(optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    recovery = nanscan.Recovery(model, optimizer, lr_backoff=0.5)
    train(model, optimizer, make_batch(0))
    assert recovery.step(loss=NAN)
    assert optimizer.calls == 0 and not optimizer.base.state
    assert [group["lr"] for group in optimizer.base.param_groups] == [0.05]


def test_a_group_added_after_the_snapshot_is_in_the_next() -> None:
    model = make_model()
    optimizer = optim.Adam(model[0].parameters(), lr=0.1)
    recovery = nanscan.Recovery(model, optimizer, snapshot_every=100)
    train(model, optimizer, make_batch(0))
    recovery.step()
    optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.2})
    train(model, optimizer, make_batch(1))
    assert recovery.step() is False
    saved = bits(optimizer.state_dict()["state"])
    train(model, optimizer, make_batch(2, NAN))
    assert recovery.step() is True
    assert recovery.rolled_back_to == 2
    assert bits(optimizer.state_dict()["state"]) == saved
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.1]


def test_a_group_added_just_before_the_failure_stays_and_its_weights_go_back() -> None:
    model = make_model()
    optimizer = optim.Adam(model[0].parameters(), lr=0.1)
    recovery = nanscan.Recovery(model, optimizer)
    saved = bits(dict(model.state_dict()))
    optimizer.add_param_group({"params": list(model[1].parameters())})
    train(model, optimizer, make_batch(1, NAN))
    assert recovery.step() is True
    assert len(optimizer.param_groups) == 2 and not optimizer.state
    assert bits(dict(model.state_dict())) == saved


def test_replaced_and_resized_tensors_go_back() -> None:
    model = nn.Module()
    model.p = nn.Parameter(torch.ones(2))
    model.register_buffer("cache", torch.ones(3))
    model.register_buffer("none", None)
    recovery = nanscan.Recovery(model, optim.SGD(model.parameters(), lr=0.1))
    parameter = model.p
    parameter.data = torch.zeros(5)
    model.cache, model.none = torch.zeros(7), torch.zeros(1)
    assert recovery.step(loss=NAN)
    assert parameter.tolist() == [1, 1] and model.cache.tolist() == [1, 1, 1] and model.none is None


def test_extra_state_of_modules_goes_back() -> None:
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self) -> Any:
            return {"count": self.count}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]

    model = Counting(2, 1)
    recovery = nanscan.Recovery(model, optim.SGD(model.parameters(), lr=0.1))
    model.count = 5
    assert recovery.step(loss=NAN)
    assert model.count == 0
