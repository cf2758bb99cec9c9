"""Labels, tokens, masks, images: what is out of range is named as a person would say it; what is usual passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanscan import BatchSpec, FieldSpec, check_batch
from tests.batch_problems import ints, only

# --- labels

THREE = BatchSpec(num_classes=3)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([0, 1, 5, 2], "labels: sample 2 has 5, allowed 0..2 (num_classes 3); 1 of 4 bad"),
        ([0, -1, 1, 2], "labels: sample 1 has -1, allowed 0..2 (num_classes 3); 1 of 4 bad; -1 looks like ignore"),
        ([1, 2, 3, 1], "labels: sample 2 has 3, allowed 0..2 (num_classes 3); 1 of 4 bad; labels look 1-based"),
        ([0, 255, 1, 2], "labels: sample 1 has 255, allowed 0..2 (num_classes 3); 1 of 4 bad; 255 looks like ignore"),
        ([4, -100, 7, 0], "labels: sample 0 has 4, allowed 0..2 (num_classes 3); 2 of 4 bad"),
        ([0, 3, 1, 2], "labels: sample 1 has 3, allowed 0..2 (num_classes 3); 1 of 4 bad"),
    ],
)
@pytest.mark.parametrize("form", ["dict", "pair", "list of numbers", "numpy", "uint8"])
def test_a_label_out_of_range_is_named_before_the_loss_sees_it(labels: list[int], said: str, form: str) -> None:
    if form == "uint8" and min(labels) < 0:
        labels = [label if label >= 0 else 255 for label in labels]
        said = ""
    batch = {
        "dict": {"labels": torch.tensor(labels)},
        "pair": (torch.rand(4, 2), torch.tensor(labels)),
        "list of numbers": {"labels": labels},
        "numpy": {"labels": np.array(labels)},
        "uint8": {"labels": torch.tensor(labels, dtype=torch.uint8)},
    }[form]
    problem = only(batch, THREE)
    assert problem.reason.startswith(said) and problem.kind == "label"
    assert "1-based" not in problem.reason or 0 not in labels


@pytest.mark.parametrize("labels", [[0, 1, 2, 0], [-100, 1, 2, -100]])
def test_labels_within_range_and_ignored_ones_pass(labels: list[int]) -> None:
    assert check_batch({"labels": torch.tensor(labels)}, THREE) == []


@pytest.mark.parametrize("ignore", [255, -1, (-1, 255)])
def test_other_ignore_indices_pass_where_given(ignore: Any) -> None:
    index = ignore[-1] if isinstance(ignore, tuple) else ignore
    spec = BatchSpec(num_classes=3, ignore_index=ignore)
    assert check_batch({"labels": ints(0, index, 2)}, spec) == []
    assert "-100 looks like ignore" in only({"labels": ints(0, -100, 2)}, spec).reason
    assert only({"labels": ints(index, index)}, spec).kind == "no_target"


def test_without_a_spec_integers_are_not_range_checked() -> None:
    assert check_batch({"labels": ints(0, 5, -1, 10**9), "input_ids": ints([-5, 3]).expand(4, 2)}) == []


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_labels_of_minus_1_and_1_are_said_to_be_that(dtype: torch.dtype) -> None:
    problem = only((torch.rand(4, 3), ints(-1, 1, 1, -1).to(dtype)), BatchSpec(num_classes=2))
    assert "2 of 4" in problem.reason and "labels look like -1 and 1" in problem.reason
    some = only((torch.rand(4, 3), ints(-1, 1, 0, -1)), BatchSpec(num_classes=2))
    assert "-1 looks like ignore" in some.reason


def test_labels_of_every_pixel_or_token() -> None:
    labels = torch.zeros(2, 3, 3, dtype=torch.int64)
    labels[1, 2, 0] = 9
    problem = only({"image": torch.rand(2, 1, 3, 3), "labels": labels}, THREE)
    assert problem.reason.startswith("labels: sample 1 at [2, 0] has 9, allowed 0..2")
    assert (problem.path, problem.first, problem.count) == ('batch["labels"][1]', (2, 0), 1)


def test_one_output_tells_two_classes_apart() -> None:
    assert check_batch({"labels": ints(0, 1, 1)}, BatchSpec(num_classes=1)) == []
    assert "allowed 0..1" in only({"labels": ints(0, 2)}, BatchSpec(num_classes=1)).reason


@pytest.mark.parametrize("batch", [{"labels": ints(-100, -100)}, (torch.rand(2, 3), ints(-100, -100))])
def test_a_batch_whose_targets_are_all_ignored_has_no_valid_target(batch: Any) -> None:
    problem = only(batch)
    assert problem.reason.startswith("no valid target: all 2 targets equal ignore_index -100")
    assert problem.count == 2 and check_batch(batch, BatchSpec(ignore_index=None)) == []


def test_the_target_of_binary_cross_entropy_lies_between_0_and_1() -> None:
    spec = BatchSpec(num_classes=1)
    problem = only((torch.rand(2, 3), torch.tensor([0.0, 255.0])), spec)
    assert "sample 1 has 255" in problem.reason and "outside [0, 1]" in problem.reason
    assert problem.path == "batch[1][1]" and problem.severity == "error"
    assert check_batch((torch.rand(2, 3), torch.tensor([0.0, 0.9])), spec) == []
    assert only({"y": torch.tensor([[0.0, -0.5], [1.0, 0.0]])}, BatchSpec(num_classes=2)).count == 1


def test_a_target_of_0_and_255_looks_wrong_even_if_nothing_is_known() -> None:
    problem = only({"x": torch.rand(2, 3), "target": torch.tensor([0.0, 255.0])})
    assert problem.severity == "warning" and "divide by 255" in problem.reason
    assert check_batch({"x": torch.rand(2, 3), "target": torch.tensor([17.5, 255.0])}) == []  # a regression


# --- tokens and positions

TEN = BatchSpec(vocab_size=10, max_positions=4)


@pytest.mark.parametrize("batch", [{"input_ids": ints([1, 2, 3], [1, 2, 10])}, {"tokens": ints([1, 2, 3], [1, 2, 10])}])
def test_a_token_beyond_the_vocabulary_is_named_with_its_index(batch: dict[str, Tensor]) -> None:
    name = next(iter(batch))
    problem = only(batch, TEN)
    assert problem.reason.startswith(f"{name}[1, 2] = 10, vocabulary 10 (max 9)")
    assert (problem.path, problem.first, problem.count) == (f'batch["{name}"][1]', (2,), 1)


def test_a_batch_without_names_is_tokens_if_it_is_an_integer_matrix() -> None:
    assert only(ints([1, 10]), TEN).reason.startswith("batch[0, 1] = 10, vocabulary 10 (max 9)")
    assert only((ints([1, 10]), ints([1, 2])), TEN).reason.startswith("batch[0][0, 1] = 10")


def test_a_token_in_a_list_of_sequences_of_their_own_length_is_named_with_sample_and_place() -> None:
    for given in ([ints(1, 2, 3), ints(4, 10)], [[1, 2, 3], [4, 10]]):
        problem = only({"input_ids": given}, BatchSpec(vocab_size=10))
        assert problem.path == 'batch["input_ids"][1]' and problem.first == (1,)
        assert problem.reason.startswith("input_ids[1, 1] = 10, vocabulary 10 (max 9); 1 of 2 bad")


def test_negative_ids_are_named() -> None:
    assert only({"input_ids": ints([-1, 2])}, TEN).reason.startswith("input_ids[0, 0] = -1 (negative), vocabulary 10")
    assert "padding id" in only({"input_ids": ints([1, -100])}, TEN).reason


def test_a_sequence_longer_than_the_position_table_is_told_from_its_shape() -> None:
    problem = only({"input_ids": torch.zeros(2, 6, dtype=torch.int64)}, TEN)
    assert problem.reason.startswith("sequence length 6 > 4 positions")
    assert problem.count == 2 and problem.kind == "length"
    assert check_batch({"input_ids": torch.zeros(2, 4, dtype=torch.int64)}, TEN) == []


def test_position_ids_stay_within_the_table() -> None:
    assert only({"position_ids": ints([0, 1, 4])}, TEN).reason.startswith("position_ids[0, 2] = 4, 4 positions (max 3)")


def test_counts_and_lengths_are_no_tokens() -> None:
    assert check_batch({"num_tokens": ints(900, 4), "text_lengths": ints(70, 3), "sample_idx": ints(999, 5)}, TEN) == []


# --- masks


@pytest.mark.parametrize(
    "mask",
    [
        {"key_padding_mask": ints([False, False, False], [True, True, True])},
        {"src_key_padding_mask": ints([0, 0, 1], [1, 1, 1])},
        {"attention_mask": ints([1, 1, 0], [0, 0, 0])},
        {"attention_mask": torch.tensor([[1.0, 0.0], [0.0, 0.0]])},
        {"padding_mask": torch.tensor([[0.0, 0.0], [float("-inf"), float("-inf")]])},
    ],
)
def test_a_row_that_masks_every_key_is_named(mask: dict[str, Tensor]) -> None:
    problem = only(mask)
    (name,) = mask
    assert problem.reason.startswith(f"{name} row 1 masks every key") and problem.path == f'batch["{name}"][1]'


@pytest.mark.parametrize(
    "mask",
    [
        {"key_padding_mask": ints([False, False], [True, False])},
        {"attention_mask": ints([1, 1], [1, 0])},
        {"attention_mask": torch.zeros(2, 3)},  # nothing is added to any score
        {"attn_mask": torch.full((3, 3), float("-inf")).triu(1)},
        {"attn_mask": torch.ones(3, 3, dtype=torch.bool)},  # its meaning is not known
        {"loss_mask": torch.zeros(2, 3, dtype=torch.bool)},
        {"attn_bias": torch.full((2, 1, 3, 3), float("-inf"))},
    ],
)
def test_other_masks_and_legitimate_inf_pass(mask: dict[str, Tensor]) -> None:
    assert check_batch(mask) == []


def test_nan_and_plus_inf_in_a_mask_are_still_found() -> None:
    mask = torch.tensor([[0.0, float("-inf")], [float("nan"), float("inf")]])
    assert str(only({"attn_mask": mask})) == 'batch["attn_mask"][1] has 1 NaN, 1 Inf of 2 (first at [0])'


# --- images

UNIT = BatchSpec(value_range=(0, 1))


def pixels(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape or (4, 3, 8, 8), generator=torch.Generator().manual_seed(0)).float()


def test_values_outside_their_range_are_counted_and_the_first_is_named() -> None:
    image = torch.rand(4, 3, 8, 8)
    image[2, 1, 0, 3] = -0.25
    problem = only({"image": image}, UNIT)
    assert problem.reason.startswith("has -0.25 at [1, 0, 3], allowed 0..1; 1 of 768 values of image outside")
    assert (problem.path, problem.first, problem.count) == ('batch["image"][2]', (1, 0, 3), 1)


def test_pixels_that_were_not_scaled_are_recognised() -> None:
    assert "not scaled (uint8 pixels 0..255): divide by 255" in only({"image": pixels()}, UNIT).reason
    assert only({"image": pixels().byte()}, UNIT).reason.startswith("is uint8 (0..255), value_range is 0..1")
    guess = only({"pixel_values": pixels()})
    assert guess.severity == "warning" and "images look not scaled" in guess.reason


def test_pixels_that_were_scaled_twice_are_recognised() -> None:
    for spec in (UNIT, None):
        problem = only({"image": pixels() / 255 / 255}, spec)
        assert problem.severity == "warning" and "scaled twice" in problem.reason


@pytest.mark.parametrize(
    "image",
    [
        pixels() / 255,
        (pixels() / 255 - 0.45) / 0.22,
        (pixels() < 20).float() / 255,  # very dark: 0 or 1/255, and scaled once
        torch.zeros(4, 3, 8, 8),
    ],
)
def test_scaled_normalised_dark_and_blank_images_pass(image: Tensor) -> None:
    assert check_batch({"image": image, "labels": ints(0, 1, 2, 3)}) == []


def test_raw_pixels_pass_where_that_is_meant() -> None:
    assert check_batch({"image": pixels()}, BatchSpec(value_range=(0, 255))) == []
    assert check_batch({"image": pixels()}, BatchSpec(fields={"image": FieldSpec(max=255)})) == []


def test_a_constant_image_among_others_is_a_warning() -> None:
    image = torch.rand(3, 1, 8, 8)
    image[1] = 7.0
    problem = only({"image": image})
    assert problem.path == 'batch["image"][1]' and problem.reason.startswith("is constant (every value is 7)")
    assert problem.severity == "warning"


def test_blank_padding_and_images_constant_but_for_a_pixel_pass() -> None:
    image = torch.rand(3, 1, 64, 64)
    image[2] = 0.0
    image[1] = 0.5
    image[1, 0, 33, 17] = 0.4
    assert check_batch({"image": image}) == []
    assert check_batch({"image": torch.full((2, 1, 8, 8), 0.5)}) == []  # nothing varies: on purpose, or a test


def test_values_that_are_no_images_have_no_range() -> None:
    batch = {"image": torch.rand(2, 3, 4, 4), "boxes": torch.rand(2, 4) * 600, "weight": torch.rand(2) * 9}
    assert check_batch(batch, UNIT) == []


def test_images_are_recognised_by_their_place_too() -> None:
    image = torch.rand(2, 3, 4, 4)
    image[0, 0, 0, 0] = 2.0
    assert only((image, ints(0, 1)), UNIT).path == "batch[0][0]" and only(image, UNIT).path == "batch[0]"


def test_low_precision_images_are_judged_as_well() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e5m2):
        assert check_batch({"image": torch.rand(2, 3, 4, 4).to(dtype)}, UNIT) == []
        assert only({"image": (torch.rand(2, 3, 4, 4) + 1.5).to(dtype)}, UNIT).kind == "range"


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint16, torch.uint32, torch.uint64])
@pytest.mark.parametrize("count", [4, 4000])
def test_labels_of_every_integer_dtype_and_length(dtype: torch.dtype, count: int) -> None:
    labels = torch.zeros(count, dtype=torch.int64)
    labels[3] = 100
    for batch in ({"y": labels.to(dtype)}, {"in": {"y": labels.to(dtype)}}):
        for _ in range(2):  # worked out, and as it was worked out before
            assert only(batch, THREE).reason.startswith("y: sample 3 has 100, allowed 0..2")
    assert check_batch({"y": (labels // 100).to(dtype)}, THREE) == []


def test_an_ignore_index_that_could_be_a_class_is_looked_at_too() -> None:
    for spec in (BatchSpec(ignore_index=255), BatchSpec(ignore_index=0, num_classes=3)):
        (index,) = spec.ignored
        assert only({"labels": ints(index, index)}, spec).kind == "no_target"
        assert check_batch({"labels": ints(index, 1)}, spec) == []
