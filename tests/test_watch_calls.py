"""What stands in for the calls of a watched model's modules, and that nobody else notices."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanscan
from nanscan.engine import active_engine
from nanscan.ranges.calls import can_be_watched

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Own(nn.Module):
    """Says itself what a pickle of it holds, and which attributes it takes; returns more than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.__dict__["ready"] = True

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("ready"):
            raise AttributeError(f"no attribute is set here, '{name}' neither")
        super().__setattr__(name, value)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        y = self.fc(x) * scale
        return y, {"half": y / 2}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.within: Callable[[], object] = lambda: None
        self.calls_within = 0
        self.first, self.own = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), Own()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.calls_within = watched_calls(self)
        self.within()
        y, more = self.own(x, scale=3.0)
        result: Tensor = y + more["half"]
        return result


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def watched_calls(model: nn.Module) -> int:
    return sum(module._compiled_call_impl is not None for module in model.modules())


needs_calls = pytest.mark.skipif(
    active_engine().name != "native" or not can_be_watched(nn.Identity()), reason="hooks are all there is here"
)


@needs_calls
def test_a_watched_call_sees_what_a_hook_sees() -> None:
    plain, hooked = net(), net()
    for module in hooked.modules():
        module.register_forward_pre_hook(lambda module, args: None)  # so that watch takes hooks
    found = []
    for model in (plain, hooked):
        with nanscan.watch(model) as ranges:
            for _ in range(3):
                model(X).square().sum().backward()
                assert watched_calls(model) == 0
            found.append((ranges.rows(), model.calls_within, model.first[0].weight.grad))
    (rows, calls, grad), (rows_of_hooks, calls_beside_hooks, same_grad) = found
    assert (calls, calls_beside_hooks) == (5, 0)
    assert rows == rows_of_hooks and {row.module for row in rows} == {"first.0", "first.1", "own.fc", "own", "Net"}
    assert torch.equal(grad, same_grad)


@needs_calls
def test_copies_made_within_a_forward_hold_no_watched_call() -> None:
    model, copies = net(), []
    model.within = lambda: copies.extend((copy.deepcopy(model), pickle.loads(pickle.dumps(model.own))))
    with nanscan.watch(model) as ranges:
        model(X).sum().backward()
        assert model.calls_within == 5 and [watched_calls(other) for other in copies] == [0, 0]
        model.within = lambda: None
        copies[1](X)
        assert ranges.steps == 1


def test_watches_of_a_model_and_its_wrapper_see_the_same() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    wrapped = nn.DataParallel(model)
    with nanscan.watch(wrapped, every=2) as outer, warnings.catch_warnings():
        wrapped(X).sum().backward()
        warnings.simplefilter("error")
        with nanscan.watch(model) as inner:
            for _ in range(2):
                wrapped(X).sum().backward()
        rows, same = outer.rows(last=1), inner.rows(last=1)
        assert [(row.module, row.kind, row.rms) for row in rows] == [(row.module, row.kind, row.rms) for row in same]
        assert len(rows) == 4


def test_a_module_compiled_within_a_forward_stays_compiled() -> None:
    model = net()
    fc: Any = model.own.fc

    def compile_it() -> None:
        fc._compiled_call_impl = twice

    def twice(x: Tensor) -> Tensor:
        return x * 2

    model.within = compile_it
    with nanscan.watch(model) as ranges:
        for _ in range(2):
            model(X).sum().backward()
            assert fc._compiled_call_impl is twice
        assert {row.module for row in ranges.rows(last=1)} == {"first.0", "first.1", "own", "Net"}
    assert fc._compiled_call_impl is twice and not fc._forward_hooks


def test_modules_within_a_checkpoint_have_gradients() -> None:
    model = net()
    first = model.first.forward
    model.first.forward = lambda x: checkpoint(first, x, use_reentrant=True)  # type: ignore[method-assign]
    with nanscan.watch(model) as ranges:
        for _ in range(2):
            model(X.clone().requires_grad_()).sum().backward()
            assert len(ranges.rows("first.0", "gradient", last=1)) == 1
            assert watched_calls(model) == 0
    assert not any(module._forward_hooks for module in model.modules())


def test_compiled_parts_of_a_watched_model_stay_whole() -> None:
    model = net()
    part = torch.compile(lambda x: model.first(x).exp(), backend="eager", fullgraph=True)
    with nanscan.watch(model) as ranges:
        model(X).sum().backward()
        model.forward = lambda x: part(x) + model.own(x)[0]  # type: ignore[method-assign]
        model(X).sum().backward()
        assert {row.module for row in ranges.rows(last=1)} == {"own.fc", "own", "Net"}


def test_a_failing_module_raises_its_own_error_and_the_watch_goes_on() -> None:
    model = net()
    with nanscan.watch(model) as ranges:
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(torch.ones(3, 5))
        model(X).sum().backward()
        assert ranges.rows("own.fc", "gradient") != [] and ranges.steps == 2


def test_a_watched_model_is_freed() -> None:
    model = net()
    ranges = nanscan.watch(model, every=2)
    for _ in range(5):  # measured steps and others by turns
        model(X).sum().backward()
    dead = weakref.ref(model), weakref.ref(model.own.fc)
    del model, ranges
    gc.collect()
    assert [reference() for reference in dead] == [None, None]
    assert not any(type(found).__name__ == "WatchedCall" for found in gc.get_objects())
