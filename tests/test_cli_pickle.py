"""`nanscan pickle`: what is in a file, never run; what is wrong with an object; exit codes, JSON, one-line misuse."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nanscan.cli import main
from tests.cli_server import Server

MODULE = """
import threading
print("noise from the module")

class Holder:
    def __init__(self): self.lock = threading.Lock(); self.rate = 0.5

class Proxy:
    def __init__(self, inner): self.inner = inner
    def __getattr__(self, name): return getattr(self.inner, name)

class Nested:
    good = {"lr": 0.1}

good = {"lr": 0.1, "steps": [1, 2]}
bad = {"holder": Holder(), "fn": lambda x: x}
proxy = Proxy(1)
number = complex(1, 2)
def make(): return good

class Fails:
    @property
    def part(self): raise ValueError("not yet")

fails = Fails()
"""


class Attack:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a module, a clean file, one that is refused and two attacks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "user_of_pickle.py").write_text(MODULE)
    torch.save({"w": torch.ones(3)}, "clean.pt")
    torch.save({"args": argparse.Namespace(lr=1)}, "refused.pt")
    torch.save({"w": torch.ones(1), "x": Attack(tmp_path / "canary")}, "attack.pt")
    Path("attack.pkl").write_bytes(pickle.dumps([Attack(tmp_path / "canary")]))
    yield tmp_path
    assert not (tmp_path / "canary").exists()
    sys.modules.pop("user_of_pickle", None)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["pickle", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_clean_file_is_exit_code_0_with_what_is_in_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "clean.pt")
    assert (code, err) == (0, "")
    assert out.startswith("clean.pt: torch zip archive, protocol 2, 1 pickle, 1 tensor (12 bytes), 1 persistent id\n")
    assert "clean: torch.load(weights_only=True) has no reason to refuse it" in out
    assert "torch._utils._rebuild_tensor_v2  allowed by weights_only" in out


def test_a_refused_global_is_exit_code_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "refused.pt")
    assert code == 1
    assert "torch.load(weights_only=True) refuses 1 of its 1 globals" in out
    assert "argparse.Namespace  refused by weights_only" in out


@pytest.mark.parametrize("file", ["attack.pt", "attack.pkl"])
def test_an_attack_is_named_and_never_run(file: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, file)
    assert code == 1
    assert "would run code when loaded: posix.system; load it with weights_only=True" in out
    code, out, _ = run(capsys, file, "--json")
    document = json.loads(out)
    assert (code, document["exit_code"], document["clean"]) == (1, 1, False)
    assert document["globals"][0]["name"] == "system" and "acts on the system" in document["globals"][0]["danger"]


def test_an_attack_is_not_run_by_the_real_command_either(folder: Path, server: Server) -> None:
    done = server.run(folder, "pickle", "attack.pkl")
    assert done.code == 1 and "posix.system" in done.out and "\x1b[" not in done.out


def test_a_truncated_file_is_exit_code_1_and_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in ("refused.pt", "attack.pkl"):
        Path("cut").write_bytes(Path(file).read_bytes()[:-30])
        code, out, _ = run(capsys, "cut")
        assert code == 1 and "damaged: " in out, file


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.pt"], "'nothing.pt' is not there: give a file, or an object as package.module:object"),
        (["."], "is a folder"),
        (["empty"], "'empty' can't be looked into: the file is empty"),
        (["text"], "can't be looked into: it is no pickle"),
        (
            ["user_of_pickle.py"],
            "is Python source: for an object of it, write user_of_pickle:OBJECT",
        ),
        (["clean.pt", "--for-process"], "--for-process is about MODULE:OBJECT"),
        (["no_such_module_here:model"], "there is no module 'no_such_module_here'"),
        (["user_of_pickle:nothing"], "'user_of_pickle' has no 'nothing': it has threading, Holder"),
        (["user_of_pickle:good.lr"], "'user_of_pickle.good' has no 'lr'"),
        (["user_of_pickle.py:good"], "there is no module 'user_of_pickle.py': write user_of_pickle:good"),
        (["user_of_pickle:fails.part"], "'user_of_pickle.fails' can't give its 'part': ValueError: not yet"),
        (["user_of_pickle:make()"], "Nothing is called: assign the result to a name there."),
        (["user_of_pickle:"], "names no object: write package.module:object"),
        (["breaks:model"], "the module 'breaks' can't be imported: SystemExit: 3"),
        (["needs:model"], "the module 'needs' can't be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ([], "Missing argument"),
    ],
)
def test_misuse_is_exit_code_2_and_one_line(
    arguments: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").touch()
    Path("text").write_text("hello")
    Path("breaks.py").write_text("import sys\nsys.exit(3)\n")
    Path("needs.py").write_text("import nowhere\n")
    code, out, err = run(capsys, *arguments)
    lines = [line for line in err.splitlines() if line != "noise from the module"]
    assert (code, out) == (2, "")
    assert len(lines) == 1 and lines[0].startswith("nanscan: ") and words in lines[0]


def test_misuse_with_json_is_a_document(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "nothing.pt", "--json")
    assert code == 2 and json.loads(out)["exit_code"] == 2


@pytest.mark.parametrize("target", ["user_of_pickle:good", "user_of_pickle:Nested.good"])
def test_an_object_that_pickles_and_loads_is_exit_code_0(
    target: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, target)
    assert (code, out, err) == (0, f"{target}: it pickles and loads\n", "noise from the module\n")


def test_every_problem_of_an_object_is_listed_by_its_path(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "user_of_pickle:bad")
    assert code == 1 and out.startswith("user_of_pickle:bad: 2 found\n")
    assert 'bad["holder"].lock (_thread.lock)' in out and 'bad["fn"]' in out
    code, out, _ = run(capsys, "user_of_pickle:bad", "--json")
    document = json.loads(out)
    assert (code, document["exit_code"], len(document["problems"])) == (1, 1, 2)
    assert {"path", "type", "reason", "fix", "severity"} <= set(document["problems"][0])


def test_an_object_that_fails_only_on_loading_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "user_of_pickle:proxy")
    assert code == 1 and "recursion in __getattr__" in out and "Proxy" in out


def test_the_working_folder_is_searched_by_the_real_command(folder: Path, server: Server) -> None:
    done = server.run(folder, "pickle", "user_of_pickle:good", "--json")
    assert (done.code, json.loads(done.out)["problems"]) == (0, []), done.err


def test_a_file_whose_name_looks_like_an_object_is_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run:3").write_bytes(Path("clean.pt").read_bytes())
    code, out, _ = run(capsys, "run:3")
    assert code == 0 and out.startswith("run:3: torch zip archive")


def test_names_in_a_file_cannot_steer_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("odd.pkl").write_bytes(b"\x80\x04\x8c\x08a\x1b[2Jb[/\x8c\x05[red]\x93.")
    code, out, _ = run(capsys, "odd.pkl")
    assert code == 1 and "\x1b" not in out and "[red]" in out


def test_help_says_that_nothing_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0 and "Nothing of it is run" in " ".join(out.split())
    assert "--json" in out and "Exit code: 0 clean" in out
    assert main(["--help"]) == 0
    assert any(line.strip().startswith("pickle ") for line in capsys.readouterr().out.splitlines())
