"""The project's own GPU tests, with skipping forbidden."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from benchmarks.gpu.build import ROOT
from benchmarks.gpu.result import Section


def run_tests() -> Section:
    """``pytest -m cuda`` under ``NANSCAN_REQUIRE_CUDA=1``: each test that needs a card runs, or fails."""
    section = Section()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "tests", "-m", "cuda", "-q", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", "--tb=short", "--maxfail=40"]
        environment = os.environ | {"NANSCAN_REQUIRE_CUDA": "1", "NANSCAN_REQUIRE_NATIVE": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        counts = _counts(report)
    section.figures = {"returncode": done.returncode, **counts, "output": done.stdout[-6000:]}
    ran = counts["tests"] - counts["skipped"]
    detail = f"{ran} ran, {counts['failures']} failed, {counts['errors']} errors, {counts['skipped']} skipped"
    section.check("GPU tests pass", done.returncode == 0 and ran > 0, detail)
    for name in counts["bad"][:20]:
        section.say(f"failed: {name}")
    return section


def _counts(report: Path) -> dict:
    """Totals and the names of what failed, from pytest's XML; zeros where pytest wrote none."""
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0, "bad": []}
    if not report.exists():
        return counts
    for suite in ET.parse(report).getroot().iter("testsuite"):
        for name in ("tests", "failures", "errors", "skipped"):
            counts[name] += int(suite.get(name, 0))
    for case in ET.parse(report).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            counts["bad"].append(f"{case.get('classname')}::{case.get('name')}")
    return counts
