"""A real process says whether a pickle loads; what hangs, crashes or prints there does no harm here."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from nanscan.pickling import proof
from nanscan.pickling.processes import ForkedProcess, FreshProcess
from nanscan.pickling.proof import loads_elsewhere
from nanscan.pickling.trial import attempt

USER_CODE = """
import os, sys, time, threading, ctypes

class Fine:
    def __init__(self, value=1): self.value = value

class Proxy:
    def __init__(self, inner): self.inner = inner
    def __getattr__(self, name): return getattr(self.inner, name)

class Raises:
    def __init__(self): self.a = 1
    def __setstate__(self, state): raise KeyError("weights_v2")

class Hangs:
    def __init__(self): self.a = 1
    def __setstate__(self, state): threading.Event().wait()

class HangsAndTells(Hangs):
    def __init__(self, file): self.file = file
    def __setstate__(self, state):
        with open(state["file"] + ".part", "w") as file: file.write(str(os.getpid()))
        os.rename(state["file"] + ".part", state["file"])
        threading.Event().wait()

class Exits:
    def __init__(self, how): self.how = how
    def __setstate__(self, state):
        if state["how"] == "segfault": ctypes.string_at(0)
        if state["how"] == "_exit": os._exit(3)
        if state["how"] == "sys.exit": sys.exit(4)
        if state["how"] == "closes": os.closerange(3, 256); threading.Event().wait()

class Chatty:
    def __init__(self): self.a = 1
    def __setstate__(self, state):
        print('{"raised": {}}', flush=True); sys.stderr.write("no"); os.write(1, b"x\\n" * 100_000); sys.stdin.read()

class NeedsArguments(Exception):
    def __init__(self, a, b): super().__init__(f"{a} {b}")

class BadMessage:
    def __init__(self): self.a = 1
    def __setstate__(self, state):
        class Odd(Exception):
            def __str__(self): raise RuntimeError
        raise Odd

