"""What people keep in models, configs and data sets, and what the answer must say about it to be of use."""

from __future__ import annotations

import argparse
import copy
import enum
import functools
import io
import multiprocessing
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pydantic
import pytest
import rich.console
import torch
import torch.nn.utils.prune
from torch import nn
from tqdm import tqdm

import nanscan
from nanscan import PickleProblem, find_unpicklable


def only(value: Any, **options: Any) -> PickleProblem:
    (problem,) = find_unpicklable(value, name="x", **options)
    return problem


class Act(enum.Enum):
    RELU = functools.partial(torch.relu)
    SENTINEL = object()
    UNKNOWN = float("nan")
    PAIR = (1, 2)
    DTYPE = torch.float32
    FUNCTION = len


def test_an_enum_member_that_is_not_found_by_its_copied_value_does_not_load() -> None:
    for member in Act:
        try:
            loads = pickle.loads(pickle.dumps(member)) is member
        except ValueError:
            loads = False
        problems = find_unpicklable({"act": member}, name="x")
        assert bool(problems) is not loads, member
        if problems:
            assert problems[0].path == 'x["act"]' and "not equal to its own copy" in problems[0].reason


def test_a_memory_format_goes_through_pickle_and_not_through_torch_save(tmp_path: Any) -> None:
    config = {"format": torch.channels_last}
    with pytest.raises(TypeError, match="cannot pickle 'module' object"):
        torch.save(config, io.BytesIO())
    problem = only(config)
    assert problem.path == 'x["format"]' and "torch.save" in problem.reason and "str(x)" in problem.fix
    assert only(config, weights_only=True).path == 'x["format"]'
    assert find_unpicklable(config, for_process=True) == []
    with pytest.raises(nanscan.CheckpointError, match=r'config\["format"\] \(torch.memory_format\)'):
        nanscan.save(config, tmp_path / "config.pt")


def test_a_managers_dict_is_no_longer_there_when_it_is_loaded() -> None:
    with multiprocessing.get_context("spawn").Manager() as manager:
        shared = manager.dict()
        problem = only({"cache": shared})
        assert problem.path == 'x["cache"]' and "server process" in problem.reason and "dict(x)" in problem.fix
        assert find_unpicklable({"cache": shared}, for_process=True) == []


@pytest.mark.parametrize(
    ("make", "reason", "fix"),
    [
        (lambda: tqdm(range(3), file=io.StringIO()), "progress display", "where the loop runs"),
        (rich.console.Console, "progress display", "drop it"),
        (argparse.ArgumentParser, "a parser", "vars(args)"),
        (Future, "waits for a pool", "result()"),
    ],
    ids=["tqdm", "rich", "argparse", "future"],
)
def test_an_object_of_a_known_kind_is_one_finding_and_not_its_insides(
    make: Callable[[], Any], reason: str, fix: str
) -> None:
    problem = only({"kept": make()})
    assert problem.path == 'x["kept"]' and reason in problem.reason and fix in problem.fix


@pytest.mark.filterwarnings("ignore")
def test_an_exported_program_is_saved_by_its_own_function() -> None:
    program = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
    assert "torch.export.save" in only(program).fix


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = functools.lru_cache(maxsize=8)(self._embed)

    def _embed(self, key: int) -> int:
        return key


def test_a_cache_over_a_method_is_told_how_to_be_left_out() -> None:
    problem = only(Cached())
    assert problem.path == "x.embed" and "TransientState" in problem.fix and "lru_cache" in problem.fix


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("normed", "words"),
    [
        (lambda layer: nn.utils.weight_norm(layer), "parametrizations.weight_norm"),
        (lambda layer: nn.utils.spectral_norm(layer), "parametrizations.spectral_norm"),
        (lambda layer: nn.utils.prune.l1_unstructured(layer, "weight", 0.5), "prune.remove(module, 'weight')"),
    ],
    ids=["weight_norm", "spectral_norm", "prune"],
)
def test_the_advice_on_a_weight_that_a_hook_computes_makes_the_model_copyable(
    normed: Callable[[nn.Module], nn.Module], words: str
) -> None:
    layer = normed(nn.Linear(4, 4))
    layer(torch.ones(1, 4))
    problem = only(layer)
    assert problem.path == "x.weight" and problem.severity == "loss" and words in problem.fix
    assert "module.weight = module.weight.detach()" in problem.fix
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(layer)
    layer.weight = layer.weight.detach()
    assert find_unpicklable(layer) == []
    copied = copy.deepcopy(layer)
    assert torch.equal(copied(torch.ones(1, 4)), layer(torch.ones(1, 4)))


class Settings(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    act: Any = None
    _lock: Any = pydantic.PrivateAttr(default_factory=threading.Lock)


def test_the_fields_of_a_pydantic_model_have_the_paths_that_one_types() -> None:
    settings = Settings(act=lambda x: x)
    found = {problem.path for problem in find_unpicklable(settings)}
    assert found == {"settings.act", 'settings.__pydantic_private__["_lock"]'}


def test_the_one_element_of_an_array_without_dimensions_has_a_path_that_one_types() -> None:
    array = np.array(threading.Lock(), dtype=object)
    path = only(array).path
    assert path == "x[()]" and eval(path, {"x": array}) is array.item()
