"""Watching over many steps: what is kept, what is let go, which steps count, and models that are wrapped."""

from __future__ import annotations

import gc
import tracemalloc
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import nanscan
from nanscan.engine import active_engine
from nanscan.ranges import on_cpu, on_device
from tests.conftest import load_engine

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_the_ring_keeps_the_last_steps_only() -> None:
    model = net()
    with nanscan.watch(model, history=5) as ranges:
        for _ in range(12):
            model(X).sum().backward()
    assert sorted({row.step for row in ranges.rows()}) == [7, 8, 9, 10, 11]
    assert len(ranges.rows("0", "gradient")) == 5 and {row.step for row in ranges.rows(last=2)} == {10, 11}
    assert ranges.rows(last=0) == [] and len(ranges.rows(last=99)) == len(ranges.rows())


def test_every_measures_the_steps_that_it_divides() -> None:
    model, carries_something = net(), []

    def forward(x: Tensor) -> Tensor:
        carries_something.append(bool(model[0]._forward_hooks) or model[0]._compiled_call_impl is not None)
        return model[2](model[1](model[0](x)))  # type: ignore[no-any-return]

    model.forward = forward  # type: ignore[method-assign]
    with nanscan.watch(model, every=3) as ranges:
        for _ in range(7):
            model(X).sum().backward()
            assert carries_something.pop() == (ranges.steps % 3 == 1)  # no hooks, no cost
    assert [row.step for row in ranges.rows("2", "gradient")] == [0, 3, 6] and ranges.steps == 7


def test_each_forward_of_an_accumulation_is_a_step_whose_gradients_find_it() -> None:
    model = net()
    with nanscan.watch(model) as ranges:
        losses = [model(X * scale).sum() * 10**scale for scale in (1, 2, 3)]
        sum(losses).backward()  # type: ignore[union-attr]
    rows = ranges.rows("2", "gradient")
    assert [(row.step, row.max) for row in rows] == [(0, 10.0), (1, 100.0), (2, 1000.0)]


def test_a_second_backward_over_the_same_graph_joins_the_same_row() -> None:
    model = net()
    with nanscan.watch(model) as ranges:
        loss = model(X).sum()
        loss.backward(retain_graph=True)
        (loss * 5).backward()
    (row,) = ranges.rows("2", "gradient")
    assert (row.min, row.max) == (1.0, 5.0)


