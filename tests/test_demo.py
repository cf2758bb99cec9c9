"""The demo's promise: the same fault kills the plain run and costs the guarded one a few steps."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nanscan.demo.data import batch_count, batches, load_digits
from nanscan.demo.model import DigitNet, absent_classes, balanced_loss

EPOCHS = 6
STEPS = EPOCHS * 23  # 1,437 digits in batches of 64


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The parsed `--json` output of one short run in a process of its own, and its log."""
    log = tmp_path_factory.mktemp("demo") / "logs" / "run.jsonl"
    command = [sys.executable, "-m", "nanscan", "demo", "--json", "--epochs", str(EPOCHS), "--rounds", "40"]
    done = subprocess.run([*command, "--log", str(log)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), log


def test_plain_run_dies_of_the_fault(demo: tuple[dict[str, Any], Path]) -> None:
    plain = demo[0]["plain"]
    assert plain["finite"] is False
    assert plain["bad_weights"] == plain["weights"] > 50_000
    assert plain["accuracy"] < 0.2
    assert plain["skipped"] == 0 and plain["steps"] == STEPS


def test_guarded_run_survives_it_and_learns(demo: tuple[dict[str, Any], Path]) -> None:
    guarded = demo[0]["guarded"]
    assert guarded["finite"] is True and guarded["bad_weights"] == 0
    assert guarded["accuracy"] > 0.92
    assert guarded["steps"] == STEPS
    assert 0 < guarded["skipped"] < STEPS / 10


def test_both_runs_meet_the_same_fault_at_the_same_step(demo: tuple[dict[str, Any], Path]) -> None:
    plain, guarded = demo[0]["plain"], demo[0]["guarded"]
    assert plain["first_bad_step"] == guarded["first_bad_step"]
    assert plain["absent_classes"] == guarded["absent_classes"] != []


def test_culprit_is_named_with_its_index(demo: tuple[dict[str, Any], Path]) -> None:
    pattern = r"grad of 'stem.weight' has (\d+) NaN, 0 Inf of 6144 \(first at \[(\d+), (\d+)\]\)"
    found = re.fullmatch(pattern, demo[0]["guarded"]["culprit"])
    assert found is not None, demo[0]["guarded"]["culprit"]
    count, unit, pixel = map(int, found.groups())
    assert count % 64 == 0 and unit * 64 + pixel <= 6144 - count  # whole rows: a dead unit passes no gradient at all


def test_log_tells_of_every_skip(demo: tuple[dict[str, Any], Path]) -> None:
    document, log = demo
    assert document["log"] == str(log)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    skipped = [line for line in lines if line.get("skipped")]
    assert len(skipped) == document["guarded"]["skipped"]
    assert skipped[0]["step"] == document["guarded"]["first_bad_step"]
    assert skipped[0]["bad"][0]["name"] == "stem.weight"
    assert any(row["name"] == "loss" for row in skipped[0]["bad"])


def test_costs_are_measured_on_equal_work(demo: tuple[dict[str, Any], Path]) -> None:
    cost = demo[0]["cost"]
    assert cost["rounds"] == 40
    assert cost["tensors"] == len(list(DigitNet().parameters()))
    assert cost["elements"] == demo[0]["plain"]["weights"]
    assert cost["step_us"] > 0 and cost["loop_us"] > 0


def test_first_bad_batch_really_lacks_the_class_that_is_named(demo: tuple[dict[str, Any], Path]) -> None:
    wanted = demo[0]["plain"]["first_bad_step"]
    drawn = list(batches(load_digits(0), EPOCHS, 64, seed=0))
    assert len(drawn) == STEPS == batch_count(load_digits(0), EPOCHS, 64)
    lacking = [step for step, (_, labels) in enumerate(drawn) if absent_classes(labels)]
    assert lacking[0] == wanted
    assert absent_classes(drawn[wanted][1]) == demo[0]["plain"]["absent_classes"]


def test_balanced_loss_weighs_classes_equally() -> None:
    labels = torch.tensor([0] * 30 + list(range(1, 10)))
    logits = torch.randn(39, 10, generator=torch.Generator().manual_seed(0))
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    expected = torch.stack([losses[labels == digit].mean() for digit in range(10)]).mean()
    assert balanced_loss(logits, labels).item() == pytest.approx(expected.item(), rel=1e-6)


def test_unlucky_seed_is_said_in_words(tmp_path: Path) -> None:
    """One epoch whose batches all hold every class: nothing goes wrong, and the text says so."""
    clean = next(seed for seed in range(50) if not _lacks(seed))
    command = [sys.executable, "-m", "nanscan", "demo", "--epochs", "1", "--rounds", "5", "--seed", str(clean)]
    done = subprocess.run([*command, "--log", str(tmp_path / "run.jsonl")], capture_output=True, text=True, timeout=120)
    assert "nothing went wrong" in done.stdout
    assert done.stderr == ""  # progress is for terminals


def _lacks(seed: int) -> bool:
    return any(absent_classes(labels) for _, labels in batches(load_digits(seed), 1, 64, seed))
