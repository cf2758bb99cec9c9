"""What pickles and does not load: found without starting anything where that can be told, else by a real subprocess."""

from __future__ import annotations

import collections
import copy
import io
import pickle
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from nanscan import find_unpicklable
from nanscan.pickling import settle
from tests.unpicklable import (
    AnswersAnything,
    Box,
    CarefulProxy,
    HashedByState,
    LoadingRaises,
    Methods,
    NeedsArgument,
    Proxy,
    Rebuilt,
    Renames,
    StateNumber,
    TwoArguments,
)


def _loading_fails(value: Any) -> bool:
    data = pickle.dumps(value)
    try:
        pickle.loads(data)
    except Exception:
        return True
    return False


@pytest.fixture
def no_subprocess(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a subprocess was asked for")

    monkeypatch.setattr("nanscan.pickling.proof.loads_elsewhere", refuse)


@pytest.mark.parametrize(
    ("value", "words", "fix"),
    [
        (Proxy([1]), "recursion in __getattr__ while restoring", "raise AttributeError"),
        (StateNumber(), "returns int, which can't be loaded", "__setstate__"),
        (types.MethodType(lambda self: 1, Methods()), "saved as attribute '<lambda>'", "bind the function"),
    ],
    ids=["delegating", "state", "method"],
)
@pytest.mark.usefixtures("no_subprocess")
def test_what_can_be_told_here_is_told_without_a_subprocess(value: Any, words: str, fix: str) -> None:
    assert _loading_fails(value)
    (problem,) = find_unpicklable({"x": value}, name="state", check_loading=False)
    assert problem.path == 'state["x"]' and problem.severity == "error"
    assert words in problem.reason and fix in problem.fix


@pytest.mark.usefixtures("no_subprocess")
def test_a_getattr_that_answers_for_the_hooks_of_pickle_is_told_with_the_hook() -> None:
    hook = "__setstate__" if sys.version_info >= (3, 11) else "__getstate__"  # every object has the latter since 3.11
    with pytest.raises(TypeError, match="not callable"):
        pickle.loads(pickle.dumps(AnswersAnything()))
    (problem,) = find_unpicklable({"x": AnswersAnything()}, name="state", check_loading=False)
    assert problem.path == 'state["x"]' and problem.severity == "error"
    assert f"answers NoneType for '{hook}'" in problem.reason and "raise AttributeError" in problem.fix


class AttributeDict(dict[str, Any]):
    """The well-known recipe for `config.lr`; `copy.deepcopy` asks it for `__deepcopy__`."""

    __getattr__ = dict.__getitem__


class MakesEntries(collections.defaultdict[str, Any]):
    __getattr__ = collections.defaultdict.__getitem__


class Around:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "__setstate__"):
            raise AttributeError(name)
        return getattr(self.inner, name)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (MakesEntries(list, a=1), "copy.deepcopy fails"),
        (Around(torch.ones(2)), "copy.deepcopy copies the Tensor inside alone"),
        (Around([1]), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_getattr_that_answers_for_deepcopy_is_a_loss(value: Any, words: str | None) -> None:
    problems = find_unpicklable({"config": value}, check_loading=False)
    expected = [('state["config"]', "loss")] if words else []
    assert [(problem.path, problem.severity) for problem in problems] == expected
    assert words is None or (words in problems[0].reason and "raise AttributeError" in problems[0].fix)
    assert "__deepcopy__" not in (value if isinstance(value, dict) else ())
    try:
        assert (type(copy.deepcopy(value)) is type(value)) is (words is None)
    except (KeyError, TypeError):
        assert words is not None
    assert find_unpicklable(value, for_process=True, check_loading=False) == []


def test_an_attribute_dict_is_a_loss_and_an_error_where_pickle_asks_it_too() -> None:
    config = AttributeDict(lr=0.1)
    (problem,) = find_unpicklable({"config": config}, check_loading=False)
    sent = find_unpicklable({"config": config}, for_process=True, check_loading=False)
    if sys.version_info >= (3, 11):
        assert type(pickle.loads(pickle.dumps(config))) is AttributeDict and sent == []
        assert problem.severity == "loss" and "copy.deepcopy fails: its __getattr__ raises KeyError" in problem.reason
    else:  # object has no __getstate__: pickle asks __getattr__ for it
        with pytest.raises(KeyError, match="__getstate__"):
            pickle.dumps(config)
        assert problem.severity == "error" and len(sent) == 1
        assert "saving it fails: its __getattr__ raises KeyError ('__getstate__')" in problem.reason
    assert problem.path == 'state["config"]' and "raise AttributeError" in problem.fix


def test_the_class_of_a_delegating_proxy_is_named() -> None:
    proxy = Proxy([1])
    (problem,) = find_unpicklable(proxy, check_loading=False)
    assert problem.type == "tests.unpicklable.Proxy" and "Proxy" in problem.reason


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (LoadingRaises(), "KeyError"),
        (NeedsArgument(1), "missing 1 required positional argument"),
        (TwoArguments(1, "x"), "missing 1 required positional argument"),
        (HashedByState(), "has no attribute 'key'"),
    ],
    ids=["setstate", "new", "exception", "hash"],
)
def test_what_only_loading_tells_is_told_by_a_subprocess(value: Any, words: str) -> None:
    assert _loading_fails(value)
    assert find_unpicklable({"x": [value]}, check_loading=False) == []
    problems = find_unpicklable({"x": [value]}, name="state")
    assert len(problems) == 1 and words in problems[0].reason
    assert problems[0].path in ('state["x"][0]', "state")


