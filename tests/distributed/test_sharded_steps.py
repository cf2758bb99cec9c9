"""Steps on shards: repair, errors, decisions, scalers; what is set up by itself and what is refused."""

from __future__ import annotations

import math

import pytest

from tests.distributed.layouts import FOUR_ONLY, LAYOUTS
from tests.ranks import Ranks


@pytest.fixture
def two(worlds: dict[int, Ranks]) -> Ranks:
    """Two processes."""
    return worlds[2]


def test_zero_repairs_shards_and_keeps_replicas_the_same(two: Ranks) -> None:
    for weight, whole, local, bad in two.run("zero_on_shards_and_replicas"):
        assert weight == [0.0, -1.0, -2.0, -3.0, 1.0]
        assert whole == local == [1.0, 0.0] and bad == 2


def test_raise_raises_on_all_and_names_the_place_in_the_whole_tensor(two: Ranks) -> None:
    for error, weight, kept in two.run("raise_together"):
        assert (
            error.startswith("NonFiniteError") and "grad of 'w' on rank 1 has 1 NaN, 0 Inf of 4 (first at [3])" in error
        )
        assert weight == [1.0] * 4 and kept


def test_a_function_decides_once(two: Ranks) -> None:
    (asked, weight), (nobody, same) = two.run("one_decides")
    assert len(asked) == 1 and nobody == [] and weight == same == [0.0, -1.0, -2.0, 1.0]


def test_a_rank_without_gradients_takes_part(two: Ranks) -> None:
    assert two.run("one_rank_without_gradients") == [(None, 3.0)] * 2


def test_nobody_waits_for_a_rank_that_can_not_scan(two: Ranks) -> None:
    (waiting, weight), (own, same) = two.run("one_rank_can_not_scan")
    assert "rank 1 could not scan its gradients at step 0" in waiting and "grad of 'w' has no memory" in own
    assert weight == same == [1.0, 1.0]


def test_a_bad_parameter_is_named_in_the_whole_tensor(two: Ranks) -> None:
    for error, rows, same in two.run("parameters_go_bad"):
        assert error.startswith("NonFiniteError") and rows == [("w", 1, (3,), (4,))] and same


def test_all_bad_tensors_are_told_to_all_in_two_collectives_more(two: Ranks) -> None:
    for calls, rows, nans, same in two.run("several_bad_tensors"):
        assert calls == ["allreduce_", "allgather_", "allgather_"] and same and nans == 131
        assert {rank for _, rank in rows} == {0, 1} and len({name for name, _ in rows}) == 8


def test_an_observed_loss_brings_ddp_its_one_collective(two: Ranks) -> None:
    for calls, skipped, text in two.run("a_loss_on_one_rank_of_ddp"):
        assert (
            calls == ["allreduce_", "allgather_"]
            and skipped
            and text == "loss on rank 1 has 1 NaN, 0 Inf of 1 (first at [])"
        )


def test_what_is_set_up_by_itself(two: Ranks) -> None:
    for found in two.run("what_is_automatic"):
        assert found == {
            "ddp": ([0, 1], True),
            "ddp and more": ([0, 1], False),
            "ddp off": None,
            "fsdp": ([0, 1], False),
            "fsdp off": None,
            "plain": None,
        }


def test_what_is_not_there_yet_says_so(two: Ranks) -> None:
    for texts in two.run("refused"):
        assert "FullyShardedDataParallel (FSDP1)" in texts.pop("fsdp1")
        for name, text in texts.items():
            assert "does not take sharded parameters" in text, name


@pytest.mark.parametrize(
    ("name", "own"),  # torch's own does not take DTensors and plain tensors together
    [("fsdp", False), ("fsdp", True), ("tensor_parallel", True)],
    ids=["torch-fsdp", "nanscan-fsdp", "nanscan-tensor_parallel"],
)
def test_gradient_scalers_skip_and_back_off_on_all_ranks(two: Ranks, name: str, own: bool) -> None:
    for seen, same in two.run("scaled", name, own):
        assert same and [(skipped, scale) for skipped, scale, _ in seen] == [(False, 4.0), (True, 2.0), (False, 2.0)]


@pytest.mark.parametrize("name", ["fsdp", "ddp"])
def test_adaptive_clipping_follows_the_norm_of_the_whole_model(two: Ranks, name: str) -> None:
    for seen, same in two.run("adaptive", name):
        assert same and seen[-1][1] < 1.0


SIZES = [(name, 4 if name in FOUR_ONLY else 2) for name in LAYOUTS if name not in ("pipeline", "frozen", "zero1")]


@pytest.mark.parametrize(("name", "size"), SIZES)
@pytest.mark.parametrize("order", [2.0, math.inf, 1.0])
def test_clip_grad_norm_is_that_of_one_process(worlds: dict[int, Ranks], name: str, size: int, order: float) -> None:
    for norm, wanted, _, gap, kind in worlds[size].run("clip_as_torch", name, order):
        assert norm == pytest.approx(wanted, rel=1e-6) and gap < 1e-6
        assert kind == ("DTensor" if name in ("fsdp", "hybrid") else "Tensor")


def test_clip_grad_norm_leaves_gradients_with_a_nan_alone_on_all_ranks(two: Ranks) -> None:
    (norm, kept, text), (other, same, named) = two.run("clip_with_a_nan")
    assert math.isnan(norm) and math.isnan(other) and kept and same
    assert "another rank holds a NaN or Inf" in text and "parameters[0] has 1 NaN" in named.replace("'", "")
