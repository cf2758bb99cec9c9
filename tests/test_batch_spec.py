"""A spec says what it is told, what a model says, and what the first batches have in common; bad ones are refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import Embedding, Linear

from nanscan import BadBatch, BatchSpec, FieldSpec, check_batch
from nanscan.demo.model import DigitNet


def reasons(batch: Any, spec: BatchSpec) -> list[str]:
    return [problem.reason for problem in check_batch(batch, spec)]


# --- what is refused


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: BatchSpec(num_classes=0), "num_classes must be a positive whole number"),
        (lambda: BatchSpec(vocab_size=1.5), "vocab_size"),
        (lambda: BatchSpec(max_positions=True), "max_positions"),
        (lambda: BatchSpec(value_range=(1, 0)), "min 1 is above max 0"),
        (lambda: BatchSpec(value_range=(0, float("nan"))), "a bound is NaN"),
        (lambda: FieldSpec(min=2, max=1), "min 2 is above max 1"),
    ],
)
def test_nonsense_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_wrong_types_are_refused() -> None:
    with pytest.raises(TypeError, match="names no dtype"):
        FieldSpec("float31")
    with pytest.raises(TypeError, match="ignore_index must be a whole number, several, or None, not 'x'"):
        BatchSpec(ignore_index="x")
    with pytest.raises(TypeError, match=r"fields\['x'\] must be a FieldSpec, not a tuple"):
        BatchSpec(fields={"x": (0, 1)})  # type: ignore[dict-item]
    with pytest.raises(TypeError):
        BatchSpec(3)  # type: ignore[misc]


def test_dtypes_are_taken_in_any_spelling() -> None:
    for dtype in (torch.float32, "float32", "torch.float32", np.float32, np.dtype("float32")):
        assert FieldSpec(dtype).dtype is torch.float32


# --- fields


@pytest.mark.parametrize(
    ("known", "value", "said"),
    [
        (FieldSpec(dtype="float32"), torch.rand(2, 3).double(), "has dtype float64, expected float32"),
        (FieldSpec(shape=(None, 4)), torch.rand(2, 3), "has shape (2, 3), expected (any, 4)"),
        (FieldSpec(shape=(-1, 3, 1)), torch.rand(2, 3), "has shape (2, 3), expected (any, 3, 1)"),
        (FieldSpec(min=0), torch.tensor([[1.0], [-2.0]]), "has -2 at [0], allowed at least 0; 1 of 2 values of f"),
        (FieldSpec(max=9), torch.tensor([3, 12]), "has 12, allowed at most 9; 1 of 2 values of f"),
        (FieldSpec(min=1, max=2), torch.tensor([True, False]), "has 0, allowed 1..2"),
        (FieldSpec(), torch.tensor([1.0, float("nan")]), "has 1 NaN of 1"),
        (FieldSpec(allow_nan=True), torch.tensor([float("inf"), float("nan")]), "has 1 Inf of 1"),
    ],
)
def test_a_field_is_held_against_its_spec(known: FieldSpec, value: torch.Tensor, said: str) -> None:
    (reason,) = reasons({"f": value}, BatchSpec(fields={"f": known}))
    assert reason.startswith(said)


def test_the_shape_may_leave_out_the_batch_dimension() -> None:
    spec = BatchSpec(fields={"f": FieldSpec(shape=(3, 8))})
    assert check_batch({"f": torch.rand(5, 3, 8)}, spec) == []
    assert len(check_batch({"f": torch.rand(5, 3, 9)}, spec)) == 1


def test_fields_are_named_by_dotted_paths() -> None:
    spec = BatchSpec(fields={"labels.mask": FieldSpec(max=1), "1": FieldSpec(max=1), "0.x": FieldSpec(max=1)})
    two = torch.tensor([2])
    assert [p.path for p in check_batch({"labels": {"mask": two}}, BatchSpec(fields={"labels.mask": FieldSpec(max=1)}))]
    found = check_batch(({"x": two}, two), spec)
    assert {p.path for p in found if p.kind == "range"} == {'batch[0]["x"][0]', "batch[1][0]"}
    assert [p.path for p in found if p.kind == "missing"] == ['batch["labels"]["mask"]']


def test_a_field_with_bounds_is_judged_by_them_alone() -> None:
    spec = BatchSpec(num_classes=3, fields={"labels": FieldSpec(min=0, max=9)})
    assert check_batch({"labels": torch.tensor([0, 7, -100])}, spec) == []
    assert reasons({"labels": torch.tensor([0, 11, -100])}, spec)[0].startswith("has 11, allowed 0..9; 1 of 3")


def test_an_empty_field_spec_turns_the_guessing_off() -> None:
    batch = {"y": torch.tensor([7, 8]), "attention_mask": torch.zeros(2, 3).int()}
    spec = BatchSpec(num_classes=3)
    assert len(check_batch(batch, spec)) == 2
    assert check_batch(batch, BatchSpec(num_classes=3, fields={n: FieldSpec() for n in batch})) == []
    long = {"tokens": torch.ones(2, 9, dtype=torch.int64)}
    assert check_batch(long, BatchSpec(max_positions=4, fields={"tokens": FieldSpec()})) == []


def test_a_spec_pickles_copies_and_compares() -> None:
    spec = BatchSpec.from_model(nn.ModuleDict({"tok": nn.Embedding(10, 4), "pos": nn.Embedding(4, 4)}))
    batch = {"input_ids": torch.zeros(1, 6, dtype=torch.int64)}
    before = reasons(batch, spec)
    for twin in (pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec)):
        assert twin == spec and hash(twin) == hash(spec) and reasons(batch, twin) == before


# --- from a model


class Net(nn.Module):
    def __init__(self, **tables: nn.Module) -> None:
        super().__init__()
        for name, table in tables.items():
            self.add_module(name, table)


class Sinusoids(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pe", torch.zeros(50, 1, 8))


class LearntPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(65, 8)})
        self.pos_emb = nn.Parameter(torch.zeros(1, 32, 8))
        self.lm_head = nn.Linear(8, 65, bias=False)


def sizes(model: nn.Module) -> tuple[int | None, int | None, int | None]:
    spec = BatchSpec.from_model(model)
    return spec.vocab_size, spec.max_positions, spec.num_classes


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Net(tok=Embedding(10, 4), pos=Embedding(4, 4)), (10, 4, None)),
        (Net(wte=Embedding(50, 4), wpe=Embedding(16, 4), lm_head=Linear(4, 50)), (50, 16, 50)),
        (
            Net(
                word_embeddings=Embedding(30, 4),
                position_embeddings=Embedding(12, 4),
                token_type_embeddings=Embedding(2, 4),
                classifier=Linear(4, 5),
            ),
            (30, 12, 5),
        ),
        (Net(word_embeddings=Embedding(30, 4), position_embeddings=Embedding(14, 4, padding_idx=1)), (30, 12, None)),
        (Net(embedding=Embedding(7, 4), lstm=nn.LSTM(4, 4), fc=Linear(4, 3)), (7, None, 3)),
        (Net(user=Embedding(70, 4), item=Embedding(90, 4), out=Linear(8, 1)), (None, None, None)),
        (Net(embed=Embedding(20, 8), pos_encoder=Sinusoids()), (20, 50, None)),
        (LearntPositions(), (65, 32, 65)),
        (DigitNet(), (None, None, 10)),
        (nn.Sequential(nn.Flatten(), Linear(4, 2)), (None, None, 2)),
        (Linear(4, 3), (None, None, 3)),
        (Net(conv=nn.Conv2d(1, 6, 5), fc1=Linear(6, 12), fc2=Linear(12, 8), fc3=Linear(8, 4)), (None, None, 4)),
        (Net(layers=nn.Sequential(Linear(2, 9), nn.ReLU(), Linear(9, 6))), (None, None, 6)),
        (Net(features=nn.Conv2d(3, 8, 1), classifier=nn.Sequential(Linear(8, 9), Linear(9, 7))), (None, None, 7)),
        (Net(down=nn.Conv2d(3, 8, 3), out=nn.Conv2d(8, 4, 1)), (None, None, 4)),
        (Net(cls=Linear(8, 4), score=Linear(8, 9)), (None, None, None)),  # two heads
        (Net(encoder=nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16)])), (None, None, None)),
    ],
)  # fmt: skip
def test_sizes_are_read_off_a_model(model: nn.Module, expected: tuple[int | None, ...]) -> None:
    assert sizes(model) == expected


def configured(kind: str = "Model", **config: Any) -> nn.Module:
    model: nn.Module = type(kind, (nn.Module,), {})()
    model.config = SimpleNamespace(**config)
    return model


def test_a_config_adds_what_the_modules_do_not_say() -> None:
    config = {"vocab_size": 99, "num_labels": 4, "max_position_embeddings": 64}
    assert sizes(configured("BertForSequenceClassification", **config)) == (99, 64, 4)
    assert sizes(configured("GPT2LMHeadModel", **config)) == (99, 64, None)  # there num_labels is a default of 2
    assert sizes(configured(rope_theta=1e4, **config)) == (99, None, None)  # rotary positions have no table
    assert sizes(configured(problem_type="regression", **config))[2] is None


def test_wrapped_models_are_looked_into() -> None:
    class Compiled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._orig_mod = inner

    spec = BatchSpec.from_model(Compiled(nn.DataParallel(Net(tok=nn.Embedding(10, 4), pos=nn.Embedding(4, 4)))))
    assert "sequence length 6 > 4 positions (module pos)" in reasons({"input_ids": torch.zeros(1, 6).long()}, spec)[0]


def test_what_is_known_better_replaces_what_the_model_says() -> None:
    spec = BatchSpec.from_model(DigitNet(), num_classes=7, value_range=(0, 1))
    assert (spec.num_classes, spec.value_range) == (7, (0.0, 1.0))
    assert "(num_classes 7); 1 of 1 bad" in reasons({"labels": torch.tensor([8])}, spec)[0]


def test_messages_name_the_module_that_a_size_was_read_off() -> None:
    model = Net(tok=nn.Embedding(10, 4), head=nn.Linear(4, 3))
    spec = BatchSpec.from_model(model)
    tokens, labels = reasons({"input_ids": torch.tensor([[1, 10]]), "labels": torch.tensor([5])}, spec)
    assert tokens.startswith("input_ids[0, 1] = 10, vocabulary 10 (max 9); 1 of 2 bad") and "module tok" in tokens
    assert labels.startswith("labels: sample 0 has 5, allowed 0..2 (num_classes 3); 1 of 1 bad")
    assert "module head" in labels


def test_outputs_of_a_regression_do_not_make_probabilities_of_its_targets() -> None:
    assert check_batch((torch.rand(2, 4), torch.rand(2, 3) * 50), BatchSpec.from_model(nn.Linear(4, 3))) == []


# --- learnt


def good(size: int = 4, length: int = 7) -> dict[str, Any]:
    return {
        "image": torch.rand(size, 3, 8, 8),
        "input_ids": torch.ones(size, length, dtype=torch.int64),
        "labels": torch.arange(size),
    }


def test_drift_of_dtype_shape_range_and_fields_is_found() -> None:
    spec = BatchSpec.learn([good(), good(2)])
    assert check_batch(good(9, 30), spec) == []
    drifted: list[tuple[dict[str, Any], str]] = [
        ({"image": torch.rand(4, 3, 8, 8).double()}, "has dtype float64, expected float32"),
        ({"image": torch.rand(4, 1, 8, 8)}, "has shape (4, 1, 8, 8), expected (any, 3, 8, 8)"),
        ({"image": torch.rand(4, 3, 8, 8) * 255}, "images look not scaled"),
        ({"labels": torch.rand(4)}, "has dtype float32, expected int64"),
    ]
    for change, said in drifted:
        found = reasons(good() | change, spec)
        assert any(said in reason for reason in found), (said, found)
    missing = good()
    del missing["labels"]
    assert reasons(missing, spec) == ["is missing: the spec has it among its fields"]


def test_what_differs_between_the_first_batches_is_free() -> None:
    batches = [{"x": torch.rand(4, 5), "meta": torch.rand(4)}, {"x": torch.rand(4, 6)}]
    spec = BatchSpec.learn(batches)
    assert spec.fields is not None and spec.fields["x"].shape == (None, None) and "meta" not in spec.fields
    assert check_batch({"x": torch.rand(1, 9)}, spec) == []


def test_ranges_are_widened_by_the_margin() -> None:
    spec = BatchSpec.learn([{"x": torch.tensor([0.0, 2.0])}], margin=0.5)
    assert spec.fields is not None and (spec.fields["x"].min, spec.fields["x"].max) == (-1.0, 3.0)
    assert check_batch({"x": torch.tensor([-0.9, 2.9])}, spec) == []
    assert reasons({"x": torch.tensor([0.0, 3.5])}, spec)[0].startswith("has 3.5, allowed -1..3; 1 of 2")


def test_what_is_known_stays_and_is_what_the_batches_are_checked_against() -> None:
    base = BatchSpec(num_classes=4, value_range=(0, 1), fields={"labels": FieldSpec(max=3)})
    spec = BatchSpec.learn([good()], base=base)
    assert spec.num_classes == 4 and spec.fields is not None and spec.fields["labels"] == FieldSpec(max=3)
    assert spec.fields["image"].max is None  # value_range is the tighter bound
    with pytest.raises(BadBatch, match="cannot learn from batch 1: .*has 9, allowed at most 3") as caught:
        BatchSpec.learn([good(), good() | {"labels": torch.tensor([0, 9, 1, 2])}], base=base)
    assert caught.value.index == 1 and caught.value.problems[0].field == "labels"


def test_nothing_can_be_learnt_from_nothing() -> None:
    with pytest.raises(ValueError, match="no batch to learn from"):
        BatchSpec.learn([])
    with pytest.raises(ValueError, match="margin"):
        BatchSpec.learn([good()], margin=-1)


def test_an_unseen_class_or_longer_text_is_no_drift() -> None:
    spec = BatchSpec.learn([good(4, 7)])
    assert check_batch(good(50, 21), spec) == []


@pytest.mark.parametrize(("batch_first", "found"), [(True, 1), (False, 0)])
def test_the_batch_size_is_not_taken_for_a_length_where_the_model_takes_time_first(
    batch_first: bool, found: int
) -> None:
    attention = nn.MultiheadAttention(4, 1, batch_first=batch_first)
    spec = BatchSpec.from_model(Net(tok=Embedding(10, 4), pos=Embedding(20, 4), attn=attention))
    assert len(check_batch({"input_ids": torch.ones(15, 64, dtype=torch.int64)}, spec)) == found
    assert len(check_batch({"input_ids": torch.ones(25, 64, dtype=torch.int64)}, spec)) == 1
