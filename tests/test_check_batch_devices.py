"""Tensors on a GPU are judged as those in main memory, with two reads back whatever the number of fields."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nanscan import BatchSpec, check_batch
from nanscan.batches import check
from nanscan.batches.plan import Question
from tests.conftest import DEVICES

SPEC = BatchSpec(num_classes=3, vocab_size=10, value_range=(0, 1))


def batch_on(device: str) -> dict[str, Any]:
    image = torch.rand(4, 1, 8, 8)
    image[2, 0, 1, 1], image[3, 0, 0, 0] = float("nan"), 1.5
    batch = {
        "image": image,
        "input_ids": torch.tensor([[1, 2], [3, 10], [0, 0], [1, 1]]),
        "attention_mask": torch.tensor([[1, 1], [1, 0], [0, 0], [1, 1]]),
        "labels": torch.tensor([0, 1, 5, 2]),
    }
    return {name: value.to(device) for name, value in batch.items()}


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_is_judged_alike_on_every_device(device: str) -> None:
    assert [str(p) for p in check_batch(batch_on(device), SPEC)] == [str(p) for p in check_batch(batch_on("cpu"), SPEC)]
    assert {p.kind for p in check_batch(batch_on(device), SPEC)} == {"nonfinite", "range", "token", "mask", "label"}


@pytest.mark.cuda
def test_a_good_batch_on_a_gpu_waits_for_two_reads_only() -> None:
    batch = {f"x{i}": torch.rand(8, 4, device="cuda") for i in range(20)}
    batch |= {f"{i}_labels": torch.zeros(8, dtype=torch.int64, device="cuda") for i in range(20)}
    check_batch(batch, SPEC)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        assert check_batch(batch, SPEC) == []
    copies = [event for event in profile.events() if "DtoH" in event.name]
    assert len(copies) <= 2


def test_answers_come_over_as_bits_and_lose_none() -> None:
    """What a GPU's answers go through, on numbers that neither float32 nor float64 alone could carry."""
    question = Question(0, lambda value: (value,), lambda value, told: [])
    answers = [
        torch.tensor(2**62 + 1),
        torch.tensor(-(2**63)),
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor(float("-inf")),
        torch.tensor(True),
        torch.tensor(7, dtype=torch.uint8),
    ]
    ((_, told),) = check._brought([(question, answers)])
    assert told == [2**62 + 1, -(2**63), 0.1, float("-inf"), True, 7]
