"""The docstrings of public names say what the reference needs: arguments, what is returned, an example that runs."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

import nanscan

PUBLIC = [name for name in nanscan.__all__ if not name.startswith("__")]


def lacking(made: Any) -> list[str]:
    """What the docstring of a function or class leaves out; a class may leave to its bases what they say."""
    text = inspect.getdoc(made) or ""
    bases = (
        [base for base in inspect.getmro(made)[1:] if base.__module__.startswith("nanscan")] if is_class(made) else []
    )
    said = "\n".join([text, *(inspect.getdoc(base) or "" for base in bases)])
    missing = [
        f"argument {name}"
        for name in arguments(made)
        if not re.search(rf"^ +(\w+, )*{name}(, \w+)*: ", said, re.MULTILINE)
    ]
    if "made by `nanscan." in text:
        missing = []
    if not is_class(made) and not re.search(r"^(Returns|Yields):$", text, re.MULTILINE):
        missing.append("what is returned")
    if "Args:" in text and ">>> " not in text:
        missing.append("an example")
    return missing if text else ["everything"]


def is_class(made: Any) -> bool:
    return inspect.isclass(made)


def arguments(made: Any) -> list[str]:
    try:
        parameters = inspect.signature(made).parameters.values()
    except ValueError:  # an exception that takes what its base in C takes
        return []
    various = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind not in various]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_documented(name: str) -> None:
    assert lacking(getattr(nanscan, name)) == []


@pytest.mark.parametrize("name", [name for name in PUBLIC if inspect.isclass(getattr(nanscan, name))])
def test_public_methods_are_documented(name: str) -> None:
    members = vars(getattr(nanscan, name)).items()
    public = {key: value for key, value in members if not key.startswith("_") and is_described(value)}
    assert [key for key, value in public.items() if not inspect.getdoc(value)] == []


def is_described(member: Any) -> bool:
    return isinstance(member, (property, classmethod, staticmethod)) or inspect.isfunction(member)


def test_what_a_docstring_leaves_out_is_noticed() -> None:
    def scan(tensors: Any, grads: bool = False) -> int:
        """Scan.

        Args:
            tensors: what to scan.
        """
        return 0

    assert lacking(scan) == ["argument grads", "what is returned", "an example"]
