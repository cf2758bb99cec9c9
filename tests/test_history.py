"""The ring of reports, the counters, the repeat offender, and the log of JSON lines."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import sys
import threading

import pytest
import torch

import nanscan
from nanscan import history as history_module
from nanscan.engine.result import Row, total
from nanscan.history import Healthy, History, Record, repeat_offender
from nanscan.log import JsonLog
from nanscan.report import Label, StepReport
from tests.guarded import NAN, make_params, set_grads

pytestmark = pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")
LABELS = [Label((f"p{i}",), (2,), "float32", "cpu", "grad") for i in range(100)]


def healthy(step, rows=100):
    scan = total([Row(i, (), 1.0, 1.0, 0, 0, -1) for i in range(rows)], (), 2 * rows)
    return Healthy(scan, LABELS[:rows], step, 0.0, 1.0)


def bad(step):
    scan = total([Row(i, (), 1.0, 1.0, int(i == 3), 0, 0 if i == 3 else -1) for i in range(100)], (), 200)
    return StepReport.from_scan(scan, LABELS, step=step, skipped=True, action="skip")


def filled(size, steps):
    history = History(size)
    for step in range(steps):
        history.append(healthy(step), 100)
    return history


# ---- the ring --------------------------------------------------------------------------------------------------------


def test_ring_keeps_the_last_ones_in_order():
    history = filled(3, 5)
    assert [r.step for r in history] == [2, 3, 4]
    assert [r.step for r in reversed(history)] == [4, 3, 2]
    assert history[0].step == 2
    assert history[-1].step == 4
    assert [r.step for r in history[1:]] == [3, 4]
    assert len(history) == 3
    assert all(isinstance(r, StepReport) for r in history)
    with pytest.raises(IndexError, match=r"history holds 3 reports, there is no \[3\]"):
        _ = history[3]


def test_report_of_a_healthy_step_is_made_once():
    history = filled(3, 3)
    assert history[1] is history[1]
    assert (history[1].clip_factor, history[1].action, history[1].skipped) == (1.0, "step", False)


def test_tables_of_the_oldest_steps_are_dropped_beyond_the_limit_but_totals_and_bad_rows_stay(monkeypatch):
    monkeypatch.setattr(history_module, "TABLE_BYTES", 100 * history_module.ROW_BYTES * 3)
    history = History(10)
    for step in range(8):
        history.append(bad(step) if step == 2 else healthy(step), 100)
    assert [len(r.tensors) for r in history] == [0, 0, 1, 0, 0, 100, 100, 100]
    assert [r.norm for r in history if r.finite] == [10.0] * 7
    assert [row.name for row in history[2].bad] == ["p3"]
    assert history[2].tensors == history[2].bad
    for step in range(8, 30):
        history.append(healthy(step), 100)
    assert [r.step for r in history] == list(range(20, 30))
    assert sum(len(r.tensors) > 0 for r in history) == 3


def test_a_held_report_keeps_its_table_when_the_ring_drops_its_own(monkeypatch):
    monkeypatch.setattr(history_module, "TABLE_BYTES", 100 * history_module.ROW_BYTES)
    history = History(10)
    history.append(healthy(0), 100)
    held = history[0]
    history.append(healthy(1), 100)
    assert len(history[0].tensors) == 0
    assert len(held.tensors) == 100


def test_memory_of_a_full_ring_is_bounded():
    history = History(1024)
    scan = total([Row(i, (), 1.0, 1.0, 0, 0, -1) for i in range(100)], (), 200)
    labels = LABELS * 100  # as if there were 10,000 tensors
    for step in range(1024):
        history.append(Healthy(scan, labels, step, 0.0, 1.0), len(labels))
    with_table = sum(isinstance(e, Healthy) and len(e.labels) > 0 for e in (*history._slim, *history._full))
    assert with_table == history_module.TABLE_BYTES // (10_000 * history_module.ROW_BYTES)
    assert len(history) == 1024


@pytest.mark.parametrize("size, kept", [(2, [3, 4]), (0, []), (50, [0, 1, 2, 3, 4])])
def test_resizing_keeps_the_newest(size, kept):
    history = filled(5, 5).resized(size)
    assert [r.step for r in history] == kept
    history.append(healthy(5), 100)
    assert [r.step for r in history] == ([*kept, 5][-size:] if size else [])


def test_pickled_ring_holds_totals_only():
    twin = pickle.loads(pickle.dumps(filled(3, 4)))
    assert [(r.step, r.norm, r.tensors) for r in twin] == [(1, 10.0, ()), (2, 10.0, ()), (3, 10.0, ())]
    assert repr(twin) == "History(3 of at most 3 reports, 0 skipped)"


# ---- counters --------------------------------------------------------------------------------------------------------


def test_counters():
    record = Record(10)
    for step, skipped in enumerate([False, True, True, False, True]):
        (record.add_skipped if skipped else record.add)(bad(step))
    assert (record.steps, record.skipped, record.consecutive, record.first_skipped) == (5, 3, 1, 1)
    assert record.skipped_last
    record.add_healthy(healthy(5), 100)
    assert (record.steps, record.consecutive, record.skipped_last) == (6, 0, False)


@pytest.mark.parametrize(
    "culprits, said",
    [
        ([], None),
        ([["a"], ["a"]], None),
        ([["a"], ["a"], ["a"]], "last 3 skipped steps: always a"),
        ([["b"], ["a", "b"], ["b", "a"], ["a"]], "last 3 skipped steps: always a"),
        ([["a"], ["b"], ["a"]], None),
        ([list("abcde")] * 3, "last 3 skipped steps: always a, b, c and 2 more"),
    ],
)
def test_repeat_offender(culprits, said):
    assert repeat_offender(culprits) == said


# ---- the log ---------------------------------------------------------------------------------------------------------


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(optimizer, params, steps, bad_at=()):
    for step in steps:
        set_grads(params, step, bad=NAN if step in bad_at else None)
        optimizer.step()


def guarded(log):
    params = make_params()
    return params, nanscan.wrap(torch.optim.SGD(params, lr=0.1), log=log, clip_norm=0.5)


@pytest.mark.parametrize("kind", [str, lambda p: p], ids=["str", "Path"])
def test_each_step_is_one_line_that_is_there_at_once(tmp_path, kind):
    path = tmp_path / "new" / "folder" / "run.jsonl"
    params, optimizer = guarded(kind(path))
    for step in range(4):
        train(optimizer, params, [step], bad_at=[2])
        assert len(lines_of(path)) == step + 1, "a reader sees the line before the next step"
    lines = lines_of(path)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [line["action"] for line in lines] == ["step", "step", "skip", "step"]
    assert [line["skipped"] for line in lines] == [False, False, True, False]
    assert lines[2]["norm"] == "NaN"
    assert lines[2]["bad"][0]["name"] == "group0.param1"
    assert all("tensors" not in line and 0 < line["clip_factor"] <= 1 for line in lines)
    assert all(0 < b["time"] - a["time"] < 60 for a, b in zip(lines, lines[1:], strict=False))
    reports = [StepReport.from_dict(line) for line in lines]
    assert reports[3].norm == optimizer.last_report.norm


def test_existing_log_is_continued(tmp_path):
    path = tmp_path / "run.jsonl"
    for _ in range(2):
        params, optimizer = guarded(path)
        train(optimizer, params, range(2))
    said = [line.get("kind", line.get("step")) for line in lines_of(path)]
    assert said == [0, 1, "end", 0, 1], "the first is over when nobody holds it any more"


def test_path_that_cannot_be_written_is_said_when_wrapping(tmp_path):
    with pytest.raises(OSError):
        guarded(tmp_path)


def test_unpickled_optimizer_opens_its_log_again(tmp_path):
    path = tmp_path / "run.jsonl"
    params, optimizer = guarded(path)
    train(optimizer, params, range(2))
    twin = pickle.loads(pickle.dumps(optimizer))
    train(twin, [p for g in twin.param_groups for p in g["params"]], range(2, 4))
    assert [line["step"] for line in lines_of(path)] == [0, 1, 2, 3]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process")
def test_forked_process_writes_whole_lines_of_its_own(tmp_path):
    path = tmp_path / "run.jsonl"
    log = JsonLog(path)
    log(bad(0))
    child = multiprocessing.get_context("fork").Process(target=lambda: [log(bad(100 + i)) for i in range(200)])
    child.start()
    for i in range(1, 200):
        log(bad(i))
    child.join()
    assert child.exitcode == 0
    assert sorted(line["step"] for line in lines_of(path)) == sorted([*range(200), *range(100, 300)])


def test_threads_do_not_mix_their_lines(tmp_path):
    path = tmp_path / "run.jsonl"
    logs = [JsonLog(path) for _ in range(4)]
    threads = [threading.Thread(target=lambda log=log: [log(bad(i)) for i in range(100)]) for log in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lines_of(path)) == 400


def test_disk_that_refuses_costs_one_warning_and_not_the_run(tmp_path, monkeypatch):
    params, optimizer = guarded(tmp_path / "run.jsonl")

    def full(fd, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("nanscan.log.os.write", full)
        with pytest.warns(nanscan.NonFiniteWarning, match="can't be written .*No space left on device") as seen:
            train(optimizer, params, range(3))
        assert len(seen) == 1
    train(optimizer, params, [3])
    assert [line["step"] for line in lines_of(tmp_path / "run.jsonl")] == [3]
    assert len(optimizer.history) == 4


def test_short_writes_are_completed(tmp_path, monkeypatch):
    log, real = JsonLog(tmp_path / "run.jsonl"), os.write
    monkeypatch.setattr("nanscan.log.os.write", lambda fd, data: real(fd, data[:7]))
    log(bad(1))
    assert [line["step"] for line in lines_of(tmp_path / "run.jsonl")] == [1]


def test_closed_log_opens_again_and_leaks_no_file(tmp_path):
    def open_files():
        return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0

    before = open_files()
    for _ in range(20):
        log = JsonLog(tmp_path / "run.jsonl")
        log(bad(0))
        log.close()
        log(bad(1))
        del log
    assert open_files() == before
    assert len([line for line in lines_of(tmp_path / "run.jsonl") if "kind" not in line]) == 40
