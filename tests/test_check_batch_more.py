"""Fields that are judged by what they are for: segmentation masks, boxes, lengths, token types, additive masks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanscan import BatchProblem, BatchSpec, FieldSpec, check_batch
from tests.batch_problems import only

IMAGES = torch.rand(2, 3, 4, 4)
BINARY = torch.tensor([[[0, 255], [255, 0]]]).repeat_interleave(2, 1).repeat_interleave(2, 2).expand(2, 4, 4).clone()


# --- the mask of a segmentation


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
def test_a_mask_upon_an_image_is_a_target_and_255_is_named(dtype: torch.dtype) -> None:
    batch = {"image": IMAGES, "mask": BINARY.to(dtype)}
    assert only(batch).severity == "warning" and "divide by 255" in only(batch).reason
    told = only(batch, BatchSpec(num_classes=1))
    assert told.severity == "error" and told.path == 'batch["mask"][0]' and "divide by 255" in told.reason
    assert check_batch({"image": IMAGES, "mask": (BINARY > 0).to(dtype)}, BatchSpec(num_classes=1)) == []


def test_classes_of_a_mask_stay_in_range_and_other_masks_are_let_be() -> None:
    mask = torch.zeros(2, 4, 4, dtype=torch.int64)
    mask[1, 2, 3] = 7
    assert only({"pixel_values": IMAGES, "masks": mask}, BatchSpec(num_classes=5)).reason.startswith(
        "masks: sample 1 at [2, 3] has 7, allowed 0..4"
    )
    spec = BatchSpec(num_classes=5)
    labelled = {"image": IMAGES, "labels": torch.tensor([0, 4]), "mask": mask}  # the classes are those of the labels
    text = {"input_ids": torch.ones(2, 4, dtype=torch.int64), "mask": torch.full((2, 4, 4), -math.inf).triu(1)}
    for batch in (labelled, text, {"image": IMAGES, "mask": torch.full((2, 8, 8), 9)}):
        assert check_batch(batch, spec) == []


def test_class_numbers_that_are_floating_point_are_said_to_be_that() -> None:
    problem = only({"x": torch.rand(4, 2), "labels": torch.tensor([0.0, 1.0, 2.0, 1.0])}, BatchSpec(num_classes=3))
    assert "classes stored as float32" in problem.reason and "labels.long()" in problem.reason


# --- boxes


def targets(*boxes: list[float], key: str = "boxes") -> Any:
    return [torch.rand(3, 8, 8)], [{key: torch.tensor(boxes), "labels": torch.ones(len(boxes), dtype=torch.int64)}]


@pytest.mark.parametrize("box", [[5.0, 5.0, 5.0, 9.0], [9.0, 9.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
def test_a_box_without_area_is_named(box: list[float]) -> None:
    problem = only(targets([0.0, 0.0, 4.0, 4.0], box))
    assert problem.reason.startswith(f"boxes: box [1] is ({', '.join(f'{n:g}' for n in box)}), without width or height")
    assert problem.path == 'batch[1][0]["boxes"]' and (problem.first, problem.severity) == ((1,), "error")


@pytest.mark.parametrize(
    "batch",
    [
        targets([0.0, 0.0, 4.0, 4.0], [1.0, 2.0, 3.0, 4.0]),
        targets([0.5, 0.5, 0.2, 0.1], [0.3, 0.3, 0.3, 0.3]),  # centre and size, as fractions
        targets([50.0, 60.0, 20.0, 10.0], [10.0, 10.0, 10.0, 30.0], key="bbox"),  # corner and size
        {"bbox": torch.tensor([[[0, 0, 0, 0], [10, 10, 20, 20], [1000, 1000, 1000, 1000]]])},  # of the words of a page
        {"image": IMAGES, "boxes": torch.tensor([[[0.0, 0, 1, 1], [0, 0, 0, 0]], [[1, 1, 3, 3], [-1, -1, -1, -1]]])},
    ],
)
def test_boxes_of_every_usual_form_and_rows_that_fill_up_pass(batch: Any) -> None:
    assert check_batch(batch) == []


def scene(*boxes: list[float], zipped: bool = False, **more: Any) -> Any:
    """Two samples as torchvision's detectors take them, of height 8 and width 16; the boxes are the second's."""
    images, (target,) = [torch.rand(3, 8, 16) for _ in range(2)], targets(*boxes)[1]
    first = {"boxes": torch.tensor([[0.0, 0.0, 2.0, 2.0]]), "labels": torch.tensor([1])}
    made: Any = (images, [first, {**target, **more}])
    return tuple(map(tuple, made)) if zipped else made


class Boxes(Tensor):
    """Boxes that say what form they have, as torchvision's do."""

    format = "XYXY"


