"""`check_batch` names the field, the sample and the element of what is wrong, and nothing that is right."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import nanscan
from nanscan import BatchSpec, check_batch
from tests.batch_problems import only

NAN, INF = float("nan"), float("inf")


def texts(batch: Any, spec: BatchSpec | None = None) -> list[str]:
    return [str(problem) for problem in check_batch(batch, spec)]


def planted(value: float, *index: int, shape: tuple[int, ...] = (4, 3)) -> Tensor:
    made = torch.rand(shape)
    made[index] = value
    return made


class Pair(NamedTuple):
    image: Any
    label: Any


@dataclasses.dataclass
class Sample:
    image: Any
    extra: Any = None


class Encoding(collections.UserDict):
    """Like the batches of tokenizers: a mapping that is no dict."""


def test_nan_of_a_constant_image_is_named_with_key_sample_and_counts() -> None:
    images = torch.stack([torch.arange(4.0).reshape(1, 2, 2), torch.full((1, 2, 2), 7.0)])
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    problem = only({"image": (images - low) / (high - low), "label": torch.tensor([0, 1])})
    assert str(problem) == 'batch["image"][1] has 4 NaN of 4 (first at [0, 0, 0])'
    assert (problem.path, problem.count, problem.first) == ('batch["image"][1]', 4, (0, 0, 0))
    assert (problem.severity, problem.kind, problem.field) == ("error", "nonfinite", "image")


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda x: x, "batch[2]"),
        (lambda x: (torch.rand(4), x), "batch[1][2]"),
        (lambda x: [x, torch.zeros(4, dtype=torch.int64)], "batch[0][2]"),
        (lambda x: {"a": {"b": x}}, 'batch["a"]["b"][2]'),
        (lambda x: {"views": (torch.rand(4, 3), x)}, 'batch["views"][1][2]'),
        (lambda x: {3: x}, "batch[3][2]"),
        (lambda x: Pair(x, torch.zeros(4, dtype=torch.int64)), "batch.image[2]"),
        (lambda x: Sample(x), "batch.image[2]"),
        (lambda x: Sample(torch.rand(4, 3), {"depth": x}), 'batch.extra["depth"][2]'),
        (lambda x: Encoding(inputs_embeds=x, text=["a"] * 4), 'batch["inputs_embeds"][2]'),
        (lambda x: {"x": x.numpy()}, 'batch["x"][2]'),
        (lambda x: {"x": x.numpy().astype(np.float16)}, 'batch["x"][2]'),
        (lambda x: {"x": x.numpy().astype(">f8")}, 'batch["x"][2]'),
        (lambda x: {"x": x.numpy().astype(np.longdouble)}, 'batch["x"][2]'),
        (lambda x: {"x": np.ascontiguousarray(x.numpy()[::-1])[::-1]}, 'batch["x"][2]'),
    ],
)
def test_any_nesting_is_gone_through(wrap: Any, path: str) -> None:
    problem = only(wrap(planted(NAN, 2, 1)))
    assert str(problem) == f"{path} has 1 NaN of 3 (first at [1])"
    assert check_batch(wrap(torch.rand(4, 3))) == []


def test_a_read_only_array_is_read_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    array = planted(INF, 0, 0).numpy()
    array.flags.writeable = False
    assert texts({"x": array}) == ['batch["x"][0] has 1 Inf of 3 (first at [0])']
    assert len(recwarn) == 0


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_every_floating_dtype_is_scanned(dtype: torch.dtype) -> None:
    value = planted(NAN, 3, 2).to(dtype)
    assert texts({"x": value}) == ['batch["x"][3] has 1 NaN of 3 (first at [2])']


def test_nan_and_inf_are_counted_apart_and_per_sample() -> None:
    value = torch.rand(3, 2, 2)
    value[0, 1, 1], value[0, 0, 1], value[2, 1, 0] = NAN, -INF, INF
    assert texts({"x": value}) == [
        'batch["x"][0] has 1 NaN, 1 Inf of 4 (first at [0, 1])',
        'batch["x"][2] has 1 Inf of 4 (first at [1, 0])',
    ]


def test_many_bad_samples_are_summed_up() -> None:
    problems = check_batch(torch.full((100, 2), NAN))
    assert len(problems) == 33
    assert str(problems[-1]) == "batch has 136 NaN or Inf in 68 more samples"


def test_scalars_and_one_dimensional_fields() -> None:
    assert texts({"weight": float("nan")}) == ['batch["weight"] has 1 NaN of 1']
    assert texts({"w": torch.tensor([1.0, INF])}) == ['batch["w"][1] has 1 Inf of 1']
    assert texts({"t": [0.5, NAN, 1.0]}) == ['batch["t"][1] has 1 NaN of 1']


def test_other_memory_is_scanned_as_a_whole() -> None:
    sparse = torch.sparse_coo_tensor([[3]], [NAN], (5,), check_invariants=True)
    nested = torch.nested.nested_tensor([torch.tensor([1.0, NAN]), torch.rand(3)], layout=torch.jagged)
    assert [p.path for p in check_batch({"s": sparse, "n": nested})] == ['batch["s"]', 'batch["n"]']
    assert only({"s": sparse}).first == (3,)


def test_packed_sequences_have_no_sample_in_their_first_dimension() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.rand(3, 2), planted(NAN, 0, 0, shape=(2, 2))])
    assert texts((packed, torch.tensor([0, 1]))) == ["batch[0].data has 1 NaN of 10 (first at [1, 0])"]


def test_lists_with_an_entry_per_sample() -> None:
    images = [torch.rand(3, 4, 4), torch.rand(3, 5, 4)]
    images[1][0, 2, 1] = NAN
    targets = [{"boxes": torch.rand(2, 4), "labels": torch.tensor([1, 7])}, {"boxes": torch.zeros(0, 4), "labels": []}]
    found = texts((images, targets), BatchSpec(num_classes=5))
    assert found[0] == "batch[0][1] has 1 NaN of 60 (first at [0, 2, 1])"
    assert 'batch[1][0]["labels"]: labels: element [1] has 7, allowed 0..4 (num_classes 5)' in found[1]
    assert 'batch[1][1]["boxes"] is empty' in found[2] and len(found) == 3
    assert check_batch((images, targets))[-1].severity == "warning"  # an image without an object is usual


def test_what_cannot_hold_a_nan_is_not_looked_at() -> None:
    batch = {"text": ["a", "b"], "none": None, "id": 7, "o": object(), "flag": True, "s": np.array(["x"]), "kind": int}
    assert check_batch(batch) == []


def test_a_batch_that_holds_itself_is_refused() -> None:
    batch: dict[str, Any] = {}
    batch["self"] = batch
    with pytest.raises(ValueError, match="nested deeper than 100 levels"):
        check_batch(batch)


def test_a_tensor_without_numbers_is_said_to_be_unreadable() -> None:
    batch = {"m": torch.empty(2, 2, device="meta"), "x": planted(NAN, 0, 0)}
    assert texts(batch)[0] == 'batch["x"][0] has 1 NaN of 3 (first at [0])'
    assert check_batch(batch)[1].kind == "unreadable" and "meta" in texts(batch)[1]


def test_empty_batches_and_fields() -> None:
    assert texts([]) == ["batch is empty"] and texts({}) == ["batch is empty"]
    assert "no target at all" in str(only((torch.rand(2, 3), torch.zeros(0, dtype=torch.int64))))
    assert only({"image": torch.zeros(0, 3, 4, 4)}).kind == "empty"


def test_a_batch_that_is_none_is_said_to_be_one() -> None:
    (problem,) = check_batch(None)
    assert problem.kind == "empty" and str(problem).startswith(
        "batch is None: a collate_fn that leaves out bad samples"
    )


def test_fields_with_different_numbers_of_samples() -> None:
    batch = {"image": torch.rand(4, 3, 8, 8), "labels": torch.tensor([0, 1, 2])}
    assert texts(batch) == ['batch["labels"] has 3 samples, batch["image"] has 4: batch sizes differ']
    assert only((torch.rand(4, 8), torch.tensor([0, 1]))).kind == "size"


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.rand(5, 4, 8), "y": torch.tensor([0, 1, 2, 3])},  # time first
        {
            "input_ids": torch.ones(2, 6, dtype=torch.int64),
            "labels": torch.ones(12, dtype=torch.int64),
        },  # all positions
        {"input_ids": torch.ones(2, 6, dtype=torch.int64), "position_ids": torch.arange(6)[None]},
        {"x": torch.rand(9, 4), "edge_index": torch.ones(2, 20, dtype=torch.int64), "y": torch.tensor([1, 0])},
        {"image": torch.rand(4, 3, 8, 8), "mean": torch.rand(3), "step": torch.tensor(3)},
        (torch.rand(7, 4), torch.ones(5, dtype=torch.int64), torch.tensor([3, 4]), torch.tensor([2, 3])),
    ],
)
def test_other_usual_layouts_are_not_called_different_sizes(batch: Any) -> None:
    assert check_batch(batch) == []


def test_a_spec_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match=r"nanscan\.BatchSpec, not a dict"):
        check_batch(torch.rand(2), {"num_classes": 3})  # type: ignore[arg-type]


def test_the_batch_is_left_as_it_was() -> None:
    x = planted(NAN, 1, 1).requires_grad_()
    batch = {"x": x, "y": torch.tensor([0, 9, -100, 1]), "m": {"attention_mask": torch.zeros(4, 3).int()}}
    before = [x.detach().clone(), batch["y"].clone()]
    assert len(check_batch(batch, BatchSpec(num_classes=3))) == 3
    assert torch.equal(x.detach().nan_to_num(), before[0].nan_to_num()) and torch.equal(batch["y"], before[1])


def test_problems_become_plain_data() -> None:
    import json

    problem = only({"x": planted(NAN, 2, 1)})
    assert json.loads(json.dumps(problem.to_dict()))["first"] == [1]


def test_a_cached_form_does_not_hide_what_the_next_batch_holds() -> None:
    spec = BatchSpec(num_classes=3)
    good, bad = torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, 2, 3])
    for labels, found in ((good, 0), (bad, 1), (good, 0), (bad, 1)):
        assert len(check_batch({"x": torch.rand(4, 2), "labels": labels}, spec)) == found


def test_endlessly_new_forms_do_not_fill_the_memory() -> None:
    spec = BatchSpec()
    for size in range(1, 600):
        check_batch(torch.zeros(size), spec)
    assert len(spec._plans) <= 256


def test_everything_is_brought_over_in_one_scan_whatever_the_number_of_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    whole = nanscan.engine.scan
    monkeypatch.setattr(nanscan.engine, "scan", lambda tensors: calls.append(len(tensors)) or whole(tensors))
    fields = {f"x{i}": torch.rand(4, 3) for i in range(19)} | {"bad": planted(NAN, 2, 1)}
    assert len(check_batch(fields | {"labels": torch.tensor([0, 1, 2, 3])})) == 1
    assert calls == [20]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_of_either_layout_is_scanned(layout: torch.layout) -> None:
    rows = [torch.ones(2, 3), torch.tensor([[float("nan"), 1.0, 1.0]])]
    bad = torch.nested.nested_tensor(rows, layout=layout)
    good = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)
    labels = torch.tensor([1, 0])
    for batch in ((bad, labels), {"x": bad, "y": labels}, [bad, labels]):
        (problem,) = nanscan.check_batch(batch)
        assert "1 NaN" in problem.reason
    assert nanscan.check_batch((good, labels), nanscan.BatchSpec(num_classes=2)) == []
