"""`process_group=`: two real processes act on one verdict, whichever of them found the NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nanscan
from nanscan.policy import clip_factor
from tests.ranks import Ranks, Scenarios


@pytest.fixture
def ranks(worlds: dict[int, Ranks]) -> Scenarios:
    return worlds[2].of("tests.rank_scenarios")


def test_both_ranks_skip_and_both_name_the_rank_with_the_nan(ranks: Scenarios) -> None:
    both = ranks.run("nan_on_one_rank")
    for rank, found in enumerate(both):
        assert found["weight"] == [1.0, 1.0] and found["grad"] is None and found["skipped"] and found["error"] is None
        assert found["rows"] == [("w", 1, 1, (1,), (2,))] and found["json"]
        assert found["ranks of the table"] == [rank]
        assert found["counts"] == (1, 0, 5**0.5)
        assert len(found["said"]) == 1
        assert "step 0 skipped: grad of 'w' on rank 1 has 1 NaN, 0 Inf of 2 (first at [1])" in found["said"][0]


def test_counts_are_totals_and_each_rank_is_named(ranks: Scenarios) -> None:
    for found in ranks.run("bad_on_both_ranks"):
        assert found == (
            2,
            1,
            "grad of 'w' on rank 0 has 1 NaN, 1 Inf of 2 (first at [0]); "
            "grad of 'w' on rank 1 has 1 NaN, 0 Inf of 2 (first at [1])",
        )


def test_exactly_one_small_collective_a_step_good_or_bad(ranks: Scenarios) -> None:
    for counted, skipped in ranks.run("collectives_of_good_and_bad_steps"):
        assert [len(calls) for calls in counted] == [1, 1, 1, 1] and skipped == 1
        assert all("allreduce" in calls[0] for calls in counted)


def test_ddp_stays_in_step_when_one_rank_alone_has_a_nan(ranks: Scenarios) -> None:
    one, two = ranks.run("ddp_with_nan_planted_after_backward")
    assert one == two
    assert one["skipped"] == (1, 2) and one["unchanged"] and one["rows"] == [("2.bias", 1)]
    assert all(factor < 1 for at, factor in enumerate(one["factors"]) if at != 2)


def test_raise_raises_on_all_ranks(ranks: Scenarios) -> None:
    for error, weight, kept in ranks.run("raise_on_all"):
        assert error.startswith("NonFiniteError") and "grad of 'w' on rank 1 has 1 NaN" in error
        assert weight == [1.0] and kept


def test_all_ranks_give_up_at_the_same_step(ranks: Scenarios) -> None:
    for errors, offenders in ranks.run("give_up_together"):
        assert errors == ["", "", "TrainingDiverged"] and offenders == [("w",)] * 3


def test_a_function_decides_once_for_all_ranks(ranks: Scenarios) -> None:
    (asked, weight, action), (not_asked, other, same) = ranks.run("a_function_decides_once")
    assert asked == [1] and not_asked == [] and action == same == "zero"
    assert weight == other == pytest.approx([0.9, 1.0, 0.7])  # zeroed where either rank had a NaN


def test_a_function_that_fails_fails_on_all_ranks(ranks: Scenarios) -> None:
    (error, weight), (other, same) = ranks.run("a_function_that_fails")
    assert error.startswith("ValueError: the function given as on_nonfinite must return")
    assert "on_nonfinite failed on rank 0, which decides for all" in other and weight == same == [1.0]


def test_zeroing_takes_expanded_and_missing_gradients(ranks: Scenarios) -> None:
    (first, second), (other, theirs) = ranks.run("zero_with_expanded_and_missing_gradients")
    assert first == other == [[1.0, 0.0], [-1.0, -1.0]]
    assert second == theirs == [1.0, 1.0]


def test_an_inf_that_one_ranks_scaler_found_skips_on_all(ranks: Scenarios) -> None:
    for skipped, weight, norm in ranks.run("a_scaler_found_an_inf_on_one_rank"):
        assert skipped == ([1.0], True)
        assert weight == pytest.approx([0.9]) and norm == 1.0  # the next one is unscaled and taken


def test_the_norm_is_one_number_the_largest_of_any_rank(ranks: Scenarios) -> None:
    one, two = ranks.run("one_norm_for_all")
    norm = (9 + 4.5**2) ** 0.5
    assert one == two == (pytest.approx(norm, rel=1e-12), clip_factor(one[0], 1.0), True)


def test_the_norm_of_clamped_gradients_is_agreed_too(ranks: Scenarios) -> None:
    assert ranks.run("clamped_then_clipped") == [clip_factor(5.0, 1.0)] * 2


def test_a_bad_loss_on_one_rank_skips_on_all(ranks: Scenarios) -> None:
    for skipped, text, norm in ranks.run("a_bad_loss_on_one_rank"):
        assert skipped and text == "loss on rank 1 has 1 NaN, 0 Inf of 3 (first at [1])" and norm == 1.0


def test_bad_parameters_of_one_rank_are_named_on_all(ranks: Scenarios) -> None:
    for first, second, rows, count in ranks.run("parameters_go_bad_on_one_rank"):
        assert first is None and second.startswith("NonFiniteError") and "parameter 'w' on rank 1" in second
        assert rows == [("w", "parameter", 1, (1,))] and count == 1


def test_an_evaluation_that_goes_bad_on_one_rank_puts_all_back(ranks: Scenarios) -> None:
    for good, weight, calls, skipped, rank in ranks.run("a_closure_goes_bad_on_one_rank"):
        assert weight == good != [2.0, -1.0] and calls == 3 and skipped and rank == 1


def test_a_rank_without_gradients_takes_part(ranks: Scenarios) -> None:
    for good, skipped, text in ranks.run("a_rank_without_gradients"):
        assert good == (5.0, 2, [], None) and skipped
        assert text == "grad of 'w' on rank 0 has 1 NaN, 0 Inf of 2 (first at [1])"


def test_a_sparse_gradients_row_is_named_on_all(ranks: Scenarios) -> None:
    assert ranks.run("sparse_gradient_is_bad_on_one_rank") == [((3, 1), 1)] * 2


def test_nobody_waits_for_a_rank_that_can_not_scan(ranks: Scenarios) -> None:
    (waiting, weight), (own, same) = ranks.run("a_rank_that_can_not_scan")
    assert "rank 1 could not scan its gradients at step 0" in waiting and "grad of 'w'" in own
    assert weight == same == [1.0]


def test_ranks_at_other_steps_are_told(ranks: Scenarios) -> None:
    (text, weight), _ = ranks.run("ranks_at_other_steps")
    assert "Every rank must call optimizer.step() equally often" in text and weight == [1.0]


def test_a_group_may_be_a_part_and_ranks_are_those_of_the_whole_job(ranks: Scenarios) -> None:
    (weight, none, outside), (other, bad, _) = ranks.run("groups_of_one_rank")
    assert weight == pytest.approx([0.9]) and none == []
    assert other == [1.0] and bad == [1] and "not a member of the group" in outside


def test_copies_leave_the_group_out_and_say_so(ranks: Scenarios) -> None:
    for rank, (said, alone, together) in enumerate(ranks.run("copies_leave_the_group_out")):
        assert len(said) == 2 and all("process group is left out of this copy" in text for text in said)
        assert alone == [bool(rank)] * 2 and together


def test_a_second_wrap_brings_the_group_and_false_ends_it(ranks: Scenarios) -> None:
    assert ranks.run("a_second_wrap_brings_and_ends_the_group") == [(True, False), (True, True)]


def test_a_real_gradient_scaler_steps_and_skips_on_all(ranks: Scenarios) -> None:
    for seen, weight in ranks.run("a_real_gradient_scaler"):
        assert [skipped for skipped, _ in seen] == [False, True, False]
        assert seen[0][1] == seen[2][1] == 2.0 and weight == pytest.approx([0.6])


@pytest.mark.parametrize(
    ("scenario", "cause", "step"),
    [("recovery_from_a_loss_on_one_rank", "loss", 4), ("recovery_from_a_buffer_on_one_rank", "weights", 5)],
)
def test_when_one_rank_has_to_go_back_all_do(ranks: Scenarios, scenario: str, cause: str, step: int) -> None:
    (healthy, reasons, weight, index), (bad, _, other_weight, other_index) = ranks.run(scenario)
    assert (healthy, bad) == ([("rank", step, 3)], [(cause, step, 3)])
    assert reasons == ["rank 1 has to go back; its own report says why"]
    assert weight == other_weight and index == other_index


def test_a_rank_that_does_not_call_step_ends_in_a_hint(ranks: Scenarios) -> None:
    (error, weight), _ = ranks.run("a_rank_that_does_not_call_step")
    assert "the verdict on the gradients of step 0" in error and "could not be shared between the ranks [0, 1]" in error
    assert "Every rank must call optimizer.step() equally often" in error and weight == [1.0]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (True, ValueError, "call torch.distributed.init_process_group()"),
        ("default", ValueError, "process_group='default' is the default group, and there is none yet"),
        ("gloo", TypeError, "must be a torch.distributed.ProcessGroup, True or 'default'"),
    ],
)
def test_what_is_no_group_is_explained(given: Any, error: type[Exception], words: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(error) as caught:
        nanscan.wrap(optimizer, process_group=given)
    assert words in str(caught.value)