@pytest.mark.parametrize(("form", "bad"), [("XYXY", True), ("XYWH", False), ("CXCYWH", False)])
def test_boxes_that_say_what_form_they_have_are_judged_by_it(form: str, bad: bool) -> None:
    named = torch.tensor([[6.0, 5.0, 3.0, 2.0]]).as_subclass(type("Named", (Boxes,), {"format": form}))
    for zipped in (False, True):
        found = check_batch(scene([1, 1, 3, 3], zipped=zipped, boxes=named))
        assert [problem.kind for problem in found] == ["box"] * bad
    none = torch.tensor([[6.0, 5.0, 0.0, 2.0]]).as_subclass(type("Named", (Boxes,), {"format": form}))
    assert "without width or height" in only(scene([1, 1, 3, 3], boxes=none)).reason


@pytest.mark.parametrize("zipped", [False, True])
def test_a_box_outside_the_image_of_its_sample_is_named(zipped: bool) -> None:
    problem = only(scene([1, 1, 16, 8.4], [2, 9, 6, 12], zipped=zipped))
    assert problem.reason.startswith(
        "boxes: box [1] is (2, 9, 6, 12), outside its image of height 8 and width 16; 1 of 2"
    )
    assert (problem.path, problem.severity, problem.kind) == ('batch[1][1]["boxes"]', "error", "box")
    beyond = only(scene([2, 2, 20, 6], zipped=zipped))
    assert beyond.severity == "warning" and "beyond the border of its image" in beyond.reason
    assert only(scene([6, 6, 3, 7], zipped=zipped)).reason.startswith("boxes: box [0] is (6, 6, 3, 7), without width")
    assert only(scene([1, 1, 3, 3], zipped=zipped, labels=torch.ones(2).long())).kind == "size"
    unmasked = scene([1, 1, 3, 3], zipped=zipped, masks=torch.ones(2, 8, 16, dtype=torch.uint8))
    assert only(unmasked).reason.endswith("has 1 boxes: each box needs its mask")


def test_a_box_is_held_against_the_image_beside_it_and_that_of_a_stacked_batch() -> None:
    images, labelled = scene([2, 9, 6, 12])
    assert only((torch.rand(2, 3, 8, 16), labelled)).path == 'batch[1][1]["boxes"]'
    assert only({"images": images, "targets": labelled}).path == 'batch["targets"][1]["boxes"]'
    assert only([{"image": images[1], **labelled[1]}]).path == 'batch[0]["boxes"]'
    assert only([{"image": images[1].permute(1, 2, 0), **labelled[1]}]).kind == "box"


@pytest.mark.parametrize(
    "batch",
    [
        scene([0.0, 0.0, 16, 8], [15.5, 7.5, 16.4, 8.2]),  # rounded
        scene([0.5, 0.5, 1.0, 1.0], [0.9, 0.9, 1.1, 1.2]),  # fractions
        scene([2, 9, 6, 12], orig_size=torch.tensor([40, 80])),  # of the image as it was before
        ([torch.rand(3, 8, 16)] * 2, [{"bbox": torch.tensor([[40.0, 2, 9, 12]]), "labels": torch.ones(1).long()}] * 2),
        (torch.rand(2, 5, 8, 16), scene([2, 9, 6, 12])[1]),  # no picture
        {"pixel_values": IMAGES, "bbox": torch.tensor([[[0, 0, 0, 0], [10, 10, 900, 20]]] * 2)},  # of a page of 1000
    ],
)
def test_boxes_that_are_within_their_image_or_of_another_size_pass(batch: Any) -> None:
    assert check_batch(batch) == []


# --- lengths


def test_a_target_whose_boxes_and_labels_differ_in_number_is_named() -> None:
    images, (target,) = targets([1, 1, 4, 4], [2, 2, 5, 5])
    target["labels"] = target["labels"][:1]
    problem = only((images, [target]))
    assert (problem.path, problem.kind) == ('batch[1][0]["labels"]', "size")
    assert problem.reason == 'has 1 entries, batch[1][0]["boxes"] has 2 boxes: each box needs its label'
    assert check_batch((images, [{"boxes": target["boxes"], "label": torch.tensor([3])}])) == []  # of the image


# --- what stands for missing data


