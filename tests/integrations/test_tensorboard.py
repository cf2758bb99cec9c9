"""TensorBoardLog: what it writes, as TensorBoard itself reads it."""

from __future__ import annotations

import math
import multiprocessing
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import tensorboardX
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import nanscan
from nanscan.errors import NonFiniteWarning
from nanscan.integrations.tensorboard import TensorBoardLog
from tests.guarded import NAN

pytestmark = pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")


def events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder)).Reload()


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(folder).Scalars(tag)]


def texts(folder: Path) -> list[str]:
    found = events(folder)
    raw = [make_ndarray(event.tensor_proto).item() for event in found.Tensors("nanscan/report/text_summary")]
    return [text.decode() for text in raw]


def setup(log: Any, **options: Any) -> tuple[nn.Module, nanscan.GuardedOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, nanscan.wrap(inner, model, clip_norm=0.01, log=log, **options)


def train(model: nn.Module, optimizer: nanscan.GuardedOptimizer, factors: list[float]) -> None:
    for factor in factors:
        (model(torch.ones(2, 3)) * factor).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["path", "torch", "tensorboardX"])
def test_tensorboard_reads_back_what_the_reports_say(kind: str, tmp_path: Path) -> None:
    writers: dict[str, Any] = {"path": lambda p: p, "torch": SummaryWriter, "tensorboardX": tensorboardX.SummaryWriter}
    log = TensorBoardLog(writers[kind](str(tmp_path)), layers_every=2)
    model, optimizer = setup(log)
    train(model, optimizer, [1.0, NAN, 1.0, 1.0])
    log.close()
    reports = list(optimizer.history)
    norms = scalars(tmp_path, "nanscan/norm")
    assert [step for step, _ in norms] == [0, 1, 2, 3]
    assert math.isnan(norms[1][1])
    for step in (0, 2, 3):
        assert norms[step][1] == pytest.approx(reports[step].norm)
    factors = [value for _, value in scalars(tmp_path, "nanscan/clip_factor")]
    assert factors == pytest.approx([report.clip_factor for report in reports])
    assert scalars(tmp_path, "nanscan/skipped_steps") == [(0, 0), (1, 1), (2, 1), (3, 1)]
    assert scalars(tmp_path, "grad_norm/2.bias") == [
        (report.step, pytest.approx(report.tensors[3].norm)) for report in reports if report.step % 2 == 0
    ]
    (text,) = texts(tmp_path)
    assert text.startswith("**step 1: skip**") and "grad of '0.weight' has 12 NaN" in text


def test_fewer_scalars_but_every_bad_step_and_norms_by_module(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path, every=3, layers=1, layers_every=4)
    model, optimizer = setup(log)
    train(model, optimizer, [1.0, 1.0, 1.0, 1.0, 1.0, NAN])
    log.close()
    assert [step for step, _ in scalars(tmp_path, "nanscan/norm")] == [0, 3, 5]
    rows = optimizer.history[4].tensors
    assert scalars(tmp_path, "grad_norm/2")[-1] == (4, pytest.approx(math.hypot(rows[2].norm, rows[3].norm)))
    none = tmp_path / "none"
    quiet = TensorBoardLog(none, layers=False)
    train(*setup(quiet), [1.0])
    quiet.close()
    assert not [tag for tag in events(none).Tags()["scalars"] if tag.startswith("grad_norm")]


