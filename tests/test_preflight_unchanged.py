"""Nothing of a preflight remains: weights, buffers, gradients, optimizer, generators, modes; also after exceptions."""

from __future__ import annotations

import copy
import inspect
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanscan
from benchmarks.models import ResNet18


class Restless(nn.Module):
    """Changes whatever a forward pass can change."""

    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.drop, self.calls, self.last = nn.Dropout(0.5), 0, torch.zeros(2)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros(3))
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = self.last + 1
        self.new = 7
        self.count.numpy()[1] += 1  # no op of PyTorch's
        self.fc1.bias.requires_grad_(False)
        self.mean = self.mean * 0.9 + x.mean(0) * 0.1
        with torch.no_grad():
            self.fc1.weight.mul_(0.5)
            self.fc2.bias.data += 1
        x.mul_(2)
        random.random()
        np.random.rand()
        if self.fails == "forward":
            raise RuntimeError("in forward")
        x = self.norm(self.fc1(x)).relu()
        if self.fails == "backward":
            x.register_hook(self.raising)
        self.drop.eval()
        return self.fc2(self.drop(x))

    @staticmethod
    def raising(grad: Tensor) -> Tensor:
        raise RuntimeError("in backward")


def bits(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.detach().contiguous().view(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, (list, tuple)) else value


def everything(model: nn.Module, optimizer: Any, batch: Any) -> Any:
    """All that must not change."""
    return {
        "model": bits(dict(model.state_dict())),
        "plain": {
            n: bits({k: v for k, v in vars(m).items() if isinstance(v, (int, str, Tensor))})
            for n, m in model.named_modules()
        },
        "grads": [bits(p.grad) for p in model.parameters()],
        "same": [(id(p), id(p.grad), p.requires_grad) for p in model.parameters()],
        "optimizer": bits(optimizer.state_dict()),
        "batch": bits(batch),
        "rng": (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
        "grad mode": (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")),
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
    }


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with state, and gradients on the parameters."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("fails", ["", "forward", "backward", "loss"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_everything_is_as_before(fails: str, wrapped: bool) -> None:
    torch.manual_seed(0)
    model = Restless(fails)
    inner = trained(model)
    optimizer = nanscan.wrap(inner, model) if wrapped else inner
    batch = torch.randn(6, 8), torch.randint(0, 3, (6,))

    def loss_fn(out: Tensor, targets: Tensor) -> Tensor:
        if fails == "loss":
            raise ValueError("in loss")
        return F.cross_entropy(out, targets)

    before = everything(model, inner, batch)
    findings = nanscan.preflight(model, optimizer, batch, loss_fn)
    assert everything(model, inner, batch) == before
    raised = [f for f in findings if f.code == "NS401"]
    assert bool(raised) == bool(fails)
    if fails:
        assert f"in {fails}" in raised[0].message and "test_preflight_unchanged.py:" in raised[0].message
        assert "raise " in raised[0].message


def test_a_second_preflight_finds_the_same() -> None:
    torch.manual_seed(0)
    model = Restless()
    batch = torch.randn(6, 8), torch.randint(0, 3, (6,))
    optimizer = torch.optim.SGD(model.parameters(), lr=500.0)
    first = nanscan.preflight(model, optimizer, batch, F.cross_entropy)
    assert first and first == nanscan.preflight(model, optimizer, batch, F.cross_entropy)


def test_training_after_a_preflight_is_the_same_bit_for_bit() -> None:
    def run(look: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batch = torch.randn(6, 8), torch.randint(0, 3, (6,))
        if look:
            nanscan.preflight(model, optimizer, batch, F.cross_entropy)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()
        return bits(dict(model.state_dict()))

    assert run(look=True) == run(look=False)


def test_an_interrupt_goes_through_and_everything_is_put_back() -> None:
    torch.manual_seed(0)
    model = Restless()
    optimizer = trained(model)
    batch = torch.randn(6, 8), torch.randint(0, 3, (6,))
    before = everything(model, optimizer, batch)

    def interrupted(out: Tensor, targets: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        nanscan.preflight(model, optimizer, batch, interrupted)
    assert everything(model, optimizer, batch) == before


def test_a_nan_loss_that_is_traced_leaves_nothing_either() -> None:
    torch.manual_seed(0)
    model = Restless()
    optimizer = trained(model)
    batch = torch.randn(6, 8), torch.randint(0, 3, (6,))
    before = everything(model, optimizer, batch)
    (finding,) = [
        f
        for f in nanscan.preflight(model, optimizer, batch, lambda out, y: (out - 99).log().sum())
        if f.code == "NS404"
    ]
    assert "NaN made by aten.log" in finding.message and "test_preflight_unchanged.py" in finding.message
    assert everything(model, optimizer, batch) == before


def test_an_optimizer_that_steps_in_backward_leaves_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3))
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    before = bits(dict(model.state_dict()))
    nanscan.preflight(model, None, (torch.randn(6, 8), torch.randint(0, 3, (6,))), F.cross_entropy)
    assert bits(dict(model.state_dict())) == before
    assert all(not o.state for o in optimizers.values())


def test_a_loss_with_parameters_of_its_own_is_put_back() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, out: Tensor, targets: Tensor) -> Tensor:
            self.seen += 1
            return F.cross_entropy(out * self.scale, targets)

    torch.manual_seed(0)
    model, loss = nn.Linear(8, 3), Loss()
    loss.scale.grad = torch.tensor(3.0)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    batch = torch.randn(6, 8), torch.randint(0, 3, (6,))
    assert nanscan.preflight(model, optimizer, batch, loss) == []
    assert (loss.seen.item(), loss.scale.item(), loss.scale.grad.item()) == (0.0, 1.0, 3.0)


def test_a_model_made_by_torch_compile_is_run_as_it_was_before(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 3)

    def compiler(*args: Any) -> Callable[..., Any]:
        raise AssertionError("nothing is to be compiled")

    compiled = inspect.unwrap(torch.compile)(model, backend=compiler)  # Lightning wraps it and keeps the backend
    batch = torch.randn(6, 8), torch.randint(0, 3, (6,))
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    findings = nanscan.preflight(compiled, optimizer, batch, F.cross_entropy)
    assert [(f.code, f.where) for f in findings] == [("NS302", "optimizer.param_groups[0]"), ("NS303", "weight")]


def test_findings_are_plain_data() -> None:
    model = nn.Linear(8, 3).eval()
    findings = nanscan.preflight(model)
    assert pickle.loads(pickle.dumps(findings)) == findings == copy.deepcopy(findings)
    assert findings[0].to_dict()["code"] == "NS209"
    assert 'silence={"NS209"}' in str(findings) and "1 warning" in str(findings)


def test_a_report_shows_the_first_of_many_alike_and_names_the_others() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(12)])
    for layer in model:
        nn.init.constant_(layer.weight, 0.1)
    findings = nanscan.preflight(model)
    assert [f.code for f in findings] == ["NS103"] * 12
    assert "also 4.weight, 5.weight, 6.weight, 7.weight and 4 more" in str(findings)
    assert str(findings).count("every element is 0.1") == 4


def test_the_first_update_of_a_resnet_takes_no_memory_with_it() -> None:
    torch.manual_seed(0)
    model = ResNet18(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    nanscan.preflight(model, optimizer, (torch.randn(2, 3, 32, 32), torch.tensor([1, 2])), F.cross_entropy)
    assert not optimizer.state and all(p.grad is None for p in model.parameters())
