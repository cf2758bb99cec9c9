"""Ranks that hold, train or have seen different things: the same verdict and report on all, and nobody waits."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Ranks, Scenarios


@pytest.fixture
def two(worlds: dict[int, Ranks]) -> Scenarios:
    return worlds[2].of("tests.distributed.unlike_scenarios")


@pytest.mark.parametrize("how", ["frozen", "absent", "left out"])
@pytest.mark.parametrize(("bad", "on"), [("weight", 1), ("bias", 0)])
def test_a_parameter_that_one_rank_does_not_train(two: Scenarios, how: str, bad: str, on: int) -> None:
    (seen, weight), other = two.run("plain", how, bad, on)
    assert (seen, weight) == other
    assert [(error, skipped) for error, skipped, _ in seen] == [(None, False), (None, True), (None, False)]
    assert weight == [0.0] * 3  # two steps of 0.25 * 2
    (row,) = seen[1][2]["bad"]
    assert (row["name"], row["rank"], row["first_bad"]) == (bad, on, [2])
    assert seen[0][2]["norm"] == pytest.approx(math.sqrt(6 * 4)) and seen[0][2]["numel"] == 6


def test_ddp_whose_optimizers_differ_shares_from_the_first_step_on(two: Scenarios) -> None:
    (seen, weight), other = two.run("ddp_left_out")
    assert (seen, weight) == other
    assert [tuple(step[:2]) for step in seen] == [(None, False), (None, True), (None, False)]
    assert [(row["name"], row["rank"]) for row in seen[1][3]] == [("4.bias", 0)]
    assert [shared for *_, shared in seen] == [True] * 3


def test_ddp_over_several_groups_is_decided_by_the_ranks_of_all(two: Scenarios) -> None:
    (actions, reports, weights), other = two.run("ddp_of_two_groups")
    assert actions == ["step", "skip", "step"] and (actions, reports, weights) == other
    assert {row["rank"] for row in reports[1]["bad"]} == {1}


@pytest.mark.parametrize("how", ["smaller group", "ignored"])
def test_parts_that_ddp_does_not_keep_equal_on_all_ranks_are_not_saved_as_one(
    two: Scenarios, tmp_path: Path, how: str
) -> None:
    for said in two.run("saved_with_parts_apart", str(tmp_path), how):
        assert said.startswith("CheckpointError") and "'own.4.bias' is not the same on ranks 0 and 1" in said


def test_a_loss_that_only_one_rank_observes_is_an_error_at_once(two: Scenarios) -> None:
    for said in two.run("only_one_rank_observes"):
        assert "the ranks are not at the same place" in said and "the optimized parameters (no observed loss)" in said
        assert "observe() where others do" in said and "process_group=False" in said


@pytest.mark.parametrize("how", ["loss", "no loss", "recovery", "false", "true"])
def test_a_guard_that_decides_alone_among_ranks_says_so_once(two: Scenarios, how: str) -> None:
    (quiet, _), (said, actions) = two.run("wrapped_without_ddp", how)
    alone = [text for text in said if "decides about its steps alone, although there are 2 ranks" in text]
    assert len(alone) == (how in ("loss", "no loss", "recovery"))
    assert actions == ["step", "step" if how == "recovery" else "skip", "step"]
    assert all("process_group=True" in text and "process_group=False" in text for text in alone)
    assert len(quiet) == (how in ("loss", "true"))  # before anything is wrong where there is a loss


@pytest.mark.parametrize("observed", [False, True])
def test_the_origin_that_one_rank_has_found_is_reported_by_all(two: Scenarios, observed: bool) -> None:
    (found, weights), (others, same) = two.run("origin_on_one_rank", observed)
    assert weights == same and [skipped for _, skipped, _ in found] == [False, True, False]
    origins = [steps[1][2]["origin"] for steps in (found, others)]
    assert origins[0] == origins[1] and (origins[0]["op"], origins[0]["phase"]) == ("aten.sqrt", "forward")
    assert "found on rank 1" in origins[0]["note"] and origins[0]["file"].endswith("unlike_scenarios.py")


def test_find_origin_of_ddp_answers_for_its_rank_and_leaves_nothing_behind(two: Scenarios) -> None:
    healthy, bad = two.run("searched_by_hand")
    assert healthy == ([None] * 3, True) and bad == ([None, ("aten.mul", "nan"), None], True)


def test_a_weight_that_is_bad_on_one_rank_is_named_there(two: Scenarios) -> None:
    assert two.run("a_weight_that_is_bad_on_one_rank") == [(True, []), (True, [("4.bias", 1)])]


def test_a_rank_whose_batches_run_out_under_join(two: Scenarios) -> None:
    assert two.run("inputs_that_run_out") == [(1, ["step", "skip", "step", "step"]), (1, ["step", "skip", "step"])]


@pytest.mark.parametrize("how", ["compiled", "bucket view", "static graph", "unused on one rank"])
def test_ranks_of_ddp_stay_equal_however_it_is_set_up(two: Scenarios, how: str) -> None:
    one, other = two.run("variants_of_ddp", how)
    assert one == other and one[0] == [False, True, False, False]


def test_the_log_of_two_ranks_has_each_checkpoint_once_and_names_ranks(two: Scenarios, tmp_path: Path) -> None:
    assert two.run("logged", str(tmp_path)) == [True, True]
    both, first, second = (lines(tmp_path / name) for name in ("run.jsonl", "rank0.jsonl", "rank1.jsonl"))
    for log, times in ((both, 1), (first, 1), (second, 0)):
        notes = [line for line in log if line.get("kind") == "checkpoint"]
        assert [line["step"] for line in notes if "error" not in line] == [2, 4, 6] * times
        assert all(line["bytes"] > 1000 for line in notes if "error" not in line)
        refused = [line for line in notes if "error" in line]
        assert [line["refused"] for line in refused] == [True] * times
        assert all("""model["4.weight"]' on rank 1""" in line["error"] for line in refused)
    for log in (first, second):
        skips = [line for line in log if line.get("skipped")]
        assert [line["step"] for line in skips] == [3, 4] and {row["rank"] for s in skips for row in s["bad"]} == {1}
        assert len([line for line in log if line.get("kind") == "rollback"]) == 1
    page = page_of(tmp_path / "rank0.jsonl")
    for said in ("2 of 6 steps were skipped", "1 rollback", "on rank 1 has 1 NaN", "step-00000006"):
        assert said in page, said


def page_of(log: Path) -> str:
    """What `nanscan report` makes of a log: its words on the terminal and its page."""
    command = [sys.executable, "-m", "nanscan", "report", str(log)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout + log.with_suffix(".html").read_text()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
