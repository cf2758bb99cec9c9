"""The package's public names: imported when first used, the same for people, type checkers and `import *`."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import nanscan


def test_type_checkers_see_the_names_that_the_package_has() -> None:
    tree = ast.parse(Path(nanscan.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {f"{node.module}.{alias.name}" for node in guarded.body for alias in node.names}  # type: ignore[attr-defined]
    assert seen == {f"{module}.{name}" for name, module in nanscan._HOME.items()}


@pytest.mark.parametrize("name", nanscan.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(nanscan, name) is not None


def test_the_package_alone_imports_no_framework() -> None:
    code = "import nanscan, sys; print(sorted({'torch', 'numpy', 'paddle', 'click'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'scna'"):
        nanscan.scna  # noqa: B018


def test_a_part_is_reached_as_an_attribute() -> None:
    code = "import nanscan; print(nanscan.matching.load_model_state.__name__, nanscan.scan([]).finite)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["load_model_state", "True"]


def test_an_integration_says_what_is_missing() -> None:
    with pytest.raises(AttributeError, match="there are: accelerate, lightning"):
        nanscan.integrations.fastai  # noqa: B018
