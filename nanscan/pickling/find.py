"""`find_unpicklable`: every place that can't be pickled, can't be loaded or is lost, from one look at an object."""

from __future__ import annotations

import dataclasses
from typing import Any

from nanscan.pickling.loaders import is_loader, worker_arguments
from nanscan.pickling.naming import caller_frame, root_name
from nanscan.pickling.places import Place
from nanscan.pickling.problem import PickleProblem
from nanscan.pickling.settle import check_pickling, prove_loading
from nanscan.pickling.walk import Walk

__all__ = ["find_unpicklable"]

_SPAWN = (
    "fails with spawn and forkserver (the default on Windows, macOS and, from Python 3.14 on, Linux), passes with fork"
)


def find_unpicklable(
    obj: Any,
    *,
    name: str | None = None,
    for_process: bool = False,
    check_loading: bool = True,
    weights_only: bool = False,
) -> list[PickleProblem]:
    """Find every place in an object that can't be pickled, can't be loaded again, or loses something on the way.

    Looks at what pickle would save: what a class leaves out in `__getstate__` is not a problem. The data of tensors
    is never copied and the object is left as it is. An empty list means that it pickles and loads.

    Args:
        obj: anything: a model, an optimizer, a checkpoint dict. Of a DataLoader what its workers get is looked at
            (dataset, collate_fn, worker_init_fn), as with `for_process`; no worker is started.
        name: what the paths begin with. Default: the caller's variable that holds `obj`, else a word for its type.
        for_process: judge by what multiprocessing can send to a process that it starts, instead of by plain pickle.
        check_loading: also load, in a subprocess, those parts whose own code runs on loading: only trying tells.
        weights_only: also list what `torch.load(weights_only=True)`, PyTorch's default, will refuse.

    Returns:
        One `PickleProblem` for each place, each object once, under its shortest path. Severity `"error"`: saving or
        loading fails; `"loss"`: both work and something is silently gone (tensor hooks, a graph, weights that a
        `__reduce__` forgets).

    >>> import threading
    >>> state = {"epoch": 3, "lock": threading.Lock(), "loss": [lambda x: x]}
    >>> for problem in find_unpicklable(state):
    ...     print(problem.path, "-", problem.reason)
    state["lock"] - a lock belongs to the threads of this process
    state["loss"][0] - a lambda defined at <doctest nanscan.pickling.find.find_unpicklable[1]>:1 has no name to be ...
    """
    name = name or root_name(obj, caller_frame())
    for_process = for_process or is_loader(obj)
    walk = Walk(for_process, _judge_of_weights_only() if weights_only else None)
    roots = worker_arguments(obj) if is_loader(obj) else [Place(obj)]
    walk.run(roots)
    check_pickling(walk, roots, for_process)
    if check_loading and walk.unsettled:
        prove_loading(walk, name, for_process)
    problems = [finding.problem(name) for finding in walk.findings]
    return [_for_process(problem) for problem in problems] if for_process else problems


def _judge_of_weights_only() -> Any:
    from nanscan.pickling.weights_only import refused

    return refused


def _for_process(problem: PickleProblem) -> PickleProblem:
    if problem.severity != "error":
        return problem
    return dataclasses.replace(problem, reason=f"{problem.reason}; {_SPAWN}")
