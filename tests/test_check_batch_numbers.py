"""Labels that are plain numbers are judged as those of a tensor are; other numbers are none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nanscan import BatchSpec, CheckedLoader, check_batch
from tests.batch_problems import only

THREE = BatchSpec(num_classes=3)


@pytest.mark.parametrize("number", [int, np.int64, np.uint8, torch.tensor])
@pytest.mark.parametrize(
    ("batch_of", "path"),
    [
        (lambda n: [(torch.rand(3, 4, 4), n(1)), (torch.rand(3, 4, 4), n(5))], "batch[1][1]"),
        (lambda n: [(torch.rand(3, 4, 4), n(1))] * 2 + [(torch.rand(3, 4, 4), n(5))], "batch[2][1]"),
        (lambda n: [{"image": torch.rand(3, 4, 4), "label": n(5)}], 'batch[0]["label"]'),
        (lambda n: {"x": torch.rand(4), "label": n(5)}, 'batch["label"]'),
        (lambda n: (torch.rand(3, 4, 4), n(5)), "batch[1]"),
    ],
)
def test_a_label_that_is_a_plain_number_is_found_as_that_of_a_tensor_is(number: Any, batch_of: Any, path: str) -> None:
    problem = only(batch_of(number), THREE)
    assert problem.path == path and "it has 5, allowed 0..2 (num_classes 3)" in problem.reason
    with pytest.raises(ValueError, match="allowed 0..2"):
        list(CheckedLoader([batch_of(number)], THREE))
    assert check_batch(batch_of(lambda value: number(value % 3)), THREE) == []


def test_a_tuple_of_numbers_is_labels_where_each_sample_has_one() -> None:
    for batch in ((torch.rand(3, 2), (1, 0, 5)), {"labels": (1, 0, 5)}, ([torch.rand(1, 4, 4)] * 3, (1, 0, 5))):
        assert "sample 2 has 5, allowed 0..2" in only(batch, THREE).reason


@pytest.mark.parametrize(
    "batch",
    [
        (torch.rand(3, 4, 4), (480, 640)),  # the size of the image
        (torch.rand(8, 4), 64),  # how many samples there are
        (torch.rand(8, 3, 4, 4), 17),
        {"image": torch.rand(3, 4, 4), "index": 17, "size": (480, 640), "nb_classes": 9, "ignore_label": 255},
        {"x": torch.rand(2, 3), "labels": torch.tensor([0, 2]), "step": 40},
        [(torch.rand(3, 4, 4), True)],
    ],
)
def test_other_plain_numbers_are_no_labels(batch: Any) -> None:
    assert check_batch(batch, THREE) == []


def test_a_mask_of_a_sample_of_its_own_that_hides_every_token_is_named() -> None:
    samples = [{"input_ids": [5, 6], "attention_mask": [1, 0]}, {"input_ids": [7], "attention_mask": [0]}]
    problem = only(samples)
    assert problem.path == 'batch[1]["attention_mask"]' and problem.reason.startswith("attention_mask masks every key")
    assert check_batch(samples[:1] * 2) == []
    assert (
        only([{"key_padding_mask": torch.ones(3, dtype=torch.bool)}] * 1 + [{"key_padding_mask": torch.zeros(2)}]).count
        == 1
    )
