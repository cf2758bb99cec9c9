"""The compiled question "is all well?" says yes to no batch in which the step-by-step look finds something."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanscan import BatchSpec, FieldSpec, check_batch
from nanscan.batches import check
from nanscan.engine import active_engine

pytestmark = pytest.mark.skipif(active_engine().batch_check is None, reason="the engine has no compiled check")

SPEC = {"num_classes": 7, "vocab_size": 50, "value_range": (-4.0, 4.0)}
BOUNDED = {"fields": {"depth": FieldSpec(min=0.0, max=9.0), "input_ids": FieldSpec(max=49)}}
SPECS = [{}, SPEC, {"num_classes": 7, "ignore_index": 255}, {**SPEC, "ignore_index": None}, BOUNDED]


def batch_of(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    whole = lambda high, *shape, dtype=torch.int64: torch.randint(0, high, shape, generator=draw).to(dtype)  # noqa: E731
    mask = torch.ones(4, 6, dtype=[torch.int64, torch.bool, torch.uint8][seed % 3])
    mask[:, 4:] = 0
    return {
        "image": torch.rand(4, 3, 8, 8, generator=draw).to([torch.float32, torch.bfloat16, torch.float64][seed % 3]),
        "depth": torch.rand(4, 5, generator=draw),
        "input_ids": whole(50, 4, 6, dtype=[torch.int64, torch.int32, torch.int16][seed % 3]),
        "attention_mask": mask,
        "labels": whole(7, 4, dtype=[torch.int64, torch.int32, torch.int8][seed % 3]),
    }


FAULTS: dict[str, Any] = {
    "none": lambda batch: None,
    "nan": lambda batch: batch["depth"].view(-1)[7].fill_(math.nan),
    "inf": lambda batch: batch["image"].view(-1)[-1].fill_(math.inf),
    "label above": lambda batch: batch["labels"][3].fill_(7),
    "label below": lambda batch: batch["labels"][0].fill_(-1),
    "some ignored": lambda batch: batch["labels"][:3].fill_(-100),
    "all ignored": lambda batch: batch["labels"].fill_(-100),
    "token": lambda batch: batch["input_ids"][2, 5].fill_(50),
    "masked": lambda batch: batch["attention_mask"][1].fill_(0),
    "constant": lambda batch: batch["image"][2].fill_(0.25),
    "blank": lambda batch: batch["image"][2].fill_(0.0),
    "nearly constant": lambda batch: batch["image"][2].fill_(0.25)[0, 3, 6].fill_(0.5),
    "dark twice": lambda batch: batch["image"].div_(255.0),
    "pixels": lambda batch: batch["image"].mul_(255.0).round_(),
    "huge": lambda batch: batch["depth"][1, 1].fill_(-1e20),
    "nan cast": lambda batch: batch["labels"][1].fill_(torch.iinfo(batch["labels"].dtype).min),
    "out of range": lambda batch: batch["depth"][1, 1].fill_(-5.0),
}


@pytest.mark.parametrize("known", SPECS)
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_found_does_not_depend_on_the_compiled_check(fault: str, known: dict[str, Any]) -> None:
    for seed in range(3):
        spec, slow = BatchSpec(**known), BatchSpec(**known)
        assert check_batch(batch_of(seed), spec) == []
        assert spec._quick, "a plain batch must have a compiled check"
        batch = batch_of(seed)
        FAULTS[fault](batch)
        assert check_batch(batch, spec) == step_by_step(batch, slow), fault
        assert check_batch(batch_of(seed), spec) == []


def step_by_step(batch: Any, spec: BatchSpec) -> list[Any]:
    """What is found where there is no compiled check."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "compiled", lambda *_: None)
        return check_batch(batch, spec)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]),
    st.lists(st.integers(-3, 12), min_size=1, max_size=200),
    st.sampled_from([-100, 2, 255, None]),
    st.booleans(),
)
def test_labels_of_any_dtype_and_stride_are_judged_alike(
    dtype: torch.dtype, values: list[int], ignored: int | None, spread: bool
) -> None:
    flat = torch.tensor(values).to(dtype)
    labels = torch.stack([flat, flat.flip(0)], 1)[:, 0] if spread else flat
    spec, slow = (BatchSpec(num_classes=10, ignore_index=ignored) for _ in range(2))
    batch = {"x": torch.rand(len(values), 2), "labels": labels}
    check_batch({**batch, "labels": torch.zeros_like(labels)}, spec)
    assert check_batch(batch, spec) == step_by_step(batch, slow)


@pytest.mark.parametrize("ignored", [-100, 255, None])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
@pytest.mark.parametrize("values", [(0, 255), (0, 1, 255), (0, 1), (255, 255), (3, 255), (-100, 0, 255)])
def test_masks_of_0_and_255_are_seen_as_without_the_compiled_check(
    values: tuple[int, ...], dtype: torch.dtype, ignored: int | None
) -> None:
    maps = torch.tensor(values).repeat(12)[:24].reshape(2, 3, 4).to(dtype)
    for labels in (maps, maps.flatten()):
        spec, slow = (BatchSpec(ignore_index=ignored) for _ in range(2))
        check_batch({"labels": torch.ones_like(labels)}, spec)
        assert check_batch({"labels": labels}, spec) == step_by_step({"labels": labels}, slow)


def test_images_in_another_memory_order_are_looked_at_where_their_samples_are() -> None:
    spec, images = BatchSpec(), torch.rand(4, 3, 8, 8)
    images[2] = 0.25
    for batch in ({"image": images}, {"image": images.to(memory_format=torch.channels_last)}):
        check_batch({"image": torch.rand_like(batch["image"])}, spec)
        assert [problem.path for problem in check_batch(batch, spec)] == ['batch["image"][2]']


def test_a_view_that_negates_its_memory_is_not_judged_by_that_memory() -> None:
    spec, x = BatchSpec(fields={"x": FieldSpec(min=0.0, max=1.0)}), torch.rand(4, 3) + 0.01
    assert check_batch({"x": x / 2}, spec) == []
    assert len(check_batch({"x": torch._neg_view(x)}, spec)) == 1


def test_a_batch_of_another_form_is_not_taken_for_the_one_before() -> None:
    spec, x, y = BatchSpec(num_classes=3), torch.rand(4, 2), torch.tensor([0, 1, 2, 0])
    assert check_batch({"x": x, "labels": y}, spec) == []
    bad = torch.tensor([0, 1, 2, 9])
    others = [{"labels": bad, "x": x}, (x, bad), [x, bad], {"x": x, "labels": bad, "z": x}, {"x": x[:3], "labels": bad}]
    for other in others:
        assert any(problem.kind in ("label", "size") for problem in check_batch(other, spec)), other
    assert check_batch({"x": x, "labels": y}, spec) == []


def test_a_spec_with_a_compiled_check_is_pickled_and_copied_without_it() -> None:
    spec = BatchSpec(num_classes=3)
    batch = {"x": torch.rand(4, 2), "labels": torch.tensor([0, 1, 2, 0])}
    check_batch(batch, spec)
    for twin in (pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec)):
        assert spec._quick and not twin._quick and twin == spec
        assert check_batch(batch, twin) == []
