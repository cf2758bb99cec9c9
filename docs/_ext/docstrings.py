"""Docstrings as they are meant: types stand in the annotations, so a colon in a sentence sets no type apart.

napoleon takes `The path (in the background: where it will be)` under Returns, or as a property's first line, for a type
and what it means. An empty type before it keeps it from that.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.domains.python import PyObject

SECTIONS = re.compile(r"\s*(Returns|Yields):$")


def keep_sentences(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    for number, line in enumerate(lines[:-1]):
        if SECTIONS.match(line):
            text = lines[number + 1]
            lines[number + 1] = re.sub(r"^(\s*)", r"\1: ", text, count=1)
    if what in ("property", "attribute", "data") and lines:
        lines[0] = f": {lines[0]}"


def setup(app: Any) -> dict[str, Any]:
    for field in PyObject.doc_field_types:
        field.label = {"variable": "Attributes", "parameter": "Args"}.get(field.name, field.label)
    app.connect("autodoc-process-docstring", keep_sentences, priority=400)  # before napoleon's
    return {"parallel_read_safe": True}
