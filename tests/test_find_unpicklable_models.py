"""What people save: models, schedulers, wrappers, guarded optimizers; and what of them is lost without an error."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler

import nanscan
from nanscan import find_unpicklable
from tests.unpicklable import Forgets, ForgetsWeights, KeepsWeights, StateNone


class Cache:
    def __init__(self) -> None:
        self.items, self.lock = {}, threading.RLock()  # type: ignore[var-annotated]


class Block(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last_out = super().forward(x)
        return self.last_out


class Passes(nn.Module):
    """As a LightningModule does it: its trainer stays behind."""

    def __getstate__(self) -> Any:
        return {**self.__dict__, "trainer": None}


def _named(**modules: nn.Module) -> Any:
    model = nn.Sequential()
    for name, module in modules.items():
        model.add_module(name, module)
    return model


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)


def test_a_lock_deep_inside_a_model_is_named_with_its_owner_and_the_way_out() -> None:
    model = _named(encoder=nn.Linear(2, 2))
    model.encoder.cache = Cache()
    (problem,) = find_unpicklable(model)
    assert (problem.path, problem.type) == ("model.encoder.cache.lock", "_thread.RLock")
    assert "Cache" in problem.reason
    assert "__getstate__" in problem.fix and "state_dict()" in problem.fix
    assert find_unpicklable(model.state_dict()) == []


def test_a_tensor_with_a_graph_is_a_loss_told_with_shape_and_grad_fn() -> None:
    model = _named(block=Block(2, 2))
    assert find_unpicklable(model) == []
    model(torch.ones(1, 2))
    (problem,) = find_unpicklable(model)
    assert (problem.path, problem.severity) == ("model.block.last_out", "loss")
    for words in ("(1, 2)", "AddmmBackward0", "deepcopy fails", "torch.save and pickle work"):
        assert words in problem.reason
    assert "detach()" in problem.fix and "register_buffer" in problem.fix
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(model)
    torch.save(model, io.BytesIO())


def test_a_tensor_with_a_graph_can_not_go_to_another_process() -> None:
    (problem,) = find_unpicklable({"loss": torch.ones(2, requires_grad=True) * 2}, for_process=True)
    assert problem.severity == "error" and "spawn" in problem.reason and "detach()" in problem.fix


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_tensors_are_a_loss(register: str) -> None:
    model = nn.Linear(2, 2)
    getattr(model.weight, register)(lambda *_: None)
    (problem,) = find_unpicklable(model)
    assert (problem.path, problem.severity) == ("model.weight", "loss")
    assert "hook" in problem.reason and "register them again" in problem.fix


@pytest.mark.parametrize(
    ("make", "paths"),
    [
        (lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.5), ["sched.lr_lambdas[0]"]),
        (lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, scale_fn=lambda x: 1.0), ["sched._scale_fn_custom"]),
        (lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=5), []),
        (lambda o: lr_scheduler.StepLR(o, 5), []),
        (
            lambda o: lr_scheduler.SequentialLR(
                o, [lr_scheduler.LambdaLR(o, lambda e: 1.0), lr_scheduler.ConstantLR(o)], [1]
            ),
            ["sched._schedulers[0].lr_lambdas[0]"],
        ),
    ],
)
def test_a_scheduler_object_names_its_lambda(make: Any, paths: list[str]) -> None:
    sched = make(_optimizer())
    problems = find_unpicklable(sched)
    assert [problem.path for problem in problems] == paths
    for problem in problems:
        assert "lambda" in problem.reason and __file__ in problem.reason and "state_dict" in problem.reason


def test_the_state_of_a_scheduler_tells_which_function_is_not_stored() -> None:
    inner = _optimizer()
    sched = lr_scheduler.SequentialLR(
        inner, [lr_scheduler.LambdaLR(inner, lambda e: 1.0), lr_scheduler.ConstantLR(inner)], [1]
    )
    checkpoint = {"model": {}, "scheduler": sched.state_dict()}
    (problem,) = find_unpicklable(checkpoint)
    assert problem.path == 'checkpoint["scheduler"]["_schedulers"][0]["lr_lambdas"][0]'
    assert problem.severity == "loss" and "load_state_dict" in problem.fix


@pytest.mark.filterwarnings("ignore")
def test_guarded_optimizers_pickle_and_load() -> None:
    model = nn.Linear(2, 2)
    optimizer = nanscan.wrap(torch.optim.AdamW(model.parameters()), model, clip_norm=1.0)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert find_unpicklable(optimizer) == []
    assert find_unpicklable({"optimizer": optimizer, "scheduler": lr_scheduler.StepLR(optimizer, 1)}) == []


def test_a_compiled_model_has_its_faults_under_orig_mod() -> None:
    compiled = torch.compile(_named(block=nn.Linear(2, 2)), backend="eager")
    compiled(torch.ones(1, 2))
    assert find_unpicklable(compiled) == []
    compiled._orig_mod.block.lock = threading.Lock()
    (problem,) = find_unpicklable(compiled)
    assert problem.path == "compiled._orig_mod.block.lock"


def test_a_compiled_model_with_a_backend_of_its_own_is_told_how_to_be_saved() -> None:
    plain_compile = inspect.unwrap(torch.compile)  # Lightning wraps it and keeps the backend in an attribute
    compiled = plain_compile(nn.Linear(2, 2), backend=lambda graph, inputs: graph)
    (problem,) = find_unpicklable(compiled)
    assert "lambda" in problem.reason and "_orig_mod.state_dict()" in problem.fix


def test_data_parallel_has_its_faults_under_module() -> None:
    wrapped = nn.DataParallel(nn.Linear(2, 2))
    wrapped.module.lock = threading.Lock()
    assert [problem.path for problem in find_unpicklable(wrapped)] == ["wrapped.module.lock"]


def test_distributed_data_parallel_says_to_save_the_inner_state_dict() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        wrapped.module.fn = lambda: 1
        with_group = find_unpicklable(wrapped)
    finally:
        dist.destroy_process_group()
    for problems in (with_group, find_unpicklable(wrapped)):
        assert [problem.path for problem in problems] == ["wrapped", "wrapped.module.fn"]
        assert "process group" in problems[0].reason and "model.module.state_dict()" in problems[0].fix


def test_a_fully_sharded_model_is_one_finding_with_the_ways_to_save_it() -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        fully_shard(sharded)
        (problem,) = find_unpicklable(sharded)
    finally:
        dist.destroy_process_group()
    assert problem.path == "sharded" and "CheckpointManager" in problem.fix and "full_state_dict" in problem.fix


def test_a_getstate_that_passes_on_a_deep_model_loses_nothing() -> None:
    whole = Passes()
    whole.net = _named(outer=_named(inner=_named(last=nn.Linear(2, 2))))
    assert torch.equal(pickle.loads(pickle.dumps(whole)).net.outer.inner.last.weight, whole.net.outer.inner.last.weight)
    assert find_unpicklable(whole) == []


@pytest.mark.parametrize("make", [Forgets, StateNone])
def test_a_class_that_saves_no_state_loses_its_attributes(make: Any) -> None:
    (problem,) = find_unpicklable({"x": make()}, name="state")
    assert (problem.path, problem.severity) == ('state["x"]', "loss")
    assert "counts" in problem.reason and "TransientState" in problem.fix


def test_the_recipe_that_returns_the_class_alone_loses_the_weights() -> None:
    model = ForgetsWeights()
    assert not torch.equal(pickle.loads(pickle.dumps(model)).weight, model.weight)
    (problem,) = find_unpicklable(model)
    assert problem.severity == "loss"
    assert "2 parameters and buffers" in problem.reason and "__reduce__" in problem.reason


def test_a_reducer_that_carries_a_state_dict_keeps_the_weights() -> None:
    model = KeepsWeights()
    assert torch.equal(pickle.loads(pickle.dumps(model)).weight, model.weight)
    assert find_unpicklable(model) == []


def test_what_weights_only_refuses_is_listed_by_path_with_pickle_errors_inside() -> None:
    import argparse
    import pathlib

    import numpy as np

    ckpt = {
        "w": torch.ones(2),
        "args": argparse.Namespace(lr=0.1, fn=lambda: 1),
        "best": np.float64(0.5),
        "nested": [{"out": pathlib.Path("x")}],
    }
    problems = {p.path: p for p in find_unpicklable(ckpt, weights_only=True, check_loading=False)}
    assert set(problems) == {'ckpt["args"]', 'ckpt["args"].fn', 'ckpt["best"]', 'ckpt["nested"][0]["out"]'}
    assert "float(" in problems['ckpt["best"]'].fix and "str(" in problems['ckpt["nested"][0]["out"]'].fix
    assert "argparse.Namespace" in problems['ckpt["args"]'].reason
    assert [p.path for p in find_unpicklable(ckpt)] == ['ckpt["args"].fn']