def test_text_names_the_origin_and_the_dropped_microbatch_and_scalars_the_loss_scale(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Softmax(1))
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, log=log, find_origin=True)
    scaler = nanscan.GradScaler("cpu", init_scale=8.0)
    for inputs in (torch.full((2, 3), math.inf), torch.ones(2, 3)):
        scaler.scale(model(inputs)[:, 0].sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    for inputs in (torch.ones(2, 3), torch.full((2, 3), math.inf)):
        model(inputs)[:, 0].sum().backward()
        optimizer.check_microbatch(drop=True)
    optimizer.step()
    log.close()
    assert "Inf came in with input 'input' in '0'" in texts(tmp_path)[0] and "hint: " in texts(tmp_path)[0]
    assert "dropped micro-batches 1 of 2" in texts(tmp_path)[1]
    assert scalars(tmp_path, "nanscan/loss_scale")[0] == (0, 8.0)
    assert scalars(tmp_path, "nanscan/dropped_microbatches") == [(2, 1)]


def test_pickled_optimizer_writes_on_in_the_same_folder_and_is_all_picklable(tmp_path: Path) -> None:
    model, optimizer = setup(TensorBoardLog(SummaryWriter(str(tmp_path))))
    train(model, optimizer, [NAN])
    assert nanscan.find_unpicklable(optimizer) == []
    twin_model, twin = pickle.loads(pickle.dumps((model, optimizer)))
    train(twin_model, twin, [NAN, 1.0])
    twin._record.listener.close()
    assert [step for step, _ in scalars(tmp_path, "nanscan/norm")] == [0, 1, 2]
    assert scalars(tmp_path, "nanscan/skipped_steps")[-1] == (2, 2)


def _train_in_child(optimizer: nanscan.GuardedOptimizer, model: nn.Module) -> None:
    train(model, optimizer, [1.0])
    optimizer._record.listener.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_opens_a_writer_of_its_own(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path)
    model, optimizer = setup(log)
    train(model, optimizer, [1.0])
    child = multiprocessing.get_context("fork").Process(target=_train_in_child, args=(optimizer, model))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    log.close()
    assert len(list(tmp_path.iterdir())) == 2
    steps = [step for step, _ in scalars(tmp_path, "nanscan/norm")]
    assert sorted(steps) == [0, 1]  # TensorBoard reads files by name: within one second, by the number of the process


class Failing(SummaryWriter):
    def add_scalar(self, *args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device")


def test_writer_that_fails_costs_one_warning_and_no_step(tmp_path: Path) -> None:
    model, optimizer = setup(TensorBoardLog(Failing(str(tmp_path))))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train(model, optimizer, [1.0, 1.0])
    (said,) = [w for w in seen if w.category is NonFiniteWarning]
    assert "can't be written (OSError: no space left on device); training goes on" in str(said.message)
    assert said.filename == __file__
    assert [report.skipped for report in optimizer.history] == [False, False]


def test_several_logs_each_get_every_report_also_when_one_raises(tmp_path: Path) -> None:
    seen: list[int] = []

    def raising(report: nanscan.StepReport) -> None:
        raise ValueError("not today")

    model, optimizer = setup([raising, lambda report: seen.append(report.step), str(tmp_path / "run.jsonl")])
    with pytest.raises(ValueError, match="not today"):
        train(model, optimizer, [1.0])
    assert seen == [0] and len((tmp_path / "run.jsonl").read_text().splitlines()) == 1
    assert optimizer.last_report is not None and len(optimizer.history) == 1
    with pytest.raises(TypeError, match="a path or a function of the StepReport, got 3; give several as a list"):
        setup([tmp_path / "other.jsonl", 3])
    assert not (tmp_path / "other.jsonl").exists()


@pytest.mark.parametrize("option", ["every", "layers_every", "layers"])
def test_numbers_below_one_are_refused(option: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{option} must be at least 1, got -1"):
        TensorBoardLog(tmp_path, **{option: -1})
    with pytest.raises(TypeError, match=f"{option} must be a whole number of at least 1, got 2.5"):
        TensorBoardLog(tmp_path, **{option: 2.5})


@pytest.mark.parametrize(("writer", "said"), [(3, "int"), (SummaryWriter, "the class SummaryWriter")])
def test_what_is_no_writer_is_refused(writer: Any, said: str) -> None:
    with pytest.raises(TypeError, match=rf"writer must be a SummaryWriter \(.*\) or the path of a folder, got {said}"):
        TensorBoardLog(writer)


def test_an_object_with_add_scalar_and_add_text_alone_is_enough() -> None:
    class Least:
        def __init__(self) -> None:
            self.tags: list[str] = []

        def add_scalar(self, tag: str, value: float, step: int, walltime: float | None = None) -> None:
            self.tags.append(tag)

        def add_text(self, tag: str, text: str, step: int) -> None:
            self.tags.append(tag)

    writer = Least()
    log = TensorBoardLog(writer)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train(*setup(log), [NAN])
    log.close()
    assert "nanscan/norm" in writer.tags and writer.tags[-1] == "nanscan/report"
    assert ["TensorBoard" in str(w.message) for w in seen] == [False]  # the skip is said, and nothing else