class Restores:
    def __init__(self, weight): self.weight = weight
    def __setstate__(self, state):
        self.__dict__.update(state)
        assert self.weight.sum() == 0 or self.weight.numel() < 100
        self.weight.zero_()
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of the user's, on sys.path."""
    (tmp_path / "user_code.py").write_text(USER_CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("user_code", None)
    module = importlib.import_module("user_code")
    monkeypatch.setitem(sys.modules, "user_code", module)
    return module


def run_script(folder: Path, source: str, **options: object) -> str:
    """What a script of its own prints."""
    (folder / "script.py").write_text(textwrap.dedent(source))
    command = [sys.executable, str(folder / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_loads_is_no_finding(user: types.ModuleType) -> None:
    places = {"a": user.Fine(), "b": {"x": [1, 2.5]}, "net": torch.nn.Linear(3, 2), "array": np.arange(10_000)}
    assert loads_elsewhere(places) == []
    assert (
        loads_elsewhere(
            {"fine": user.Fine(torch.ones(3)), "weight": torch.nn.Parameter(torch.ones(2))}, for_process=True
        )
        == []
    )


def test_each_failure_is_listed_under_its_own_place_in_order(user: types.ModuleType) -> None:
    places = {
        "z": user.Raises(),
        "ok": user.Fine(),
        "p": user.Proxy(1),
        "e": user.NeedsArguments(1, 2),
        "m": user.BadMessage(),
    }
    found = loads_elsewhere(places)
    assert [problem.path for problem in found] == ["z", "p", "e", "m"]
    raising, recursion, arguments, message = found
    assert (
        "Raises.__setstate__" in raising.reason and "weights_v2" in raising.reason and "user_code.py:" in raising.reason
    )
    assert recursion.type == "user_code.Proxy"
    assert "recursion in __getattr__ while restoring: Proxy.__getattr__" in recursion.reason
    assert "raise AttributeError" in recursion.fix
    assert "arguments back" in arguments.fix and "'b'" in arguments.reason
    assert "can't be shown" in message.reason
    assert {problem.severity for problem in found} == {"error"}


def test_a_class_that_only_this_process_knows_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = types.ModuleType("made_at_run_time")
    exec("class Net: pass\nclass Other: pass", made.__dict__)
    monkeypatch.setitem(sys.modules, "made_at_run_time", made)
    found = loads_elsewhere({"nets": [made.Net(), made.Other(), made.Net()]})
    assert [problem.path for problem in found] == ["nets", "nets"]
    assert "made_at_run_time.Net" in found[0].reason and "ModuleNotFoundError" in found[0].reason
    assert "made_at_run_time.Other" in found[1].reason and "sys.path" in found[1].fix


def test_a_class_removed_from_its_file_is_found(user: types.ModuleType) -> None:
    value = user.Fine()
    Path(user.__file__ or "").write_text("")
    (problem,) = loads_elsewhere({"value": value})
    assert "user_code.Fine" in problem.reason and "AttributeError" in problem.reason


@pytest.mark.parametrize(
    ("how", "words"),
    [("segfault", "SIGSEGV"), ("_exit", "exit code 3"), ("sys.exit", "SystemExit"), ("closes", "ends")],
)
def test_a_crash_is_a_finding_and_the_rest_is_still_tried(user: types.ModuleType, how: str, words: str) -> None:
    found = loads_elsewhere({"bad": user.Exits(how), "raises": user.Raises(), "good": user.Fine()})
    assert [problem.path for problem in found] == ["bad", "raises"]
    assert words in found[0].reason


def test_a_hang_ends_at_the_time_limit_and_the_rest_is_still_tried(user: types.ModuleType) -> None:
    found = loads_elsewhere({"hangs": user.Hangs(), "raises": user.Raises()}, time_limit=3.0)
    assert [problem.path for problem in found] == ["hangs", "raises"]
    assert "not over after 3 s" in found[0].reason


def test_what_the_users_code_prints_and_reads_changes_no_answer(
    user: types.ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    assert [problem.path for problem in loads_elsewhere({"c": user.Chatty(), "r": user.Raises()})] == ["r"]
    assert capfd.readouterr() == ("", "")


def test_the_process_is_gone_after_ctrl_c(user: types.ModuleType, tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import sys, user_code\nfrom nanscan.pickling.proof import loads_elsewhere\n"
        "loads_elsewhere({'x': user_code.HangsAndTells(sys.argv[1])})\n"
    )
    told = tmp_path / "pid"
    process = subprocess.Popen(
        [sys.executable, str(script), str(told)],
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        _wait_for(told.exists, 60)
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert b"KeyboardInterrupt" in errors
    _wait_for(lambda: not _runs(int(told.read_text())), 10)


def _wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_no_process_and_no_descriptor_is_left_behind(user: types.ModuleType) -> None:
    before, children = set(os.listdir("/proc/self/fd")), _children()
    loads_elsewhere({"bad": user.Exits("_exit"), "good": user.Fine()})
    assert set(os.listdir("/proc/self/fd")) == before
    assert _children() == children  # multiprocessing's resource tracker may be one, from another test


def _children() -> set[int]:
    found = set()
    for process in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1]
            found |= {process} if int(parent) == os.getpid() else set()
    return found


def test_tensor_data_is_never_sent_and_arrives_as_zeros_of_its_size(user: types.ModuleType) -> None:
    value = user.Restores(torch.ones(1_000_000))
    assert len(proof._pickled(value, False)) < 1000
    assert len(proof._pickled(np.ones(1_000_000), False)) < 1000
    assert loads_elsewhere({"v": value}) == []
    assert value.weight.sum() == 1_000_000


def test_judging_for_a_process_leaves_tensors_out_of_shared_memory() -> None:
    weight = torch.ones(1000)
    assert loads_elsewhere({"weight": weight}, for_process=True) == []
    assert not weight.is_shared()


def test_torch_is_imported_only_where_the_pickle_needs_it(user: types.ModuleType, tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(
        "import sys\nclass Asks:\n    def __init__(self): self.a = 1\n"
        "    def __setstate__(self, state):\n"
        "        raise RuntimeError(', '.join(name for name in ('torch', 'numpy', 'nanscan') if name in sys.modules))\n"
    )
    (problem,) = loads_elsewhere({"a": importlib.import_module("asks").Asks()})
    assert problem.reason.endswith("RuntimeError"), problem.reason


def test_an_own_pickle_can_be_tried() -> None:
    (problem,) = loads_elsewhere({"data": pickle.PickleBuffer(b"cnowhere\nNet\n.")})
    assert "nowhere.Net" in problem.reason
    (problem,) = loads_elsewhere({"data": pickle.PickleBuffer(b"\x80\x04garbage")})
    assert "UnpicklingError" in problem.reason


def test_what_cannot_be_pickled_is_a_finding_not_an_exception() -> None:
    (problem,) = loads_elsewhere({"lock": threading.Lock()})
    assert "can't be pickled" in problem.reason and problem.type == "_thread.lock"


MAIN = """
    from nanscan.pickling.proof import loads_elsewhere
    class Plain:
        def __init__(self): self.a = 1
    class Proxy:
        def __init__(self, inner): self.inner = inner
        def __getattr__(self, name): return getattr(self.inner, name)
    class Hangs:
        def __init__(self): self.a = 1
        def __setstate__(self, state):
            while True: pass
    class Exits:
        def __init__(self): self.a = 1
        def __setstate__(self, state): import os; print("printed", flush=True); os._exit(5)
    if __name__ == "__main__":
        import atexit
        class Guarded:
            pass
        print("before", end="")
"""


def test_classes_of_a_script_are_tried_in_a_copy_of_it(tmp_path: Path) -> None:
    printed = run_script(
        tmp_path,
        textwrap.dedent(MAIN)
        + "    found = loads_elsewhere({'ok': Plain(), 'p': Proxy(1), 'x': Exits(), 'h': Hangs()}, time_limit=2.0)\n"
        "    print([(problem.path, problem.reason[:18]) for problem in found])\n",
    )
    assert printed == "before[('p', 'recursion in __get'), ('x', 'loading it ends th')]\n"


def test_a_started_process_finds_what_stands_at_the_top_of_the_script(tmp_path: Path) -> None:
    printed = run_script(
        tmp_path,
        textwrap.dedent(MAIN)
        + "    for problem in loads_elsewhere({'ok': Plain(), 'g': Guarded()}, for_process=True): print(problem)\n"
        "    print(loads_elsewhere({'ok': Plain(), 'g': Guarded()}))\n",
    )
    assert printed.startswith("beforeg (__main__.Guarded): a started process imports ")
    assert "finds no 'Guarded' at its top level; define it at the top" in printed
    assert printed.endswith("\n[]\n")


@pytest.mark.parametrize(("for_process", "severity"), [(True, "error"), (False, "loss")])
def test_classes_of_a_prompt_are_known_to_no_other_process(for_process: bool, severity: str) -> None:
    source = (
        "from nanscan.pickling.proof import loads_elsewhere\nclass Cell: pass\n"
        f"for p in loads_elsewhere({{'c': Cell()}}, for_process={for_process}): print(p.severity, p.reason)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith(f"{severity} 'Cell' is defined in a notebook or at a prompt"), done.stderr


def test_handlers_of_the_program_do_not_run_in_its_copy(tmp_path: Path) -> None:
    source = (
        "    atexit.register(print, 'at exit')\n    import signal\n"
        "    signal.signal(signal.SIGTERM, lambda *_: print('handled'))\n"
        "    print(loads_elsewhere({'ok': Plain()}))\n"
    )
    assert run_script(tmp_path, textwrap.dedent(MAIN) + source) == "before[]\nat exit\n"


@pytest.mark.parametrize("start", [FreshProcess, ForkedProcess])
def test_a_process_answers_and_ends(start: type[FreshProcess] | type[ForkedProcess]) -> None:
    process = start(60.0)
    assert proof._asked(process, pickle.dumps([1]), 60.0) == {}
    assert process.end() == -signal.SIGKILL


def test_names_of_the_own_program_cannot_be_reached_by_the_pickle() -> None:
    process = FreshProcess(60.0)
    try:
        assert proof._asked(process, b"c__main__\nserve\n.", 60.0)["missing"][0]["name"] == "serve"
    finally:
        process.end()


def test_what_fails_behind_a_missing_class_is_not_guessed() -> None:
    data = b"c__main__\nGone\n)\x81}\x8c\x01aK\x01sbcnowhere\nAlso\n\x86."
    assert [entry["name"] for entry in attempt(data)["missing"]] == ["Gone", "Also"]
    assert "raised" not in attempt(data)


def test_a_module_that_asks_while_it_is_imported_starts_no_chain_of_processes(tmp_path: Path) -> None:
    source = """
        import sys
        from nanscan.pickling.proof import loads_elsewhere
        class Value:
            def __init__(self): self.a = 1
        with open("imports", "a") as file: file.write("x")
        print(loads_elsewhere({"v": Value()}))
    """
    (tmp_path / "asking.py").write_text(textwrap.dedent(source))
    assert run_script(tmp_path, f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import asking") == "[]\n"
    assert (tmp_path / "imports").read_text() == "xx"
