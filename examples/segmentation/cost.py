"""What a step costs with each recipe: all train at the same time, taking turns step by step in random order.

Each recipe runs in a thread of its own, and only one of them is awake; a step is timed from the end of the one before.
So none has the quieter minute, and what is timed is the recipe's own file, not a copy of its loop.
"""

import dataclasses
import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diary import Diary
from task import Task
from torch import Tensor, nn

WARM_UP = 3  # steps that are not counted

Recipe = Callable[[nn.Module, Task, Diary], None]


class Stop(Exception):
    """Ends a recipe when enough steps are timed."""


class Turns(Diary):
    """A diary that stops after each step until it is its recipe's turn again, and notes how long the step took."""

    def __init__(self, folder: Path, task: Task) -> None:
        super().__init__(folder, task)
        self.samples: list[tuple[float, float]] = []  # processor seconds of this thread, wall seconds
        self.stopped = False
        self.error: BaseException | None = None
        self._mine, self._others = threading.Semaphore(0), threading.Semaphore(0)
        self._between_epochs = False

    def step(self, loss: Tensor, skipped: bool = False, rolled_back: bool = False) -> None:
        if not self._between_epochs:  # a step after a save and a test would be charged with them
            self.samples.append((time.thread_time() - self._started[0], time.perf_counter() - self._started[1]))
        self._between_epochs = False
        self.hand_over()
        self.wait()

    @contextmanager
    def save(self):
        yield

    def end_epoch(self, model: nn.Module) -> None:
        self._between_epochs = True

    def wait(self) -> None:
        """In the recipe's thread: until its next turn."""
        self._mine.acquire()
        if self.stopped:
            raise Stop
        self._started = time.thread_time(), time.perf_counter()

    def hand_over(self) -> None:
        """In the recipe's thread: let the main one go on."""
        self._others.release()

    def turn(self) -> None:
        """In the main thread: let the recipe make one step; raises what it raised."""
        self._mine.release()
        self._others.acquire()
        if self.error is not None:
            raise self.error

    def stop(self, thread: threading.Thread) -> None:
        self.stopped = True
        self._mine.release()
        thread.join()


def measure_cost(recipes: Mapping[str, Recipe], task: Task, rounds: int, folder: Path) -> dict[str, Any]:
    """Time so many steps of each recipe, on one thread each, with the mended loss and model, so that all stay alive.

    Returns:
        For each recipe its median step in milliseconds, and median and mean of what it took more than the first recipe
        in the same round; `cpu` is the processor time of its thread, `wall` the clock's.
    """
    task = dataclasses.replace(task, mended=True, epochs=rounds)  # more epochs than will be needed
    turns = {name: Turns(folder / name, task) for name in recipes}
    threads = {
        name: threading.Thread(target=_run, args=(recipe, task, turns[name]), daemon=True)
        for name, recipe in recipes.items()
    }
    for thread in threads.values():
        thread.start()
    order, dice = list(recipes), random.Random(0)
    for _ in range(rounds + WARM_UP):
        dice.shuffle(order)
        for name in order:
            turns[name].turn()
    for name, thread in threads.items():
        turns[name].stop(thread)
    return _summary({name: turn.samples[WARM_UP:] for name, turn in turns.items()})


def _run(recipe: Recipe, task: Task, turns: Turns) -> None:
    torch.set_num_threads(1)  # holds for the thread that says it
    try:
        turns.wait()
        recipe(task.make_model(), task, turns)
    except Stop:
        pass
    except BaseException as error:  # the main thread waits for this one, and raises it
        turns.error = error
        turns.hand_over()


def _summary(samples: Mapping[str, list[tuple[float, float]]]) -> dict[str, Any]:
    base = next(iter(samples.values()))
    table: dict[str, Any] = {"steps": len(base)}
    for name, rows in samples.items():
        for clock, kind in enumerate(("cpu", "wall")):
            step = statistics.median(row[clock] for row in rows)
            more = [row[clock] - plain[clock] for row, plain in zip(rows, base, strict=True)]
            table.setdefault(name, {})[kind] = {
                "step_ms": 1e3 * step,
                "added_ms": 1e3 * statistics.median(more),
                "added_mean_ms": 1e3 * statistics.fmean(more),
            }
    return table
