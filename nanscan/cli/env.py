"""`nanscan env`: versions, the engine that runs and why, CUDA findings and folders: what a bug report needs."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import click

from nanscan._version import __version__
from nanscan.cli.output import common_options, print_json, printable
from nanscan.cli.verb import Verb
from nanscan.config import load_config
from nanscan.tables import print_facts

PACKAGES = ("torch", "numpy", "filelock", "pybind11", "ninja", "scikit-learn", "rich", "click")


@click.command(
    "env",
    cls=Verb,
    short_help="Show versions, the engine and why, CUDA findings, cache folder.",
    examples={"nanscan env": "for a bug report", "nanscan env --json | jq .engine.engine": "which engine runs"},
    exits="0, or 1 if the engine that NANSCAN_ENGINE or NANSCAN_CUDA insists on can't be had here.",
)
@common_options
def command(as_json: bool) -> int:
    """Print what a bug report needs. Nothing is compiled for it."""
    findings = collect()
    code = 1 if _unmet(findings["engine"]) else 0
    if as_json:
        print_json({"exit_code": code, **findings})
    else:
        print_facts({name: printable(value) for name, value in _rows(findings).items()}, sys.stdout)
    return code


def _unmet(engine: dict[str, Any]) -> bool:
    config = load_config()
    wants_native = config.engine == "native" and engine["native"] == "failed"
    return wants_native or (config.cuda == "1" and engine["cuda"] == "failed")


def collect() -> dict[str, Any]:
    """Everything that is printed, as plain data."""
    import torch

    from nanscan import engine_info

    return {
        "nanscan": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "packages": {name: _version(name) for name in PACKAGES},
        "engine": engine_info().to_dict(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith("NANSCAN_")},
    }


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _rows(findings: dict[str, Any]) -> dict[str, str]:
    from nanscan import engine_info

    packages = (f"{name} {version or '-'}" for name, version in findings["packages"].items())
    variables = (f"{name}={value}" for name, value in findings["variables"].items())
    return {
        **{name: str(findings[name]) for name in ("nanscan", "python", "system", "torch")},
        "torch's cuda": findings["torch_cuda"] or "none (a CPU build)",
        "gpus": ", ".join(findings["gpus"]) or "none visible",
        **engine_info().rows(),
        "packages": ", ".join(packages),
        "variables": ", ".join(variables) or "no NANSCAN_* is set",
    }
