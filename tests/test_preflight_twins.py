"""Each code finds its bad twin and is silent on the healthy brother."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

import nanscan
from nanscan.preflight_checks.codes import CODES
from tests import preflight_step_twins
from tests.preflight_twins import TWINS, Twin, mlp

assert preflight_step_twins  # enters its pairs into TWINS


def run(twin: Twin, bad: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    return twin.make(bad)


@pytest.mark.parametrize("twin", TWINS, ids=lambda t: f"{t.code}-{t.make.__name__}")
def test_the_bad_twin_is_found_with_place_and_numbers(twin: Twin) -> None:
    findings = nanscan.preflight(**run(twin, bad=True))
    found = [f for f in findings if f.code == twin.code]
    assert found, str(findings)
    assert (found[0].severity, found[0].where) == (twin.severity, twin.where)
    assert twin.says in found[0].message
    assert found[0].fix


@pytest.mark.parametrize("twin", TWINS, ids=lambda t: f"{t.code}-{t.make.__name__}")
def test_the_healthy_brother_is_not(twin: Twin) -> None:
    findings = nanscan.preflight(**run(twin, bad=False))
    assert [f for f in findings if f.code == twin.code] == []


def test_a_full_disk_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    assert "NS803" not in {f.code for f in nanscan.preflight(model)}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))  # type: ignore[attr-defined]
    (finding,) = nanscan.preflight(model)
    assert finding.code == "NS803" and "are free" in finding.message


def test_every_code_has_a_twin() -> None:
    assert set(CODES) - {twin.code for twin in TWINS} == {"NS803"}


@pytest.mark.parametrize("twin", TWINS[::6], ids=lambda t: t.code)
def test_a_silenced_code_is_left_out(twin: Twin) -> None:
    findings = nanscan.preflight(**run(twin, bad=True), silence={twin.code})
    assert twin.code not in {f.code for f in findings}