def test_tensors_and_graphs_do_not_outlive_the_step() -> None:
    kept: list[weakref.ref[Any]] = []

    class Token:
        """Dies with the graph."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.token = Token()
            kept.append(weakref.ref(ctx.token))
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    class Doubling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = Double.apply(x)
            return result

    model = nn.Sequential(nn.Linear(4, 4), Doubling())
    with nanscan.watch(model) as ranges:
        loss = model(X).sum()
        gc.collect()
        assert kept[0]() is not None
        del loss
        gc.collect()
        assert kept[0]() is None and len(ranges.rows()) == 2


def test_a_graph_that_is_kept_is_the_users_own() -> None:
    model = net()
    with nanscan.watch(model):
        parameter = model[0].weight
        (gradient,) = torch.autograd.grad(model(X).square().sum(), parameter, create_graph=True)
        gradient.square().sum().backward()
    assert parameter.grad is not None


def test_memory_does_not_grow_over_200_steps() -> None:
    model = net()
    with nanscan.watch(model, history=10) as ranges:

        def steps(count: int) -> None:
            for _ in range(count):
                model(X).square().sum().backward()
                model.zero_grad()

        steps(60)  # the ring, and the history of each row, are full
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            steps(200)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert ranges.steps == 260 and ranges.first_bad is None
    assert grown < 40_000  # a step that was kept whole would be 3 kB, 200 of them 600 kB


def test_misuse_is_refused_with_what_to_give() -> None:
    with pytest.raises(TypeError, match=r"watch needs an nn\.Module, got a list"):
        nanscan.watch([net()])  # type: ignore[arg-type]
    for name, value in (("every", 0), ("history", -1), ("sample", 0), ("every", 1.5), ("every", True)):
        with pytest.raises(ValueError, match=f"{name}=.*at least 1"):
            nanscan.watch(net(), **{name: value})  # type: ignore[arg-type]
    with nanscan.watch(net()) as ranges:
        with pytest.raises(ValueError, match="'activation' or 'gradient'"):
            ranges.rows(kind="weights")
        with pytest.raises(ValueError, match="last=-1"):
            ranges.rows(last=-1)


def test_text_for_people() -> None:
    model = net()
    with nanscan.watch(model) as ranges:
        model(X).sum().backward()
        assert ranges.describe() == "nothing left its range in 1 steps"
        lines = ranges.table().splitlines()
        assert lines[0].split()[:4] == ["step", "module", "kind", "min"] and len(lines) == 7
        model(X * float("nan"))
        assert "step 1, activation of '0': non-finite: 24 NaN" in ranges.describe()
    assert repr(ranges) == "<nanscan.Watch, closed: 2 steps>"


@pytest.mark.parametrize("watch_the_wrapper", (False, True))
def test_under_distributed_data_parallel_names_and_steps_are_the_models(tmp_path: Any, watch_the_wrapper: bool) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = net()
        parallel = nn.parallel.DistributedDataParallel(model)
        with nanscan.watch(parallel if watch_the_wrapper else model) as ranges:
            for _ in range(2):
                parallel(X).sum().backward()
    finally:
        del parallel  # after its group it would wait, with Python's lock, for a thread of the group that wants the lock
        dist.destroy_process_group()
    assert ranges.steps == 2 and {row.module for row in ranges.rows()} == {"0", "1", "2"}


def test_a_compiled_model_is_said_to_run_eagerly_where_it_is_measured() -> None:
    model = net()
    compiled, calls = counted(model)
    with pytest.warns(nanscan.NonFiniteWarning, match="compiled code has no modules.*one step in 2"):
        ranges = nanscan.watch(compiled, every=2)
    with ranges:
        outputs = [compiled(X) for _ in range(4)]
        assert len(calls) == 2  # steps 1 and 3 ran the compiled code
        for output in outputs:
            output.sum().backward()
    assert [row.step for row in ranges.rows("2", "activation")] == [0, 2]
    assert [row.step for row in ranges.rows("0", "gradient")] == [0, 2]
    compiled(X)
    assert len(calls) == 3


def test_a_model_compiled_while_it_is_watched_runs_compiled_and_says_that_nothing_is_seen() -> None:
    model = net()
    with nanscan.watch(model) as ranges:
        compiled, calls = counted(model)
        with pytest.warns(nanscan.NonFiniteWarning, match="none of its modules was seen"):
            compiled(X).sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it is said once
            compiled(X).sum().backward()
    assert len(calls) == 2 and {row.module for row in ranges.rows()} <= {"Sequential"}


def test_a_model_compiled_in_place_says_at_once_that_nothing_is_seen() -> None:
    model = net()
    model.compile(backend="eager")
    with pytest.warns(nanscan.NonFiniteWarning, match="none of its modules was seen"):
        nanscan.watch(model).close()


def counted(model: nn.Module) -> tuple[Any, list[int]]:
    """The model compiled without a graph break, and a list that grows with each run of the compiled code."""
    calls: list[int] = []

    def backend(graph: Any, inputs: list[Tensor]) -> Any:
        def run(*args: Any) -> Any:
            calls.append(1)
            return graph.forward(*args)

        return run

    torch._dynamo.reset()
    return torch.compile(model, backend=backend, fullgraph=True), calls


def test_numbers_on_a_device_are_fetched_late_and_judged_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cpu, "measure", lambda values, sample: on_device.launch(values))
    monkeypatch.setattr(active_engine(), "range_meter", lambda take_other: None)
    arrived: list[bool] = [False]
    monkeypatch.setattr(on_device.Transfer, "ready", lambda self: arrived[0])
    model = net()
    with nanscan.watch(model, history=3) as ranges:
        for scale in (1.0, float("nan"), 1.0):
            model(X * scale).sum().backward()
        assert ranges._first_bad is None  # nothing has waited so far
        model(X).sum().backward()  # step 0 would be lost: this one waits
        assert ranges._first_bad is not None and ranges._first_bad.step == 1
    assert [row.step for row in ranges.rows("0", "activation")] == [1, 2, 3]


def test_a_step_that_is_run_once_more_for_its_origin_or_by_preflight_is_no_step_of_the_watch() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, find_origin=True)
    with nanscan.watch(model) as ranges, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(4):
            model(X * float("nan") if step == 1 else X).sum().backward()
            optimizer.step()
        assert optimizer.history[1].origin is not None and ranges.steps == 4
        nanscan.find_origin(lambda: model(X * float("nan")).sum().backward(), model)
        nanscan.preflight(model, optimizer, (X, torch.ones(3, 2)), nn.MSELoss())
    assert ranges.steps == 4 and ranges.first_bad is not None and ranges.first_bad.step == 1


def run_of_six(monkeypatch: pytest.MonkeyPatch | None) -> tuple[list[Any], Any]:
    """All rows of a net with a shared module, nested outputs and a frozen part, and its first bad row."""
    if monkeypatch is not None:
        monkeypatch.setattr(active_engine(), "range_meter", lambda take_other: None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), shared := nn.Linear(8, 8), nn.Tanh(), shared, nn.Linear(8, 4))
    model[0].requires_grad_(False)
    with nanscan.watch(model, every=2) as ranges:
        for step in range(12):
            out = model(torch.randn(16, 8) * (1e6 if step == 10 else 1.0))
            out.sum().backward(retain_graph=True)
            if step == 4:
                out.square().sum().backward()  # a second backward joins the same rows
        return ranges.rows(), ranges.first_bad


def test_hooks_of_the_engine_and_those_in_python_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    load_engine("native")
    rows, bad = run_of_six(None)
    assert (rows, bad) == run_of_six(monkeypatch) and bad is not None and len(rows) == 6 * 8


def test_reading_rows_in_the_middle_of_a_step_changes_nothing() -> None:
    def rows(read: bool) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        ranges = nanscan.watch(model)
        for step in range(12):
            out = model(torch.randn(16, 8) * (1e3 if step == 10 else 1.0))
            if read:
                assert len(ranges.rows(last=1)) == 3  # no gradient yet
            out.sum().backward()
        return ranges.rows(), ranges.first_bad

    assert rows(True) == rows(False)
