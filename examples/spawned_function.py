"""A function that runs in another process, as hosted GPU functions do: what can't travel, where it is, and what to do.

Hosted functions, DataLoader workers and process pools pickle the arguments on one side and the results on the other.
Here a fine-tuning job is sent to a fresh process (`spawn`), trained there and comes back with its weights, its guarded
optimizer and the reports. The first try fails: a lock deep inside the job can't be pickled, and the error does not say
where it is. `find_unpicklable` says where, `TransientState` leaves the lock behind and makes a new one on arrival.

Run: python examples/spawned_function.py
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

import nanscan


class Cache:
    """Batches that were prepared already. Its lock belongs to the running process, and so do its entries."""

    def __init__(self) -> None:
        self.lock, self.entries = threading.RLock(), {}

    def get(self, seed: int, make: Callable[[int], Any]) -> Any:
        with self.lock:
            if seed not in self.entries:
                self.entries[seed] = make(seed)
            return self.entries[seed]


class PortableCache(nanscan.TransientState, Cache, transient={"lock": threading.RLock, "entries": dict}):
    """The same one, without its lock and entries when it travels; both are made anew where it arrives."""


class Job:
    """All that a fine-tuning run needs: the model, its guarded optimizer, and where batches come from."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        inner = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.optimizer = nanscan.wrap(inner, self.model, clip_norm=1.0)


def make_batch(seed: int) -> tuple[Tensor, Tensor]:
    """32 rows of measurements, each scaled to deviation 1. A sensor that stood still makes 0/0 of its row."""
    rows = torch.randn(32, 8, generator=torch.Generator().manual_seed(seed))
    targets = rows @ torch.linspace(-1, 1, 8) / rows.std(1)
    if seed % 40 == 30:
        rows[5] = 1.0
    return (rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True), targets


def train(job: Job, steps: int) -> tuple[Job, str]:
    """What runs elsewhere. A copy of the job comes in, and it goes back trained."""
    warnings.simplefilter("ignore", nanscan.NonFiniteWarning)  # the reports travel back
    optimizer = nanscan.wrap(job.optimizer, job.model)  # a pickled guard has left its model behind: here it is again
    for seed in range(steps):
        inputs, targets = job.cache.get(seed, make_batch)
        loss = nn.functional.mse_loss(job.model(inputs).squeeze(1), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.observe(loss)
        optimizer.step()
    optimizer.zero_grad()
    return job, f"process {os.getpid()}: {optimizer.health()}"


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process that is started for it; arguments and result are pickled on the way.

    They travel as bytes, so each side has copies. (Tensors that multiprocessing itself sends share their memory: what
    the other process trains would change here, too. A hosted function can't do that.)
    """
    request = pickle.dumps((function, arguments))
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pickle.loads(pool.submit(answer, request).result())


def answer(request: bytes) -> bytes:
    """The other end of `call`."""
    function, arguments = pickle.loads(request)
    return pickle.dumps(function(*arguments))


def error_on(job: Job) -> float:
    """The mean squared error on rows that were not trained with."""
    inputs, targets = make_batch(1000)
    with torch.no_grad():
        return nn.functional.mse_loss(job.model(inputs).squeeze(1), targets).item()


def main() -> None:
    torch.manual_seed(0)
    job = Job(Cache())
    try:
        call(train, job, 200)
    except TypeError as error:
        print(f"sent as it is: {error}")
    for problem in nanscan.find_unpicklable(job, for_process=True):
        print(f"  {problem.path} ({problem.type}): {problem.reason}\n  fix: {problem.fix}")

    job.cache = PortableCache()
    print(f"with TransientState: {len(nanscan.find_unpicklable(job, for_process=True))} problems")
    print(f"here, process {os.getpid()}: mean squared error {error_on(job):.4f} before")
    trained, said = call(train, job, 200)
    print(said)
    optimizer = nanscan.wrap(trained.optimizer, trained.model)
    report = next(report for report in optimizer.history if report.skipped)
    print(f"its report of step {report.step}, read here: {report.bad[0].describe()}")
    print(f"skipped {optimizer.skipped_steps} of {len(optimizer.history)} steps; mean squared error", end=" ")
    print(f"{error_on(trained):.4f} of what came back, {error_on(job):.4f} of what is here")
    with trained.cache.lock:  # made on arrival
        print(f"entries of its cache: {len(trained.cache.entries)}")


if __name__ == "__main__":
    main()
