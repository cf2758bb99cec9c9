"""Runs the Python blocks of README.md and docs/*.md as tests; blocks of one page share their names, top to bottom."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from tests import printed_blocks


def _enter(namespace: dict[str, Any]) -> None:
    """A page runs in a folder of its own: what its examples write (logs) does not lie about in the tree."""
    import tempfile

    namespace["_home"], namespace["_folder"] = Path.cwd(), tempfile.TemporaryDirectory()
    os.chdir(namespace["_folder"].name)


def _leave(namespace: dict[str, Any]) -> None:
    os.chdir(namespace["_home"])
    namespace["_folder"].cleanup()


_PRINTED = [f"docs/{page}.md" for page in printed_blocks.PAGES]
_FOLDERS: dict[str, Any] = {"setup": _enter, "teardown": _leave}

pytest_collect_file = (
    Sybil(parsers=[PythonCodeBlockParser(), SkipParser()], patterns=["*.md"], excludes=_PRINTED, **_FOLDERS)
    + Sybil(parsers=[*printed_blocks.parsers(), SkipParser()], patterns=_PRINTED, **_FOLDERS)
).pytest()
