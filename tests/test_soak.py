"""Ten thousand guarded steps, a bad one every 97th: nothing grows, nothing is miscounted."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import nanscan

STEPS = 10_000
EVERY = 97
WARM_UP = STEPS - 82 * EVERY  # the history is full by then, and holds as many bad steps as at the end
PAGE = 4096
ROOM = 1 << 20  # bytes of resident memory that allocators may still take: 7,954 leaks of 132 bytes would be more

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc"),
]


@dataclass(frozen=True)
class Held:
    """What the process holds at one moment."""

    resident: int  # bytes
    objects: int  # tracked by the garbage collector
    blocks: int  # of Python's own allocator
    references: tuple[int, ...]

    @classmethod
    def now(cls, *watched: object) -> Held:
        gc.collect()
        objects = len(gc.get_objects())  # a list of megabytes that the allocator keeps: so look at memory after it
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
        return cls(resident, objects, sys.getallocatedblocks(), tuple(sys.getrefcount(thing) for thing in watched))


class Run:
    """A small classifier whose rows are standardised: a constant row is 0/0, a NaN that training meets by itself."""

    def __init__(self, **settings: object) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        inner = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.optimizer = nanscan.wrap(inner, self.model, clip_norm=1.0, **settings)
        self.good = torch.randn(8, 16)
        self.bad = self.good.clone()
        self.bad[3] = 7.0
        self.labels = torch.arange(8) % 4

    def step(self, index: int) -> bool:
        rows = self.bad if index % EVERY == EVERY - 1 else self.good
        rows = (rows - rows.mean(dim=1, keepdim=True)) / rows.std(dim=1, keepdim=True)
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(rows), self.labels).backward()
        self.optimizer.step()
        return self.optimizer.step_was_skipped

    def watched(self) -> tuple[object, ...]:
        first = next(self.model.parameters())
        return first, self.model, self.optimizer, self.optimizer.optimizer, self.optimizer.param_groups, type(first)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """No warnings, of which pytest would keep every one; one thread: the tensors are tiny, threads only add noise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)


def _soak(run: Run) -> tuple[list[int], Held, Held]:
    """Steps that were skipped, and what was held after the warm-up and at the end."""
    skipped = bytearray(STEPS)  # taken before anything is measured
    for index in range(WARM_UP):
        skipped[index] = run.step(index)
    before = Held.now(*run.watched())
    for index in range(WARM_UP, STEPS):
        skipped[index] = run.step(index)
    after = Held.now(*run.watched())
    return [index for index, flag in enumerate(skipped) if flag], before, after


def _assert_nothing_grew(before: Held, after: Held) -> None:
    assert after.resident - before.resident < ROOM
    assert after.references == before.references
    assert after.objects - before.objects < 50  # one object lost per skip would be 82, per step 7,954
    assert after.blocks - before.blocks < 400  # floats come and go; a skip's report lost each time would be over 1,000


def test_ten_thousand_steps_count_each_bad_step_and_grow_nothing() -> None:
    run = Run()
    skipped, before, after = _soak(run)
    expected = list(range(EVERY - 1, STEPS, EVERY))
    assert skipped == expected
    assert run.optimizer.skipped_steps == len(expected) == 103
    assert run.optimizer.first_skipped_step == EVERY - 1
    assert run.optimizer.consecutive_skips == 0
    assert all(bool(torch.isfinite(p).all()) for p in run.model.parameters())
    state = run.optimizer.state[next(run.model.parameters())]
    assert int(state["step"]) == STEPS - len(expected)
    assert len(run.optimizer.history) == 1024
    _assert_nothing_grew(before, after)


def test_a_growing_run_is_noticed() -> None:
    """The check above can fail: a list that keeps every report, and a page for each, is found."""
    run = Run()
    for index in range(200):
        run.step(index)
    before = Held.now(*run.watched())
    kept = []
    for index in range(400):
        run.step(index)
        kept.append((run.optimizer.last_report, bytearray(PAGE)))
    after = Held.now(*run.watched())
    assert len(kept) == 400
    with pytest.raises(AssertionError):
        _assert_nothing_grew(before, after)


def test_a_log_file_has_one_line_per_step_and_costs_no_memory(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    run = Run(log=log)
    for index in range(WARM_UP):
        run.step(index)
    before = Held.now(*run.watched())
    for index in range(WARM_UP, WARM_UP + 20 * EVERY):
        run.step(index)
    _assert_nothing_grew(before, Held.now(*run.watched()))
    assert len(log.read_text().splitlines()) == WARM_UP + 20 * EVERY
