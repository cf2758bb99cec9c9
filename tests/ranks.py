"""Real processes in a gloo group that run the functions of a module of scenarios whenever a test asks."""

from __future__ import annotations

import datetime
import importlib
import multiprocessing
import os
import tempfile
import traceback
from multiprocessing.connection import Connection
from typing import Any

PATIENCE = 240.0  # seconds: for a machine that is busy with something else


def new_processes() -> Any:
    """A context whose processes are forked from one that has imported torch, and done nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.checkpoint_scenarios"])
    return context


class Ranks:
    """Starts the processes; `run` has each of them call one function and returns what both returned."""

    def __init__(self, size: int = 2, scenarios: str = "tests.rank_scenarios", patience: float = PATIENCE) -> None:
        context = new_processes()
        folder = tempfile.mkdtemp()
        pipes = [context.Pipe() for _ in range(size)]
        self._ours = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(
                target=_serve, args=(rank, size, os.path.join(folder, "init"), theirs, scenarios, patience), daemon=True
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def run(self, scenario: str, *arguments: Any) -> list[Any]:
        """What the function called `scenario` returned on each rank, by rank; it gets the rank and the arguments.

        "module:function" is one of another module than that of the scenarios.
        """
        for pipe in self._ours:
            pipe.send((scenario, arguments))
        answers = []
        for rank, pipe in enumerate(self._ours):
            assert pipe.poll(PATIENCE), f"rank {rank} does not answer {scenario!r}"
            answers.append(pipe.recv())
        failed = [text for ok, text in answers if not ok]
        assert not failed, "\n".join(failed)
        return [value for _, value in answers]

    def of(self, scenarios: str) -> Scenarios:
        """The same processes for the functions of another module."""
        return Scenarios(self, scenarios)

    def close(self) -> None:
        for pipe in self._ours:
            pipe.send(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()


class Scenarios:
    """One module's functions, run by processes that others use too."""

    def __init__(self, ranks: Ranks, module: str) -> None:
        self._ranks, self._module = ranks, module

    def run(self, scenario: str, *arguments: Any) -> list[Any]:
        """As `Ranks.run`."""
        return self._ranks.run(f"{self._module}:{scenario}", *arguments)


def _serve(rank: int, size: int, path: str, pipe: Connection, scenarios: str, patience: float) -> None:
    import torch
    import torch.distributed as dist

    module = importlib.import_module(scenarios)
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=patience)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size, timeout=limit)
    while (asked := pipe.recv()) is not None:
        scenario, arguments = asked
        try:
            torch.manual_seed(0)
            place, _, name = scenario.rpartition(":")
            function = getattr(importlib.import_module(place) if place else module, name)
            pipe.send((True, function(rank, *arguments)))
        except Exception:
            pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
    dist.destroy_process_group()
