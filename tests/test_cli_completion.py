"""Tab in a real shell completes verbs, options, values and files, once the script of `nanscan completion` is read."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanscan.cli import main
from tests.cli_server import CONTROL

BIN = Path(sys.executable).parent
SETUP = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'eval "$(nanscan completion bash)"'),
    "zsh": (["zsh", "-f", "-i"], 'autoload -U compinit; compinit -u -D; eval "$(nanscan completion zsh)"'),
    "fish": (["fish", "--no-config", "-i"], "nanscan completion fish | source"),
}
TYPED = {
    "nanscan sca": "nanscan scan",
    "nanscan scan --nan-": "nanscan scan --nan-only",
    "nanscan bench --row gp": "nanscan bench --row gpt2",
    "nanscan help pi": "nanscan help pickle",
    "nanscan completion fi": "nanscan completion fish",
    "nanscan report ru": "nanscan report run.jsonl",
}


class Shell:
    """An interactive shell in a terminal."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._child, self._terminal = pty.fork()
        if not self._child:
            os.chdir(folder)
            path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
            os.execvpe(command[0], command, {"PATH": path, "HOME": str(folder), "TERM": "xterm", "PS1": "> "})

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._terminal, text.encode())

    def shows(self, text: str) -> str:
        """Wait until a text appears; returns all that came."""
        seen, until = b"", time.monotonic() + 60
        while time.monotonic() < until:
            if select.select([self._terminal], [], [], 0.5)[0]:
                seen += os.read(self._terminal, 4096)
                if text in CONTROL.sub("", seen.decode(errors="replace")):
                    return seen.decode(errors="replace")
        raise AssertionError(f"{text!r} did not appear: {seen!r}")

    def close(self) -> None:
        """End it."""
        os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
        os.close(self._terminal)


@pytest.mark.parametrize("name", list(SETUP))
def test_tab_completes_in_a_real_shell(name: str, tmp_path: Path) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"no {name} on PATH")
    (tmp_path / "run.jsonl").touch()
    command, setup = SETUP[name]
    shell = Shell(command, tmp_path)
    try:
        shell.type(f"{setup}; echo rea''dy\n")
        shell.shows("ready")
        for typed, completed in TYPED.items():
            shell.type(f"{typed}\t")
            shell.shows(completed)
            shell.type("\x15")  # the line is emptied
    finally:
        shell.close()


def test_the_script_names_the_shell_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    for name in SETUP:
        assert main(["completion", name, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["shell"] == name and f"_NANSCAN_COMPLETE={name}_complete" in document["script"]
        assert main(["completion", name]) == 0
        assert capsys.readouterr().out.strip() == document["script"].strip()


def test_a_question_that_makes_no_sense_is_answered_with_nothing() -> None:
    environment = {**os.environ, "_NANSCAN_COMPLETE": "nonsense_complete"}
    command = [sys.executable, "-m", "nanscan", "scan"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
