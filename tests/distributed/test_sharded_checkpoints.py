"""Checkpoints of runs on several ranks: resumed bit for bit, on any number of ranks, refused and chosen together."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import nanscan
from nanscan.manager.sharded.marker import MARKER
from tests.distributed.layouts import fresh
from tests.ranks import Ranks

RUNS = [
    ("fsdp", 2, True),
    ("fsdp", 4, False),
    ("tensor_parallel", 2, False),
    ("mixed", 2, True),
    ("pipeline", 2, False),
    ("hybrid", 4, True),
    ("two_dimensions", 4, False),
    ("part_mesh", 4, True),
    ("ddp_with_group", 2, True),
]


SCENARIOS = "tests.distributed.checkpoint_scenarios:"


@pytest.fixture
def two(worlds: dict[int, Ranks]) -> Ranks:
    """Two processes."""
    return worlds[2]


@pytest.mark.parametrize(("name", "size", "background"), RUNS)
def test_a_resumed_run_goes_on_bit_for_bit(
    worlds: dict[int, Ranks], tmp_path: Path, name: str, size: int, background: bool
) -> None:
    saved = worlds[size].run(SCENARIOS + "save_and_go_on", name, str(tmp_path), background)
    resumed = worlds[size].run(SCENARIOS + "restore_and_go_on", name, str(tmp_path))
    kind = "step-00000003.pt" if name == "ddp_with_group" else "step-00000003"
    for (path, at_save, later), (at_restore, went_on, facts) in zip(saved, resumed, strict=True):
        assert Path(path) == tmp_path / kind
        assert at_restore == at_save and went_on == later
        assert facts == (3, 1, {"loss": 0.5}, (), 0)


def alone(folder: Path) -> dict[str, Any]:
    """The values that a plain process without a process group restores."""
    model = fresh()
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    optimizer = nanscan.wrap(inner, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    with nanscan.CheckpointManager(folder) as manager:
        restored = manager.restore(model=model, optimizer=optimizer, scheduler=scheduler)
        assert restored is not None and restored.step == 3
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, Any] = {name: value.double().tolist() for name, value in model.state_dict().items()}
    for param, state in inner.state.items():
        found.update({f"{names[id(param)]}/{key}": value.double().tolist() for key, value in state.items()})
    return {**found, "lr": scheduler.get_last_lr(), "steps": optimizer._steps}


@pytest.mark.parametrize("name", ["fsdp", "two_dimensions"])
def test_saved_on_four_restored_on_two_and_on_one(worlds: dict[int, Ranks], tmp_path: Path, name: str) -> None:
    (_, at_save, _), *_ = worlds[4].run(SCENARIOS + "save_and_go_on", name, str(tmp_path), True)
    for values, step, passed, _ in worlds[2].run(SCENARIOS + "values_after_restore", "fsdp", str(tmp_path)):
        assert values == at_save and step == 3 and passed == []
    assert alone(tmp_path) == at_save


@pytest.mark.parametrize("name", ["hybrid", "two_dimensions"])
def test_saved_by_one_process_restored_on_shards(worlds: dict[int, Ranks], tmp_path: Path, name: str) -> None:
    (_, at_save, _), _ = worlds[2].run(SCENARIOS + "save_and_go_on", "ddp_with_group", str(tmp_path), False)
    for values, step, *_ in worlds[4].run(SCENARIOS + "values_after_restore", name, str(tmp_path)):
        assert values == at_save and step == 3


@pytest.mark.parametrize("background", [False, True])
def test_a_nan_on_one_rank_is_refused_on_all(two: Ranks, tmp_path: Path, background: bool) -> None:
    answers = two.run(SCENARIOS + "a_nan_on_one_rank", str(tmp_path), background)
    assert answers[0] == answers[1]
    said, kept, left = answers[0]
    assert said.startswith("NonFiniteError") and "on no rank" in said
    assert "'model[\"down.weight\"]' on rank 1 has 1 NaN, 0 Inf of 40 (first at [4, 3])" in said
    assert kept == ["step-00000001"] and [name for name in left if name.startswith(("step", ".step"))] == kept


def two_checkpoints(ranks: Ranks, folder: Path) -> Any:
    """Steps 3 and, the same content under a later name made by a save of its own, 4; returns the values of step 3."""
    (_, at_save, _), *_ = ranks.run(SCENARIOS + "save_and_go_on", "fsdp", str(folder), False)
    ranks.run(SCENARIOS + "save_later", str(folder), 4)
    return at_save


@pytest.mark.parametrize("damage", ["flip", "truncate", "gone", "marker", "rank file"])
def test_a_damaged_checkpoint_is_passed_over_on_all_ranks(two: Ranks, tmp_path: Path, damage: str) -> None:
    at_save = two_checkpoints(two, tmp_path)
    folder = tmp_path / "step-00000004"
    name = {"marker": MARKER, "rank file": "rank-00001.pt"}.get(damage, "__1_0.distcp")
    data = bytearray((folder / name).read_bytes())
    if damage == "gone":
        (folder / name).unlink()
    else:
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(bytes(data[:-8] if damage == "truncate" else data))
    answers = two.run(SCENARIOS + "values_after_restore", "fsdp", str(tmp_path))
    for values, step, passed, said in answers:
        assert step == 3 and values == at_save
        assert [name for name, _ in passed] == ["step-00000004"] and name in passed[0][1]
        assert re.search("corrupt|can't be read", passed[0][1]) and any("passed over" in text for text in said)
    assert answers[0][2] == answers[1][2]


def test_an_incomplete_checkpoint_is_never_chosen_and_goes_with_the_next_save(two: Ranks, tmp_path: Path) -> None:
    at_save = two_checkpoints(two, tmp_path)
    (tmp_path / "step-00000004" / MARKER).unlink()
    for values, step, passed, said in two.run(SCENARIOS + "values_after_restore", "fsdp", str(tmp_path)):
        assert step == 3 and values == at_save
        assert passed[0][0] == "step-00000004" and "incomplete" in passed[0][1] and "incomplete" in said[0]
    two.run(SCENARIOS + "save_later", str(tmp_path), 5)
    assert sorted(os.listdir(tmp_path))[-2:] == ["step-00000003", "step-00000005"]


def test_a_step_saved_twice_is_replaced(two: Ranks, tmp_path: Path) -> None:
    two_checkpoints(two, tmp_path)
    before = (tmp_path / "step-00000004" / MARKER).read_text()
    two.run(SCENARIOS + "save_later", str(tmp_path), 4)
    assert (tmp_path / "step-00000004" / MARKER).read_text() != before
    assert [name for name in sorted(os.listdir(tmp_path)) if "step" in name] == ["step-00000003", "step-00000004"]


def test_which_are_due_and_which_stay_is_decided_together(two: Ranks, tmp_path: Path) -> None:
    for saved, kept, best, step, not_due, due in two.run(SCENARIOS + "rhythm", str(tmp_path)):
        assert saved == [f"step-{step:08d}" for step in (2, 4, 6, 8, 10, 12)]
        assert kept == ["step-00000004", "step-00000010", "step-00000012"]
        assert (best, step, not_due, due) == ("step-00000004", 4, None, "step-00000021")


def test_a_signal_to_one_rank_ends_all_at_the_same_step(two: Ranks, tmp_path: Path) -> None:
    assert two.run(SCENARIOS + "stop_on_one_rank", str(tmp_path)) == [(3, ["step-00000003"])] * 2


def test_what_one_rank_can_not_save_is_an_error_on_all(two: Ranks, tmp_path: Path) -> None:
    (said, left), (same, _) = two.run(SCENARIOS + "one_rank_can_not", str(tmp_path))
    assert said == same and [name for name in left if "step" in name] == ["step-00000004"]
    assert '["extra"]["x"]' in said[0] and "extra must be a dict, got int" in said[1]
    assert "the ranks [0, 1] save different steps together: [1, 2]" in said[2]


def test_buffers_are_each_ranks_own_and_weights_that_differ_are_refused(two: Ranks, tmp_path: Path) -> None:
    for rank, (seen, said, kept) in enumerate(two.run(SCENARIOS + "buffers_and_weights_apart", str(tmp_path))):
        assert seen == [float(rank)] * 3 and kept == ["step-00000001"]
        assert said.startswith("CheckpointError: 'down.bias' is not the same on ranks 0 and 1")


def test_all_ranks_restore_all_parts_or_none(two: Ranks, tmp_path: Path) -> None:
    answers = two.run(SCENARIOS + "a_part_that_does_not_fit", str(tmp_path))
    for strict, same, alone, kept in answers:
        assert "does not match the" in strict and "'new'" in strict and same
        assert "the state of the loader can't be loaded" in alone and kept


def test_what_is_not_there_yet_says_so(two: Ranks, tmp_path: Path) -> None:
    for zero, average in two.run(SCENARIOS + "not_there_yet", str(tmp_path)):
        assert zero.startswith("NotImplementedError") and "ZeroRedundancyOptimizer" in zero
        assert average.startswith("NotImplementedError") and 'extra["average"]["weight"]' in average


def test_torch_alone_reads_the_folder(two: Ranks, tmp_path: Path) -> None:
    assert two.run(SCENARIOS + "by_torch_alone", str(tmp_path)) == [True, True]


def test_ranks_of_a_smaller_group_save_by_themselves(worlds: dict[int, Ranks], tmp_path: Path) -> None:
    answers = worlds[4].run(SCENARIOS + "by_pairs", str(tmp_path))
    assert answers == [(True, "0"), (True, "0"), (True, "2"), (True, "2")]


def test_errors_of_the_background_come_at_the_same_call_on_all_ranks(two: Ranks, tmp_path: Path) -> None:
    first, second = two.run(SCENARIOS + "told_at_the_same_call", str(tmp_path))
    assert first == second and sorted(first) == ["", "", "NonFiniteError"]
