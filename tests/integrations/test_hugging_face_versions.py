"""A version of transformers or Accelerate that is too old or not tested is named, with the command that mends it."""

from __future__ import annotations

import importlib
import importlib.util
import warnings

import accelerate
import pytest

from nanscan.integrations import versions


@pytest.mark.parametrize("name", ["transformers", "accelerate"])
def test_a_version_that_is_too_old_is_said_at_import(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec(f"nanscan.integrations.{name}")
    monkeypatch.setattr(importlib.import_module(name), "__version__", "0.9.1")
    with pytest.raises(ImportError, match=rf"needs {name} >= [\d.]+, version 0\.9\.1 is installed: pip install"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_version_that_was_not_tested_is_said_once_at_the_line_that_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate, "__version__", "9.0")
    monkeypatch.setattr(versions, "_warned", set())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        versions.require("accelerate", "1.1", "2", extra="accelerate")
        versions.require("accelerate", "1.1", "2", extra="accelerate")
    (said,) = seen
    assert "was tested with accelerate >= 1.1, < 2; 9.0 is installed" in str(said.message)
    assert said.filename == __file__