def test_the_innermost_place_that_does_not_load_is_at_fault() -> None:
    outer = Renames({"a": Renames(LoadingRaises()), "b": Renames(3)})
    (problem,) = find_unpicklable(outer)
    assert problem.path == 'outer.inner["a"].inner'


def test_one_subprocess_is_enough_for_what_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("nanscan.pickling.proof.loads_elsewhere", lambda places, **_: calls.append(places) or [])
    assert find_unpicklable([Renames(Renames(CarefulProxy(3))), Rebuilt(1)]) == []
    assert [list(places) for places in calls] == [["obj[0]", "obj[1]"]]


def test_of_one_class_only_some_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("nanscan.pickling.proof.loads_elsewhere", lambda places, **_: calls.append(places) or [])
    find_unpicklable([Renames(i) for i in range(100)])
    assert len(calls[0]) == settle._TRIED_OF_ONE_CLASS


@pytest.mark.usefixtures("no_subprocess")
def test_plain_classes_and_what_is_switched_off_start_no_subprocess() -> None:
    assert find_unpicklable(Box(a=Box(b=3))) == []
    assert find_unpicklable(Renames(3), check_loading=False) == []


def test_a_module_made_at_run_time_can_not_be_imported_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    ghost = types.ModuleType("ghost")
    exec("class Net: pass\ndef fn(): pass", ghost.__dict__)
    monkeypatch.setitem(sys.modules, "ghost", ghost)
    pickle.loads(pickle.dumps([ghost.Net(), ghost.fn]))
    problems = find_unpicklable({"net": ghost.Net(), "fn": ghost.fn}, name="state")
    assert {problem.path for problem in problems} == {'state["net"]', 'state["fn"]'}
    assert all("'ghost', which another process can't import" in problem.reason for problem in problems)


def test_a_module_that_left_the_path_can_not_be_imported_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "passing_by.py").write_text("class Net: pass")
    monkeypatch.syspath_prepend(str(tmp_path))
    import passing_by  # type: ignore[import-not-found]

    assert find_unpicklable(passing_by.Net()) == []
    sys.path.remove(str(tmp_path))
    assert "can't import" in find_unpicklable(passing_by.Net())[0].reason


_SCRIPT = """
import torch, nanscan
class Net(torch.nn.Linear): pass
def fn(): pass
if __name__ == "__main__":
    class Late: pass
    net = Net(1, 1)
    net.fn, net.late = fn, Late()
    for for_process in (False, True):
        print([(p.path, p.severity) for p in nanscan.find_unpicklable(net, for_process=for_process)])
"""


def test_classes_of_a_script_are_fine_but_for_what_a_started_process_does_not_define(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    assert _printed([str(script)]) == ["[]", "[('net.late', 'error')]"]


def test_classes_of_a_notebook_are_a_loss_and_fail_in_another_process() -> None:
    expected = ["[('net', 'loss'), ('net.fn', 'loss'), ('net.late', 'loss')]"]
    expected.append(expected[0].replace("loss", "error"))
    assert _printed(["-c", textwrap.dedent(_SCRIPT)]) == expected


def test_a_class_of_a_notebook_is_judged_for_loading_too() -> None:
    code = """
import nanscan
class Proxy:
    def __init__(self): self.inner = 1
    def __getattr__(self, name): return getattr(self.inner, name)
print([p.severity for p in nanscan.find_unpicklable({"x": Proxy()}, check_loading=False)])
"""
    assert _printed(["-c", code]) == ["['loss', 'error']"]


def _printed(arguments: list[str]) -> list[str]:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


class _Net(torch.nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.width = width
        self.layers = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.LayerNorm(width))


class BuiltAnew(_Net):
    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["width"])  # type: ignore[misc]


class BuiltAndFilled(_Net):
    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["width"])  # type: ignore[misc]
        self.layers.load_state_dict(state["_modules"]["layers"].state_dict())


class OutOfBytes(_Net):
    def __getstate__(self) -> dict[str, Any]:
        saved = io.BytesIO()
        torch.save(self.state_dict(), saved)
        return {"width": self.width, "weights": saved.getvalue()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["width"])  # type: ignore[misc]
        self.load_state_dict(torch.load(io.BytesIO(state["weights"])))


class NotYetSized(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.later = torch.nn.LazyLinear(2)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class Trainer:
    def __init__(self) -> None:
        self.net = _Net()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.net = _Net()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (BuiltAnew(), "makes 2 of 4 parameters anew (layers.0.weight, layers.0.bias)"),
        (BuiltAndFilled(), None),
        (OutOfBytes(), None),
        (NotYetSized(), None),
        (Trainer(), "makes 2 of 4 parameters anew (net.layers.0.weight, net.layers.0.bias)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_weights_that_setstate_makes_anew_are_a_loss(value: Any, words: str | None) -> None:
    problems = find_unpicklable({"model": value})
    assert [(problem.path, problem.severity) for problem in problems] == ([('state["model"]', "loss")] if words else [])
    assert words is None or (words in problems[0].reason and "load_state_dict" in problems[0].fix)
    net, saved = (getattr(it, "net", it).layers[0] for it in (value, pickle.loads(pickle.dumps(value))))
    assert torch.equal(net.weight, saved.weight) is (words is None)
