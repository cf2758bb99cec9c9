"""What is sent to another process, and DataLoaders: judged by multiprocessing's reducers, with nothing started."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from nanscan import find_unpicklable
from tests.unpicklable import Box, Images, Renames, collate

_SPAWN = multiprocessing.get_context("spawn")


def _make() -> Images:
    return Images(transforms=[torch.abs, lambda x: x * 2])


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_a_loader_names_the_lambda_in_its_transforms() -> None:
    loader = DataLoader(_make(), num_workers=1)
    (problem,) = find_unpicklable(loader)
    assert problem.path == "loader.dataset.transforms[1]"
    assert f"lambda defined in _make() at {__file__}" in problem.reason
    for words in ("fails with spawn and forkserver", "Windows, macOS", "Python 3.14", "passes with fork"):
        assert words in problem.reason
    with pytest.raises((AttributeError, pickle.PicklingError)):
        next(iter(DataLoader(_make(), num_workers=1, multiprocessing_context="spawn")))


def test_of_a_loader_what_its_workers_get_is_judged_and_nothing_else() -> None:
    loader: Any = DataLoader(
        Images(), num_workers=2, collate_fn=lambda b: b, worker_init_fn=lambda i: None, generator=torch.Generator()
    )
    loader.note = threading.Lock()  # stays in this process
    assert {p.path for p in find_unpicklable(loader)} == {"loader.collate_fn", "loader.worker_init_fn"}
    assert find_unpicklable(DataLoader(Images(), num_workers=2, collate_fn=collate)) == []


def test_nothing_is_started_opened_or_moved_to_shared_memory() -> None:
    dataset = Images(
        x=torch.ones(4), p=nn.Parameter(torch.ones(4)), conn=_SPAWN.Pipe()[0], sock=socket.socket(), fn=lambda: 1
    )
    loader = DataLoader(dataset, num_workers=2)
    threads, handles = threading.active_count(), len(os.listdir("/proc/self/fd"))
    children = multiprocessing.active_children()  # other tests share processes with ranks
    find_unpicklable(loader)
    find_unpicklable(dataset, for_process=True)
    assert threading.active_count() == threads and len(os.listdir("/proc/self/fd")) == handles
    assert multiprocessing.active_children() == children
    assert not dataset.x.is_shared() and not dataset.p.is_shared()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "make",
    [_SPAWN.Lock, _SPAWN.Queue, _SPAWN.Event, socket.socket, lambda: _SPAWN.Pipe()[0], lambda: _SPAWN.Value("i", 1)],
    ids=["lock", "queue", "event", "socket", "connection", "value"],
)
def test_what_passes_while_a_process_is_started_is_no_problem_there(make: Any) -> None:
    sent = Box(x=make())
    assert find_unpicklable(sent, for_process=True) == []
    assert [problem.path for problem in find_unpicklable(sent)] == ["sent.x"]


def test_a_lock_of_the_fork_context_is_refused_by_a_spawned_process() -> None:
    sent = {"lock": multiprocessing.get_context("fork").Lock()}
    (problem,) = find_unpicklable(sent, for_process=True)
    assert "fork context" in problem.reason and "argument of Process" in problem.fix


def test_a_thread_lock_is_a_problem_there_too() -> None:
    (problem,) = find_unpicklable([threading.Lock()], for_process=True)
    assert "passes with fork" in problem.reason


def test_what_a_process_gets_is_loaded_for_proof() -> None:
    sent = {"model": nn.Linear(2, 2), "queue": _SPAWN.Queue(), "own": Renames(torch.ones(2))}
    assert find_unpicklable(sent, for_process=True) == []


def test_a_loader_without_a_variable_is_called_loader() -> None:
    assert find_unpicklable(DataLoader(_make()))[0].path.startswith("loader.dataset")


def test_a_loader_held_by_something_else_is_pickled_like_anything() -> None:
    trainer = Box(loader=DataLoader(Images(), collate_fn=lambda b: b))
    (problem,) = find_unpicklable(trainer)
    assert problem.path == "trainer.loader.collate_fn" and "spawn" not in problem.reason
