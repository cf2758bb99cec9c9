"""When the manager saves, what it refuses, and what it says."""

from __future__ import annotations

import functools
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nanscan
from nanscan import CheckpointError, CheckpointManager, CheckpointWarning, NonFiniteError
from nanscan.manager import schedule
from tests.guarded import bits
from tests.manager_runs import Run, steps_of

BOTH = pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])


class FakeClock:
    """The monotonic clock that the manager reads, as set in `now`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, now: float) -> None:
        self.now = now
        monkeypatch.setattr(schedule.time, "monotonic", lambda: self.now)


@BOTH
def test_every_call_saves_unless_told_otherwise(tmp_path: Path, background: bool) -> None:
    run = Run()
    with CheckpointManager(tmp_path, keep=9, background=background) as manager:
        paths = [manager.save(step, **run.parts) for step in (0, 3, 7)]
        manager.flush()
        assert steps_of(manager) == [0, 3, 7]
        assert paths == manager.checkpoints()


def test_steps_that_are_a_multiple_of_every_steps_are_saved(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=9, every_steps=4) as manager:
        returned = [manager.save(step, model=nn.Linear(1, 1)) for step in range(1, 10)]
        manager.flush()
        assert steps_of(manager) == [4, 8]
        assert [path is not None for path in returned] == [step % 4 == 0 for step in range(1, 10)]


def test_every_seconds_counts_from_the_last_save_by_the_monotonic_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock(monkeypatch, 100.0)
    with CheckpointManager(tmp_path, keep=9, every_seconds=10, background=False) as manager:
        for step, clock.now in enumerate([105.0, 110.0, 119.0, 120.5, 130.0, 131.0]):
            manager.save(step, model=nn.Linear(1, 1))
        assert steps_of(manager) == [1, 3, 5]


def test_with_steps_and_seconds_either_suffices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(monkeypatch, 0.0)
    with CheckpointManager(tmp_path, keep=9, every_seconds=10, every_steps=3, background=False) as manager:
        for step, clock.now in [(1, 1.0), (2, 11.0), (3, 12.0), (4, 13.0)]:
            manager.save(step, model=nn.Linear(1, 1))
        assert steps_of(manager) == [2, 3]


def test_force_saves_although_nothing_is_due(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every_steps=100) as manager:
        assert manager.save(7, model=nn.Linear(1, 1)) is None
        assert manager.save(7, model=nn.Linear(1, 1), force=True) == tmp_path / "step-00000007.pt"


def test_file_opens_with_torch_load_and_holds_every_part(tmp_path: Path) -> None:
    run = Run()
    run.step()
    optimizer = nanscan.wrap(run.optimizer, run.model)
    with CheckpointManager(tmp_path) as manager:
        path = manager.save(12, epoch=3, extra={"note": "x"}, **{**run.parts, "optimizer": optimizer})
    assert path is not None
    saved = torch.load(path, weights_only=True)
    assert {key: saved[key] for key in ("format", "version", "step", "epoch", "extra")} == {
        "format": "nanscan-checkpoint",
        "version": 1,
        "step": 12,
        "epoch": 3,
        "extra": {"note": "x"},
    }
    assert saved["optimizer_names"] == [["0.weight", "0.bias", "2.weight", "2.bias"]]
    assert saved["rng"].keys() == {"python", "numpy", "torch", "cuda"}
    assert {"model", "optimizer", "scheduler", "scaler", "nanscan", "guard"} <= saved.keys()
    assert "loader" not in saved


def test_model_is_saved_without_the_prefixes_of_wrappers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1] = torch.compile(model[1], backend="eager")
    wrapped = nn.DataParallel(torch.compile(model, backend="eager"))
    with CheckpointManager(tmp_path) as manager:
        path = manager.save(1, model=wrapped)
    assert path is not None
    assert list(torch.load(path, weights_only=True)["model"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_submodule_that_is_called_module_keeps_its_name(tmp_path: Path) -> None:
    model = nn.ModuleDict({"module": nn.Linear(1, 1)})
    with CheckpointManager(tmp_path) as manager:
        path = manager.save(1, model=model)
    assert path is not None
    assert list(torch.load(path, weights_only=True)["model"]) == ["module.weight", "module.bias"]


def test_objects_with_a_state_dict_in_extra_are_stored_by_it_and_numpy_numbers_as_pythons(tmp_path: Path) -> None:
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))
    extra = {"ema": average, "list": [Run().scheduler], "best": np.float64(0.5), "pair": (1, np.int32(2))}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, extra=extra)
        manager.flush()
        restored = manager.restore()
    assert restored is not None
    assert {"n_averaged", "module.weight"} <= restored.extra["ema"].keys()
    assert restored.extra["list"][0]["gamma"] == 0.9
    assert restored.extra["best"] == 0.5 and type(restored.extra["best"]) is float
    assert restored.extra["pair"] == (1, 2)


@BOTH
def test_poisoned_state_is_refused_by_name_and_older_checkpoints_stay(tmp_path: Path, background: bool) -> None:
    run = Run()
    run.step()
    manager = CheckpointManager(tmp_path, keep=1, background=background)
    manager.save(1, **run.parts)
    manager.flush()
    run.optimizer.state[run.model[0].weight]["exp_avg"][0, 1] = float("nan")
    with pytest.raises(NonFiniteError, match=r"exp_avg.*1 NaN") as caught:
        manager.save(2, **run.parts)
        manager.flush()
    assert caught.value.report is not None
    manager.close()
    assert steps_of(manager) == [1]


def test_inf_in_a_mask_is_saved_where_only_nan_is_looked_for(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    with CheckpointManager(tmp_path, background=False) as strict, pytest.raises(NonFiniteError, match="mask"):
        strict.save(1, model=model)
    with CheckpointManager(tmp_path, background=False, check_finite="nan") as manager:
        manager.save(1, model=model)
        assert steps_of(manager) == [1]


def test_what_a_scheduler_does_not_store_is_said_once_with_its_path(tmp_path: Path) -> None:
    optimizer = Run().optimizer
    schedulers = torch.optim.lr_scheduler
    inner = [schedulers.LambdaLR(optimizer, lambda epoch: 1.0), schedulers.StepLR(optimizer, 1)]
    scheduler = schedulers.SequentialLR(optimizer, inner, milestones=[1])
    with CheckpointManager(tmp_path) as manager:
        with pytest.warns(CheckpointWarning, match=r"scheduler._schedulers\[0\].lr_lambdas\[0\] is a function") as said:
            manager.save(1, scheduler=scheduler)
            manager.save(2, scheduler=scheduler)
        assert len(said) == 1
        assert said[0].filename == __file__


def test_callable_object_in_a_lambda_scheduler_is_stored_and_not_warned_about(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    class Warmup:
        def __init__(self) -> None:
            self.steps = 5

        def __call__(self, epoch: int) -> float:
            return epoch / self.steps

    optimizer = Run().optimizer
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, Warmup()))
        assert [str(item.message) for item in recwarn] == []
        with pytest.warns(CheckpointWarning, match=r"lr_lambdas\[0\]"):
            partial = functools.partial(lambda base, epoch: base**epoch, 0.5)
            manager.save(2, scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, partial))


def test_loader_without_a_position_is_said_once(tmp_path: Path) -> None:
    loader = torch.utils.data.DataLoader([1, 2, 3])
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.warns(CheckpointWarning, match=r"position of the loader is not stored.*StatefulDataLoader") as said,
    ):
        manager.save(1, loader=loader)
        manager.save(2, loader=loader)
    assert len(said) == 1


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"keep": 0}, ValueError, "keep must be at least 1, got 0"),
        ({"keep": 1.5}, TypeError, "keep must be a whole number"),
        ({"keep": True}, TypeError, "keep must be a whole number"),
        ({"every_steps": 0}, ValueError, "every_steps must be at least 1"),
        ({"every_steps": "5"}, TypeError, "every_steps must be a whole number"),
        ({"every_seconds": 0}, ValueError, "every_seconds must be a positive"),
        ({"every_seconds": float("nan")}, ValueError, "every_seconds must be a positive"),
        ({"every_seconds": "1"}, TypeError, "every_seconds must be a number"),
        ({"best": "accuracy"}, TypeError, r'best must be a pair such as \("accuracy", "max"\)'),
        ({"best": ("accuracy", "largest")}, ValueError, 'the second must be "max" or "min"'),
        ({"best": ("accuracy", "max"), "best_keep": 0}, ValueError, "best_keep must be at least 1"),
        ({"on_sigterm": "die"}, ValueError, 'on_sigterm must be "exit", "stop" or None'),
        ({"on_unpicklable": "skip"}, ValueError, 'on_unpicklable must be "raise" or "drop"'),
        ({"on_error": "ignore"}, ValueError, 'on_error must be "raise" or "warn"'),
        ({"check_finite": "inf"}, ValueError, 'check_finite must be True, False or "nan"'),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_invalid_option_is_refused(tmp_path: Path, options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        CheckpointManager(tmp_path, **options)


def test_directory_must_be_a_path_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="it is a file; give a folder"):
        CheckpointManager(tmp_path / "file")
    with pytest.raises(TypeError, match="directory must be a path, got int"):
        CheckpointManager(7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"step": -1}, ValueError, "step must be at least 0"),
        ({"step": 1.0}, TypeError, "step must be a whole number"),
        ({"step": 1, "epoch": 1.5}, TypeError, "epoch must be a whole number, got float 1.5"),
        ({"step": 1, "model": {}}, TypeError, "model must be a torch.nn.Module, got dict"),
        ({"step": 1, "optimizer": nn.Linear(1, 1)}, TypeError, "optimizer must be a torch.optim.Optimizer"),
        ({"step": 1, "scheduler": 3}, TypeError, r"scheduler must have state_dict\(\), int has not"),
        ({"step": 1, "model": nn.Linear}, TypeError, "got the class Linear"),
        ({"step": 1, "model": {"w": torch.ones(1)}}, TypeError, r"the model itself, not its state_dict\(\)"),
        ({"step": 1, "scheduler": torch.amp.GradScaler}, TypeError, "the class GradScaler has not"),
        ({"step": 1, "extra": [1]}, TypeError, "extra must be a dict, got list: name what it holds, extra="),
        ({"step": 1, "extra": {1: 2}}, TypeError, "keys of extra must be strings, got 1"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_invalid_argument_of_save_is_refused(
    tmp_path: Path, arguments: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with CheckpointManager(tmp_path) as manager, pytest.raises(kind, match=words):
        manager.save(**arguments)


@pytest.mark.parametrize("method", ["save", "restore"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": [nn.Linear(1, 1), nn.Linear(1, 1)]}, 'ModuleDict({"model_0": …, "model_1": …})'),
        ({"model": (nn.Linear(1, 1), None)}, 'ModuleDict({"model_0": …})'),
        ({"model": {"g": nn.Linear(1, 1), "d": nn.Linear(1, 1)}}, 'ModuleDict({"g": …, "d": …})'),
        ({"optimizer": [3, 4]}, "name each of the others in extra={'optimizer_1': …}"),
        ({"optimizer": {"g": 3, "d": 4}}, "name each of the others in extra={'d': …}"),
        ({"optimizer": {"state": {}, "param_groups": []}}, "give the optimizer itself, not its state_dict()"),
        ({"scheduler": [3]}, 'load it from restored.extra["scheduler_1"]'),
        ({"scaler": (3, 4)}, 'load it from restored.extra["scaler_1"]'),
    ],
)
def test_several_parts_in_one_are_refused_at_once_with_the_way_to_give_them(
    tmp_path: Path, method: str, given: dict[str, Any], words: str
) -> None:
    with CheckpointManager(tmp_path, every_steps=1000) as manager, pytest.raises(TypeError, match=re.escape(words)):
        manager.save(1, **given) if method == "save" else manager.restore(**given)


def test_two_models_and_two_optimizers_resume_as_one_module_and_extra(tmp_path: Path) -> None:
    def made() -> tuple[nn.ModuleDict, list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        both = nn.ModuleDict({"g": nn.Linear(2, 3), "d": nn.Linear(3, 1)})
        return both, [torch.optim.Adam(part.parameters()) for part in both.values()]

    def step(both: nn.ModuleDict, optimizers: list[torch.optim.Optimizer]) -> None:
        both["d"](both["g"](torch.rand(4, 2))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    both, (first, second) = made()
    step(both, [first, second])
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=both, optimizer=first, extra={"second": second})
        step(both, [first, second])
        other, (third, fourth) = made()
        restored = manager.restore(model=other, optimizer=third)
    assert restored is not None
    fourth.load_state_dict(restored.extra["second"])
    step(other, [third, fourth])
    assert bits([*other.parameters()]) == bits([*both.parameters()])


def test_numpy_integer_is_a_step(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(np.int64(5))  # type: ignore[arg-type]
        manager.flush()
        assert steps_of(manager) == [5]


def test_step_of_more_than_eight_digits_keeps_its_place(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, background=False) as manager:
        for step in (99_999_999, 100_000_000):
            manager.save(step, model=nn.Linear(1, 1))
        assert steps_of(manager) == [99_999_999, 100_000_000]
        restored = manager.restore()
    assert restored is not None and restored.step == 100_000_000


def test_closed_manager_refuses_to_save_and_may_be_closed_again(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.close()
    manager.close()
    with pytest.raises(CheckpointError, match="is closed: make a new one"):
        manager.save(1, model=nn.Linear(1, 1))


def test_relative_directory_stays_where_it_was_when_the_manager_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with CheckpointManager("run") as manager:
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert manager.save(1) == tmp_path / "run" / "step-00000001.pt"
        manager.flush()
        assert steps_of(manager) == [1]


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_what_can_not_be_saved_is_left_out_if_asked(tmp_path: Path, background: bool) -> None:
    manager = CheckpointManager(tmp_path, background=background, on_unpicklable="drop")
    with pytest.warns(CheckpointWarning, match=r'extra"\]\["lock'):
        manager.save(1, extra={"lock": threading.Lock(), "loss": 0.5})
        manager.close()
    restored = CheckpointManager(tmp_path).restore()
    assert restored is not None and restored.extra == {"loss": 0.5}


def test_numpys_numbers_in_learning_rates_schedules_and_keys_are_stored_as_pythons(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=np.float64(0.1), momentum=np.float32(0.5))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, np.array([1, 3]))
    optimizer.step()
    scheduler.step()
    with CheckpointManager(tmp_path, background=False) as manager:
        manager.save(
            1, model=model, optimizer=optimizer, scheduler=scheduler, extra={"per_class": {np.int64(3): np.float32(1)}}
        )
    resumed = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.MultiStepLR(resumed, [1, 3])
    restored = CheckpointManager(tmp_path).restore(model=model, optimizer=resumed, scheduler=schedule)
    assert restored is not None and restored.extra == {"per_class": {3: 1.0}}
    assert type(resumed.param_groups[0]["lr"]) is float and schedule.milestones == scheduler.milestones
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
