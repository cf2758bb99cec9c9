"""Importing nanscan is cheap and safe: it compiles nothing and brings no optional dependency along."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.build_support import Tree, copy_tree, fake_compiler

# Import names of everything in pyproject.toml's extras, and of the command line's libraries.
OPTIONAL = {
    *("accelerate", "click", "h5py", "jinja2", "lightning", "matplotlib", "ninja", "paddle", "pybind11", "pytest"),
    *("omegaconf", "pytest_benchmark", "rich", "safetensors", "sklearn", "stabilityguard", "tensorboard"),
    *("torchdata", "transformers"),
}
# The modules that a statement brings beyond those that PyTorch itself imports.
BROUGHT = """
import json, sys, torch
before = set(sys.modules)
{statement}
print(json.dumps(sorted({{name.partition(".")[0] for name in set(sys.modules) - before}})))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return copy_tree(tmp_path / "tree", tiny=True)


def optional_modules_after(tree: Tree, statement: str) -> set[str]:
    """The optional dependencies that ``statement`` imports."""
    ran = tree.run(BROUGHT.format(statement=statement))
    assert ran.code == 0, ran.err
    return set(json.loads(ran.out)) & OPTIONAL


def test_import_brings_no_optional_dependency(tree: Tree) -> None:
    assert optional_modules_after(tree, "from nanscan import *") == set()


def test_an_optional_dependency_would_be_found(tree: Tree) -> None:
    assert optional_modules_after(tree, "import nanscan, rich") == {"rich"}
    (tree.root / "nanscan" / "scanning.py").open("a").write("\nimport sklearn\n")
    assert "sklearn" in optional_modules_after(tree, "from nanscan import *")


def test_import_does_not_bring_the_compiler_of_torch_along(tree: Tree) -> None:
    """It takes longer to import than everything else together."""
    ran = tree.run("import sys; from nanscan import *; print('torch._dynamo' in sys.modules)")
    assert (ran.out.strip(), ran.code) == ("False", 0), ran.err


def test_import_compiles_nothing_and_touches_no_file(tree: Tree, tmp_path: Path) -> None:
    compiler, calls = fake_compiler(tmp_path, "exit 1")
    ran = tree.run("from nanscan import *; import nanscan.engine.build, nanscan.engine.info", CXX=compiler)
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    assert not calls.exists()
    assert not tree.cache.exists()


def test_a_compilation_at_import_would_be_found(tree: Tree, tmp_path: Path) -> None:
    compiler, calls = fake_compiler(tmp_path, "exit 1")
    (tree.root / "nanscan" / "__init__.py").open("a").write(
        "\nfrom nanscan.engine.build import load_native\nload_native()\n"
    )
    tree.run("import nanscan", CXX=compiler)
    assert calls.exists()


@pytest.mark.parametrize("value", ["nonsense", "native"])
def test_import_never_fails_over_the_engine(value: str, tree: Tree) -> None:
    ran = tree.run("import nanscan; print('imported')", NANSCAN_ENGINE=value, PATH="/nowhere")
    assert (ran.code, ran.out, ran.err) == (0, "imported\n", "")


def test_import_works_without_the_sources(tree: Tree) -> None:
    (tree.root / "csrc" / "build.json").unlink()
    code = "import torch, nanscan; print(nanscan.scan([torch.ones(4)]).norm)"
    ran = tree.run(code)
    assert ran.out == "2.0\n", ran.err
    assert "nanscan's C++ sources are missing: no build.json in" in ran.err
