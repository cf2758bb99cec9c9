"""`find_origin` runs a step once more and leaves everything as it was."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nanscan


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.bn, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x):
        h = self.drop(self.bn(self.fc(x)))
        return (h - h).sqrt()  # the fault


def everything(model, optimizer):
    state = copy.deepcopy(optimizer.state_dict())
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    values = [v.clone() for v in model.state_dict().values()]
    rng = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    return values, grads, state, rng


def assert_same(a, b):
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, np.ndarray):
        assert (a == b).all()
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize(
    "optimizer_class", [torch.optim.SGD, torch.optim.Adam, lambda p: torch.optim.AdamW(p, lr=0.1, fused=True)]
)
def test_a_whole_step_leaves_no_trace(optimizer_class, started):
    torch.manual_seed(0)
    net, x = Net(), torch.randn(3, 4)
    optimizer = optimizer_class(net.parameters())
    if started:
        net.fc(x).sum().backward()
        optimizer.step()
    kept = [p.grad for p in net.parameters()]
    before = everything(net, optimizer)

    def step():
        optimizer.zero_grad(set_to_none=False)
        random.random()
        np.random.rand()
        torch.set_grad_enabled(True)
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    origin = nanscan.find_origin(step, net)
    assert origin.op == "SqrtBackward0" and origin.module == "" and origin.code.endswith("# the fault")
    assert_same(before, everything(net, optimizer))
    assert all(a is b.grad for a, b in zip(kept, net.parameters(), strict=True))


def test_a_healthy_step_gives_none_and_leaves_no_trace():
    net, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(3, 4)
    optimizer = torch.optim.Adam(net.parameters())
    before = everything(net, optimizer)

    def step():
        F.mse_loss(net(x), x).backward()
        optimizer.step()

    assert nanscan.find_origin(step) is None
    assert_same(before, everything(net, optimizer))


def test_a_guarded_optimizer_neither_counts_nor_warns(recwarn):
    net, x = Net(), torch.randn(3, 4)
    optimizer = nanscan.wrap(torch.optim.SGD(net.parameters(), lr=0.1), net)

    def step():
        loss = net(x).sum()
        loss.backward()
        optimizer.observe(loss)
        optimizer.step()

    assert nanscan.find_origin(step, net).op == "SqrtBackward0"
    assert optimizer.skipped_steps == 0 and len(optimizer.history) == 0 and not recwarn.list
    net.zero_grad()
    step()
    assert optimizer.skipped_steps == 1


def test_exception_in_the_step_is_raised_or_noted():
    net, x = Net(), torch.randn(3, 4)
    with pytest.raises(KeyError, match="gone"):
        nanscan.find_origin(lambda: {}["gone"])

    def step():
        net(x).sum().backward()
        raise KeyError("later")

    before = copy.deepcopy(net.state_dict())
    origin = nanscan.find_origin(step, net)
    assert origin.op == "SqrtBackward0" and "KeyError was raised" in origin.note
    assert_same(before, net.state_dict())


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="step_fn must be a function"):
        nanscan.find_origin(3)
