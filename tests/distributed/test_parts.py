"""The other parts on shards and replicas: each does what docs/distributed.md says, or says that it doesn't."""

from __future__ import annotations

import pytest

from tests.distributed.clip_scenarios import HARD
from tests.ranks import Ranks, Scenarios


@pytest.fixture
def two(worlds: dict[int, Ranks]) -> Scenarios:
    return worlds[2].of("tests.distributed.parts_scenarios")


def test_agc_works_on_replicas_and_refuses_shards(two: Scenarios) -> None:
    one, other = two.run("agc")
    said, skipped, weights = one
    assert one == other and skipped == 1 and len(weights) == 6
    assert said.startswith("NotImplementedError: AdaptiveClip('agc') does not take sharded parameters")
    assert "'zclip' or 'autoclip'" in said


def test_torchs_scaler_fails_for_shards_beside_plain_tensors(two: Scenarios) -> None:
    for said in two.run("torch_scaler_beside_plain_tensors"):
        assert said.startswith("RuntimeError") and "mixed torch.Tensor and DTensor" in said


def test_clip_grad_norm_exchanges_once_along_one_dimension(two: Scenarios) -> None:
    assert two.run("clip_alone") == [(["allgather_"], "DTensor")] * 2


def test_looks_need_no_collective(two: Scenarios) -> None:
    assert two.run("look_only_here") == [[], []]


def test_preflight_after_fully_shard_looks_at_this_ranks_part(two: Scenarios) -> None:
    healthy, bad = two.run("preflight_without_a_batch")
    assert not any("NaN" in found for found in healthy) and any("2.weight: 1 NaN" in found for found in bad)


def test_torchs_state_dict_takes_the_inner_optimizer_and_is_no_step_of_the_guard(two: Scenarios) -> None:
    assert two.run("torch_state_dict") == [(0, 6, True)] * 2


def test_find_origin_refuses_shards_and_says_what_works(two: Scenarios) -> None:
    for texts in two.run("find_origin_of_shards"):
        for said in texts:
            assert said.startswith("NotImplementedError") and "nanscan.trace()" in said


@pytest.mark.parametrize("name", HARD)
def test_the_norm_of_shards_is_right_for_any_finite_values(worlds: dict[int, Ranks], name: str) -> None:
    one, other = worlds[2].of("tests.distributed.clip_scenarios").run("clip_hard", name)
    for norm, wanted, _, gap, guarded in (one, other):
        assert norm == pytest.approx(wanted, rel=1e-6) and gap < 1e-2
        assert name == "empty inf" or guarded == pytest.approx(wanted, rel=1e-6)  # a guard's norm is always the 2-norm
    assert (one[0], one[4]) == (other[0], other[4])


@pytest.mark.parametrize("order", [0.0, -1.0, float("-inf"), 0.5])
def test_unusual_orders_are_what_torch_gives_in_one_process(worlds: dict[int, Ranks], order: float) -> None:
    run = worlds[2].of("tests.distributed.clip_scenarios").run
    for how in (("shards", False), ("replicas", False), ("shards", True), ("replicas", True)):
        for (wanted, clipped), (norm, ours) in run("clip_unusual", order, *how):
            assert norm == pytest.approx(wanted, rel=1e-6), how
            assert sum(ours, []) == pytest.approx(sum(clipped, []), rel=1e-5), how
