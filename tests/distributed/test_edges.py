"""Unusual layouts and misuse: each works, or says on every rank what is the matter."""

from __future__ import annotations

import math

import pytest
import torch.distributed as dist

from nanscan.distributed.groups import _made
from tests.distributed.edge_scenarios import POLICIES
from tests.ranks import Ranks, Scenarios

SCENARIOS = "tests.distributed.edge_scenarios"


@pytest.fixture
def two(worlds: dict[int, Ranks]) -> Scenarios:
    return worlds[2].of(SCENARIOS)


@pytest.fixture
def four(worlds: dict[int, Ranks]) -> Scenarios:
    return worlds[4].of(SCENARIOS)


@pytest.mark.parametrize("how", ["replaced", "added"])
def test_shards_that_come_after_wrap_are_judged_together(two: Scenarios, how: str) -> None:
    name = "2.weight" if how == "replaced" else "group1.param2"
    for skipped, text in two.run("shards_that_come_after_wrap", how):
        assert skipped and text == f"grad of '{name}' on rank 1 has 1 NaN, 0 Inf of 40 (first at [4, 7])"


def test_an_optimizer_made_before_fully_shard_hears_that_it_has_no_gradients(two: Scenarios) -> None:
    for said in two.run("optimizer_made_before_fully_shard"):
        assert "no gradients at step 0" in said


def test_two_optimizers_in_different_order_are_an_error(two: Scenarios) -> None:
    for errors, weights in two.run("two_in_different_order"):
        assert all("with several guarded optimizers, in the same order" in str(error) for error in errors)
        assert weights == [1.0, 1.0]


def test_a_group_that_lacks_shards_is_refused(two: Scenarios) -> None:
    for rank, said in enumerate(two.run("a_group_that_lacks_shards")):
        assert (
            said.startswith("ValueError")
            and f"ranks [{rank}], but parameters are sharded over the ranks [0, 1]" in said
        )


@pytest.mark.parametrize("late", [False, True], ids=["before wrap", "after wrap"])
def test_a_communication_hook_may_leave_gradients_that_differ(two: Scenarios, late: bool) -> None:
    assert two.run("ddp_whose_hook_does_not_reduce", late) == [(True, "{1}")] * 2


@pytest.mark.parametrize("given", [True, False], ids=["model", "no model"])
def test_micro_batches_that_are_held_back_can_not_be_dropped(two: Scenarios, given: bool) -> None:
    for said in two.run("held_back", True, given):
        assert all(text.startswith("NotImplementedError: check_microbatch(drop=True)") for text in said[:2])
        assert "set_requires_gradient_sync(True)" in said[0]
    for said in two.run("held_back", False, given):
        assert "check_microbatch sees the loss alone" in said[0] and said[1:] == ["", ""]


def test_micro_batches_that_are_reduced_are_dropped_on_all(two: Scenarios) -> None:
    for dropped, skipped, norm in two.run("every_micro_batch_reduced"):
        assert dropped == [False, True, False] and not skipped and norm > 0


def test_what_does_not_take_shards_names_what_does(two: Scenarios) -> None:
    for said in two.run("what_says_that_it_can_not"):
        for what in ("model", "optimizer", "safetensors"):
            assert said[what].startswith("CheckpointError") and "sharded tensors (DTensor)" in said[what]
            assert "nanscan.CheckpointManager(" in said[what] and "full_tensor()" in said[what]
        assert said["left"] == []
        assert said["preflight"].startswith("NotImplementedError: preflight with a batch does not take sharded")


def test_shards_in_another_model_hinder_no_search_that_does_not_write_to_them(two: Scenarios) -> None:
    for found, refused in two.run("an_origin_beside_shards"):
        assert found.startswith("None NaN came in with input 'input'") and "found on rank 1" in found
        assert refused.startswith("NotImplementedError: find_origin does not take sharded parameters")


def test_an_interrupt_in_the_deciding_function_ends_all(two: Scenarios) -> None:
    own, other = two.run("the_deciding_rank_is_interrupted")
    assert own.startswith("KeyboardInterrupt") and "on_nonfinite failed on rank 0" in other


def test_a_log_that_fails_on_one_rank_does_not_keep_the_others(two: Scenarios) -> None:
    one, other = two.run("a_log_that_fails_on_one_rank")
    assert one == ([False] * 3, -2.0) and other[1] == -2.0


def test_gradients_placed_otherwise_than_their_parameter(two: Scenarios) -> None:
    norm = math.sqrt(14.0)
    for found in two.run("other_placements"):
        assert [one for one, _ in found] == pytest.approx([norm, norm, norm, 2 * norm])
        assert [weight[3] for _, weight in found] == [-3.0, -3.0, -3.0, -6.0]


def test_tiny_parameters(two: Scenarios) -> None:
    for good, nans, bad in two.run("tiny_parameters"):
        assert good == (pytest.approx(math.sqrt(17.0)), 5)
        assert nans == 4 and bad == [("both", None), ("row", 0)]


@pytest.mark.parametrize("name", POLICIES)
def test_policies_of_fully_shard(two: Scenarios, name: str) -> None:
    for norm, theirs, bad in two.run("policies_of_fully_shard", name):
        assert norm == pytest.approx(theirs, rel=1e-5) and bad == [("2.weight", 1, (4, 7))]


def test_a_tied_shard_counts_once(two: Scenarios) -> None:
    for norm, wanted, numel in two.run("tied_shards"):
        assert norm == pytest.approx(wanted, rel=1e-5) and numel == 42


def test_looks_at_shards(two: Scenarios) -> None:
    for rank, (kinds, rows, op) in enumerate(two.run("looks_at_shards")):
        assert kinds == {"activation", "gradient"} and op == "aten.sqrt"
        assert rows == ([("2.weight", (4, 7), (5, 8))] if rank else [])


def test_a_mesh_without_some_ranks(four: Scenarios) -> None:
    answers = four.run("a_mesh_without_this_rank")
    assert answers == [(None, "", 5.0)] * 2 + [(None, "", 0.0)] * 2


def test_meshes_of_three_dimensions(four: Scenarios) -> None:
    for norm, wanted, places in four.run("three_dimensions"):
        assert norm == pytest.approx(wanted, rel=1e-6) and places == [(6, 4), (6, 4)]


def test_meshes_that_only_overlap_are_judged_by_all_ranks(four: Scenarios) -> None:
    assert four.run("meshes_that_overlap") == [(None, pytest.approx(math.sqrt(8.0)))] * 4


def test_a_second_init_process_group_finds_nothing_of_the_first(tmp_path) -> None:  # type: ignore[no-untyped-def]
    for number in range(2):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/{number}", rank=0, world_size=1)
        try:
            made = _made.now()
            assert made.groups == {} and made.guards == {}
            made.groups[0, 1] = made.guards[0, 1] = 1
        finally:
            dist.destroy_process_group()


def test_ranks_may_share_a_dense_part_and_have_experts_of_their_own(two: Scenarios) -> None:
    for squared, numel in two.run("experts"):
        assert squared == pytest.approx(3 + 2 + 2 * (3 + 2)) and numel == 15


def test_nobody_waits_for_a_rank_whose_shard_can_not_be_clipped(two: Scenarios) -> None:
    waiting, own = two.run("a_shard_that_can_not_be_clipped")
    assert "a rank could not scan its gradients for clip_grad_norm_" in waiting
    assert own.startswith("ValueError: grad of parameters[0] has no memory")
