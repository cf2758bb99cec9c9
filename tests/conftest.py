"""What every test shares: the list of devices, the engines, and how thoroughly hypothesis looks."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from nanscan.engine import Engine
from nanscan.engine.build import native_outcome
from nanscan.engine.native import NativeEngine
from nanscan.engine.torch_engines import EagerEngine, ReferenceEngine
from tests.cli_server import server as server  # a fixture

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
ENGINES = ["reference", "eager", "native"]
REQUIRE_CUDA = os.environ.get("NANSCAN_REQUIRE_CUDA") == "1"
REQUIRE_NATIVE = os.environ.get("NANSCAN_REQUIRE_NATIVE") == "1"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; its children would not hear Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

_phases = [phase for phase in Phase if phase is not Phase.explain]  # it takes minutes, to say little
_quiet = {"deadline": None, "phases": _phases, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("nanscan", max_examples=100, derandomize=True, **_quiet)  # the same examples at every run
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
def engine(request: pytest.FixtureRequest) -> Engine:
    """Every engine."""
    return load_engine(str(request.param))


@pytest.fixture(params=ENGINES[1:], scope="session")
def fast_engine(request: pytest.FixtureRequest) -> Engine:
    """Every engine but the reference: for tests that compare with it."""
    return load_engine(str(request.param))


def load_engine(name: str) -> Engine:
    """An engine by name. Without a native one the test is skipped, or fails where NANSCAN_REQUIRE_NATIVE=1."""
    if name != "native":
        return {"eager": EagerEngine, "reference": ReferenceEngine}[name]()
    outcome = native_outcome()
    if outcome.value is None:
        (pytest.fail if REQUIRE_NATIVE else pytest.skip)(f"no native engine: {outcome.why} {outcome.remedy}")
    return NativeEngine(outcome.value)


@pytest.fixture(params=[0, 1 << 62], ids=["fused-divides", "scaled-in-place"])
def either_way_of_clipping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clip a fused optimizer's gradients both ways, whatever their size: by its own divisor, and in place before it."""
    monkeypatch.setattr("nanscan.clipping.clip_step._FUSED_DIVIDES_FROM", request.param)
