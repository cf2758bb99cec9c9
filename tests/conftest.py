"""What every test shares: the list of devices, the engines, and how thoroughly hypothesis looks."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, settings

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
ENGINES = ["reference", "eager", "native"]
REQUIRE_CUDA = os.environ.get("NANSCAN_REQUIRE_CUDA") == "1"
REQUIRE_NATIVE = os.environ.get("NANSCAN_REQUIRE_NATIVE") == "1"

_quiet = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("nanscan", max_examples=100, **_quiet)
settings.register_profile("deep", max_examples=5000, **_quiet)
settings.load_profile("nanscan")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        if REQUIRE_CUDA:
            pytest.fail("NANSCAN_REQUIRE_CUDA=1, but torch sees no CUDA device", pytrace=False)
        pytest.skip("torch sees no CUDA device")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Every device that a test should hold on."""
    return str(request.param)


@pytest.fixture(params=ENGINES, scope="session")
def engine(request: pytest.FixtureRequest) -> ModuleType:
    """Every engine, as the module with `scan`, `scan_grads`, `scale_grads_`, …"""
    return load_engine(str(request.param))


def load_engine(name: str) -> ModuleType:
    """The engine's module; the test is skipped, saying why, where the native one cannot be had."""
    try:
        module = importlib.import_module(f"nanscan.engine.{name}")
        module.scan([torch.zeros(1)])
    except (ImportError, RuntimeError) as error:
        if name != "native" or REQUIRE_NATIVE:
            raise
        pytest.skip(f"the native engine is not built: {error}")
    return module
