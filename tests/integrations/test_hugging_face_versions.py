"""A version of transformers or Accelerate that is too old is named, with the command that mends it."""

from __future__ import annotations

import importlib.util

import accelerate
import pytest
import transformers


@pytest.mark.parametrize("package", [transformers, accelerate], ids=lambda package: package.__name__)
def test_a_version_that_is_too_old_is_said_at_import(package: object, monkeypatch: pytest.MonkeyPatch) -> None:
    name = package.__name__
    spec = importlib.util.find_spec(f"nanscan.integrations.{name}")
    monkeypatch.setattr(package, "__version__", "0.9.1")
    with pytest.raises(ImportError, match=rf"needs {name} >= [\d.]+, version 0\.9\.1 is installed: pip install"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
