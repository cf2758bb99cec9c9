"""Each layout trains as one process does: norms, clipping, decisions, reports and weights."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.layouts import FOUR_ONLY, LAYOUTS
from tests.distributed.scenarios import alone
from tests.ranks import Ranks

CASES = [(name, size) for name in LAYOUTS for size in (2, 4) if size == 4 or name not in FOUR_ONLY]
SHARDED = ("down.weight", (4, 3), None)


def assert_same_run(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["skipped"] == wanted["skipped"]
    assert found["norm"] == pytest.approx(wanted["norm"], rel=1e-6, nan_ok=True)
    assert found["factor"] == pytest.approx(wanted["factor"], rel=1e-6)
    for name, values in wanted["weights"].items():
        if name in found["weights"]:
            flat, other = sum_of(found["weights"][name]), sum_of(values)
            assert flat == pytest.approx(other, rel=1e-6, abs=1e-9), name
    for report, other in zip(found["report"], wanted["report"], strict=True):
        for key in ("nan_count", "inf_count", "numel", "action", "finite"):
            assert report[key] == other[key], key
        assert rows(report) == rows(other)


def sum_of(values: Any) -> list[float]:
    return [x for row in values for x in sum_of(row)] if isinstance(values, list) else [values]


def rows(report: dict[str, Any]) -> list[Any]:
    keys = ("name", "shape", "nan_count", "inf_count", "first_bad", "dtype", "kind")
    return sorted([[row[key] for key in keys] for row in report["bad"]], key=repr)


@pytest.mark.parametrize(("name", "size"), CASES)
def test_a_run_is_that_of_one_process_with_one_collective_a_step(
    worlds: dict[int, Ranks], name: str, size: int
) -> None:
    found = worlds[size].run("train", name, SHARDED)
    wanted = alone(SHARDED, frozen=name == "frozen")
    assert wanted["skipped"] == [False, False, True, False, False]
    for one in found:
        assert_same_run(one, wanted)
        assert one["report"] == found[0]["report"]
        first, *others = one["calls"]
        assert [calls.count("allreduce_") for calls in others] == [0 if name == "ddp" else 1 + by_torch(name)] * 4
        assert (first.count("allreduce_") - by_torch(name), first.count("allgather_")) == expected_at_first(name)
        bad = others.pop(1)
        assert not any("allgather_" in calls for calls in others) and bad.count("allgather_") <= 1


def by_torch(name: str) -> int:
    """The gradients that torch has to add up first: partial sums."""
    return 2 if name == "sequence_parallel" else 0


def expected_at_first(name: str) -> tuple[int, int]:
    """(sums, gathers): what ranks hold is told in full only where a checksum says that it isn't the same everywhere."""
    if name in ("ddp", "ddp_with_group", "zero1"):
        return 1, 0
    return {"two_dimensions": (2, 4), "part_mesh": (2, 4), "pipeline": (2, 3)}.get(name, (1, 1))


@pytest.mark.parametrize(
    ("name", "size", "plant", "rank"),
    [
        ("fsdp", 2, ("up.bias", (7,), None), 1),
        ("fsdp", 4, ("head.bias", (2,), None), 2),  # the last of its shards is empty
        ("mixed", 4, ("norm.weight", (3,), 2), 2),
        ("tensor_parallel", 2, ("norm.bias", (0,), 1), 1),
        ("hybrid", 4, ("down.weight", (4, 1), 3), 3),
        ("two_dimensions", 4, ("up.weight", (5, 2), None), 1),
        ("pipeline", 4, ("head.weight", (1, 4), 3), 3),
        ("ddp_with_group", 4, ("head.weight", (1, 4), 3), 3),
    ],
)
def test_a_nan_on_one_rank_is_named_on_all_with_its_rank_and_its_place_in_the_whole_tensor(
    worlds: dict[int, Ranks], name: str, size: int, plant: Any, rank: int
) -> None:
    found = worlds[size].run("train", name, plant)
    wanted = alone((*plant[:2], None))
    for one in found:
        assert_same_run(one, wanted)
        assert one["report"] == found[0]["report"]
        (row,) = one["report"][2]["bad"]
        assert (row["name"], tuple(row["first_bad"]), row["rank"]) == (plant[0], plant[1], rank)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_nan_in_one_micro_batch_of_one_rank_skips_the_step_on_all(worlds: dict[int, Ranks], name: str) -> None:
    found = worlds[2].run("train", name, ("loss", (1,), 1), 2)
    wanted = alone(("loss", (1,), 0), micro=2)
    assert wanted["skipped"] == [False, False, True, False, False]
    for one in found:
        assert one["skipped"] == wanted["skipped"] and one["report"] == found[0]["report"]
        assert one["norm"] == pytest.approx(wanted["norm"], rel=1e-6, nan_ok=True)
        assert {row["name"] for row in one["report"][2]["bad"]} == {row["name"] for row in wanted["report"][2]["bad"]}
        assert one["report"][2]["nan_count"] == wanted["report"][2]["nan_count"] == 131