@pytest.mark.parametrize("missing", [-3.4028234e38, 9.96921e36, 1e20])
@pytest.mark.parametrize("place", [0, 1])
def test_a_number_that_stands_for_missing_data_is_a_warning(missing: float, place: int) -> None:
    batch = (torch.rand(4, 3), torch.rand(4, 3))
    batch[place][2, 1] = missing
    problem = only(batch)
    assert (problem.path, problem.first, problem.severity) == (f"batch[{place}][2]", (1,), "warning")
    assert (
        "1 of 12 values" in problem.reason
        and "square" in problem.reason
        and "stand-in for missing data" in problem.reason
    )
    for _ in range(2):  # the second time the compiled check answers
        assert check_batch((torch.rand(4, 3) * 1e19, batch[1 - place])) == []
    fields = {"0": FieldSpec(), "1": FieldSpec(min=-math.inf, max=math.inf)}
    assert check_batch(batch, BatchSpec(fields=fields)) == []
    assert check_batch({"x": torch.rand(2, 2), "attn_bias": torch.tensor([[0.0, missing]] * 2)}) == []


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("known", [{}, {"num_classes": 3}])
def test_a_label_that_was_nan_before_it_was_cast_is_said_to_be_one(dtype: torch.dtype, known: dict[str, Any]) -> None:
    labels = torch.tensor([1, 0, 2, 1], dtype=dtype)
    spec = BatchSpec(**known)
    for _ in range(2):
        assert check_batch((torch.rand(4, 3), labels), spec) == []
    labels[2] = torch.iinfo(dtype).min  # what a processor makes of NaN
    problem = only((torch.rand(4, 3), labels), spec)
    assert problem.path == "batch[1][2]" and "1 of 4 bad" in problem.reason
    assert "what a NaN becomes when it is cast to integers" in problem.reason


@pytest.mark.parametrize("key", ["audio", "waveform", "input_values"])
def test_a_silent_recording_among_others_is_a_warning(key: str) -> None:
    recordings = torch.randn(3, 1, 800)
    recordings[1] = 0.0
    problem = only({key: recordings, "label": torch.tensor([0, 1, 1])})
    assert (problem.path, problem.severity, problem.kind) == (f'batch["{key}"][1]', "warning", "constant")
    assert problem.reason.startswith("is silent (every value is 0)")
    recordings[1, 0, 3] = 1e-4
    assert check_batch({key: recordings}) == [] == check_batch({key: torch.zeros(2, 800)})  # all: on purpose, or a test


def test_an_empty_sequence_is_a_warning_and_a_negative_length_an_error() -> None:
    problem = only({"x": torch.rand(3, 5, 2), "lengths": torch.tensor([5, 0, 2])})
    assert problem.reason.startswith("lengths: sample 1 has length 0") and problem.severity == "warning"
    assert only({"seq_len": torch.tensor([3, -1])}).severity == "error"
    assert check_batch({"lengths": torch.tensor([5, 1]), "target_lengths": torch.tensor([0, 3])}) == []


# --- token types


class Sentences(nn.Module):
    def __init__(self, types: int) -> None:
        super().__init__()
        self.word_embeddings, self.token_type_embeddings = nn.Embedding(10, 4), nn.Embedding(types, 4)


def test_a_token_type_beyond_its_table_is_named() -> None:
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.int64), "token_type_ids": torch.tensor([[0, 0, 1], [0, 1, 1]])}
    assert check_batch(batch, BatchSpec.from_model(Sentences(2))) == [] == check_batch(batch)
    problem = only(batch, BatchSpec.from_model(Sentences(1)))
    assert problem.reason.startswith("token_type_ids[0, 2] = 1, 1 token types (max 0); 3 of 6 bad")
    assert "module token_type_embeddings" in problem.reason and problem.kind == "token"


# --- masks


def test_a_row_of_an_additive_mask_that_is_all_minus_infinity_is_named() -> None:
    mask = torch.full((3, 3), -math.inf).triu(1)
    mask[1] = -math.inf
    assert only({"attn_mask": mask}).reason.startswith("attn_mask row 1 masks every key")
    assert only({"src_mask": mask.expand(2, 3, 3)}).reason.startswith("src_mask row [0, 1] masks every key (2 of 6")


def test_a_mask_of_four_dimensions_that_hides_a_sample_is_named_and_its_rows_of_padding_are_not() -> None:
    keep = torch.tensor([[1, 1, 0], [0, 0, 0]])
    for mask in (keep[:, None, None], (keep[:, :, None] * keep[:, None])[:, None]):
        problem = only({"attention_mask": mask})
        assert problem.path == 'batch["attention_mask"][1]' and "row 1 masks every key" in problem.reason
    padded: Tensor = keep[:1, :, None] * keep[:1, None]
    assert check_batch({"attention_mask": torch.ones(3)}) == []  # of one sample
    assert check_batch({"attention_mask": padded[:, None]}) == []  # the third row is that of a key that is hidden too


def test_a_batch_inside_of_a_transform_is_said_to_be_unreadable_there() -> None:
    found: list[BatchProblem] = []

    def loss(x: Tensor) -> Tensor:
        found.append(only({"x": x * 2, "labels": torch.tensor([0, 1])}))
        return x.sum()

    torch.func.grad(loss)(torch.ones(2, 3))
    assert found[0].kind == "unreadable" and "inside of torch.func.grad" in found[0].reason
