"""docs/numbers.md has every field of every report, log line and JSON document, and none that is not there."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import nanscan
from nanscan.bench.scan_rows import ScanRow
from nanscan.bench.step_rows import ClippedRow, StepRow
from nanscan.cli import main
from nanscan.demo.cost import Cost
from nanscan.demo.run import DemoResult, RunResult
from nanscan.engine.info import EngineInfo
from nanscan.files.scan import TensorRow
from nanscan.log import logs_of
from nanscan.origin.record import TensorRange
from nanscan.recovery.record import Rollback

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "numbers.md").read_text()


def section(heading: str) -> str:
    """The text below a heading, up to the next one."""
    found = re.search(rf"^### {re.escape(heading)}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, heading
    return found.group(1)


def documented(heading: str) -> set[str]:
    """The names in the first column of the table below a heading."""
    cells = re.findall(r"^\| ([^|]*) \|", section(heading), re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def fields(*classes: Any) -> set[str]:
    return {item.name for one in classes for item in dataclasses.fields(one)}


REPORT, STEP = fields(nanscan.Report), fields(nanscan.StepReport)
TABLES = {
    "A tensor": fields(nanscan.TensorReport),
    "A scan": REPORT,
    "A step": STEP - REPORT,
    "A micro-batch": fields(nanscan.MicrobatchReport) - REPORT,
    "A spike": fields(nanscan.Spike),
    "An origin": fields(nanscan.Origin),
    "A tensor of an origin": fields(TensorRange),
    "A rollback": fields(Rollback),
    "A row of watch": fields(nanscan.OutOfRange),
    "A problem of a batch": fields(nanscan.BatchProblem),
    "A problem of pickling": {*nanscan.PickleProblem("", "", "", "").to_dict()},
    "A finding of preflight": fields(nanscan.Finding),
    "A row of nanscan scan": {*TensorRow("", (), "", 0, 0, None, 0.0, 0.0).to_dict()},
    "The engine": fields(EngineInfo),
    "nanscan demo": fields(DemoResult) | {"report"},
    "A run of the demo": fields(RunResult),
    "The cost in the demo": fields(Cost),
    "A row of bench": fields(ScanRow, StepRow, ClippedRow) - {"timings"} | {"goal", "goals", "verdict", "verdicts"},
}


@pytest.mark.parametrize("heading, names", TABLES.items(), ids=TABLES)
def test_the_table_has_every_field_and_no_other(heading: str, names: set[str]) -> None:
    assert documented(heading) == names


def test_the_counters_are_the_optimizers() -> None:
    guarded = nanscan.wrap(torch.optim.SGD([torch.ones(1, requires_grad=True)]))
    names = documented("The optimizer")
    assert len(names) == 6 and all(hasattr(guarded, name) for name in names)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a run with a skip, a rollback, ranges, checkpoints taken and refused, a preflight and an end."""
    folder = tmp_path_factory.mktemp("log")
    model = torch.nn.Linear(2, 1)
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters()), model, log=folder / "run.jsonl")
    recovery = nanscan.Recovery(model, optimizer, patience=1)
    manager = nanscan.CheckpointManager(folder / "kept", background=False)
    with warnings.catch_warnings(), nanscan.watch(model, log=folder / "run.jsonl"):
        warnings.simplefilter("ignore")
        for value in (1.0, float("nan"), 2.0):
            optimizer.zero_grad()
            model(torch.full((1, 2), value)).sum().backward()
            optimizer.step()
            recovery.step()
            manager.save(optimizer.last_report.step, model=model, optimizer=optimizer)
    torch.nn.init.constant_(model.weight, float("nan"))
    with pytest.raises(nanscan.NonFiniteError):
        manager.save(9, model=model, optimizer=optimizer)
    nanscan.preflight(model, optimizer)
    logs_of(optimizer)[0].end()
    return folder / "run.jsonl"


def lines(log: Path, kind: str | None = None) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, log.open()) if line.get("kind") == kind]


def keys(found: Iterable[dict[str, Any]]) -> set[str]:
    return {key for one in found for key in one}


def test_every_key_of_a_step_line_is_there(log: Path) -> None:
    assert keys(lines(log)) == (STEP - {"tensors"}) | documented("A line of the log")
    assert keys(line["run"] for line in lines(log) if "run" in line) == documented("The run")
    assert set(re.findall(r"`(\w+)`", re.findall(r"\| `engine` \|(.*)", section("The run"))[0])) >= keys(
        line["run"]["engine"] for line in lines(log) if "run" in line
    )


def kinds_written() -> set[str]:
    """Every kind of line that a part of the package can write."""
    sources = "".join(path.read_text() for path in Path(nanscan.__file__).parent.rglob("*.py"))
    return set(re.findall(r"\.note\(\"(\w+)\"", sources))


def test_every_kind_of_line_and_its_keys_are_there(log: Path) -> None:
    told = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section("A line with a kind"), re.MULTILINE))
    kinds = {line["kind"] for line in map(json.loads, log.open()) if "kind" in line}
    assert kinds == told.keys() - {"kind"} == kinds_written()
    elsewhere = {"rollback": fields(Rollback), "out_of_range": fields(nanscan.OutOfRange)}
    for kind in kinds:
        own = keys(lines(log, kind)) - {"kind", "time", "run_id"} - elsewhere.get(kind, set())
        assert own <= set(re.findall(r"`(\w+)`", told[kind])), kind


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main([*arguments, "--json"])
    return dict(json.loads(capsys.readouterr().out))


def test_every_key_of_the_command_lines_documents_is_there(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "last.pt")
    scanned = document(capsys, "scan", "--all", str(tmp_path / "last.pt"))
    assert scanned.keys() == documented("nanscan scan")
    assert scanned["files"][0].keys() == documented("A file of nanscan scan")
    assert document(capsys, "pickle", str(tmp_path / "last.pt")).keys() == documented("nanscan pickle")
    assert document(capsys, "report", str(log)).keys() == documented("nanscan report")
    assert document(capsys, "env").keys() == documented("nanscan env")


def test_a_name_that_is_not_there_would_be_noticed() -> None:
    assert "norm" in documented("A tensor") and "size" not in documented("A tensor")
    assert documented("nanscan bench") == {"machine", "seconds", "scan", "step", "clipped"}
