"""Documentation pages whose `text` and `console` blocks must be what code prints and what commands say.

In these pages a Python block's output is kept. A `text` block must equal the output of the Python block before it, a
`console` block that of the commands after its `$ `, run in the page's folder. `…` stands for anything.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from sybil import Example
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser

from tests import torchrun

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    "start",
    "my_loss_is_nan",
    "which_is_nan",
    "cannot_pickle",
    "migrating",
    "numbers",
    "peers",
    "benchmarks",
    "how_it_works",
    "command_line",
]
TRACEBACK = "Traceback (most recent call last)"
PROGRAMS = {
    "nanscan": [sys.executable, "-m", "nanscan"],
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],  # a port of its own
}


def parsers() -> list[CodeBlockParser]:
    """For the three kinds of blocks."""
    return [
        CodeBlockParser("python", _RunPython()),
        CodeBlockParser("text", check_printed),
        CodeBlockParser("console", check_commands),
    ]


class _RunPython(PythonEvaluator):
    """Runs a block and keeps what it prints and warns about, each as a reader's session shows it."""

    def __call__(self, example: Example) -> None:
        printed = io.StringIO()

        def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
            printed.write(f"{category.__name__}: {message}\n")

        with contextlib.redirect_stdout(printed), warnings.catch_warnings(), _as_main(example.namespace):
            warnings.simplefilter("default")
            warnings.simplefilter("ignore", ResourceWarning)  # as a session does
            warnings.showwarning = show  # type: ignore[assignment]
            super().__call__(example)
        example.namespace["_printed"] = printed.getvalue()


@contextlib.contextmanager
def _as_main(namespace: dict[str, Any]) -> Iterator[None]:
    """While a block runs, the page is `__main__`, as a session is to itself: pickle finds its classes there."""
    before, page = sys.modules["__main__"], ModuleType("__main__")

    def find(name: str) -> Any:
        if name in namespace:
            return namespace[name]
        raise AttributeError(f"module '__main__' has no attribute {name!r}")

    page.__getattr__ = find  # type: ignore[method-assign]
    namespace["__name__"] = "__main__"
    sys.modules["__main__"] = page
    try:
        yield
    finally:
        sys.modules["__main__"] = before


def check_printed(example: Example) -> str | None:
    """None if the block is what was printed, else how they differ."""
    return differs(str(example.parsed), example.namespace["_printed"])


def check_commands(example: Example) -> str | None:
    """None if each command says what stands below it."""
    block = str(example.parsed)
    if not block.startswith("$ "):
        return f"no command after '$ ' at its beginning:\n{block}"
    for command, expected in commands(block):
        problem = differs(expected, _said(command))
        if problem:
            return f"$ {command}\n{problem}"
    return None


def commands(block: str) -> Iterator[tuple[str, str]]:
    """Each command of a console block and what it is said to print."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        yield command, expected


def _said(command: str) -> str:
    first, *words = [str(ROOT / word) if word.startswith("examples/") else word for word in shlex.split(command)]
    program = PROGRAMS.get(first, [first])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    done = torchrun.run([*program, *words], env=environment, timeout=120)
    return done.stdout + done.stderr


def differs(expected: str, found: str) -> str | None:
    """What a page says against what is so, `…` for anything; None if they agree.

    >>> differs("step 3 …\\n", "step 3 skipped\\n")
    >>> differs("step 3\\n", "step 4\\n")
    'the page says:\\nstep 3\\nand it is:\\nstep 4'
    """
    wanted, real = _lines(expected), _lines(found)
    if wanted and not wanted.strip("… \n"):
        return f"the page says nothing:\n{wanted}\nand it is:\n{real}"
    if TRACEBACK in real and TRACEBACK not in wanted:
        return f"ended by an exception:\n{real}"
    pattern = re.escape(wanted).replace("…", ".*?")
    if re.fullmatch(pattern, real, re.DOTALL):
        return None
    return f"the page says:\n{wanted}\nand it is:\n{real}"


def _lines(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
