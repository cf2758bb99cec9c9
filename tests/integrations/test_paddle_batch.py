"""Batches of Paddle's tensors are checked as those of PyTorch are, and its data loader can be looked through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
import torch

import nanscan

NAN = float("nan")


def image() -> np.ndarray:
    found = np.random.default_rng(3).normal(size=(4, 3, 5, 5)).astype("float32")
    found[2, 1, 4, 0] = NAN
    return found


BATCHES: dict[str, dict[str, np.ndarray]] = {
    "nan in one image": {"image": image(), "label": np.array([0, 1, 2, 1])},
    "unscaled image": {"image": np.arange(256.0, dtype="float32").reshape(4, 1, 8, 8), "label": np.array([0, 1, 2, 1])},
    "label out of range": {"x": np.ones((3, 2), "float32"), "labels": np.array([0, 3, 1])},
    "no valid target": {"x": np.ones((2, 2), "float32"), "labels": np.array([-100, -100])},
    "token out of the vocabulary": {"input_ids": np.array([[1, 2, 30]]), "labels": np.array([1])},
    "too long for the positions": {"input_ids": np.ones((2, 9), "int64")},
    "mask of every key": {"input_ids": np.ones((2, 3), "int64"), "attention_mask": np.eye(2, 3, 1) * [[1], [0]]},
    "different sizes": {"x": np.ones((3, 2), "float32"), "labels": np.array([0, 1])},
    "nothing wrong": {"x": np.ones((3, 2), "float32"), "labels": np.array([0, 1, 2])},
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_problems_are_worded_as_for_the_equal_torch_batch(name: str) -> None:
    spec = nanscan.BatchSpec(num_classes=3, vocab_size=10, max_positions=8)
    arrays = BATCHES[name]
    found = nanscan.check_batch({key: paddle.to_tensor(value) for key, value in arrays.items()}, spec)
    wanted = nanscan.check_batch({key: torch.from_numpy(value.copy()) for key, value in arrays.items()}, spec)
    assert found == wanted
    assert bool(found) is (name != "nothing wrong")


def test_the_sample_with_the_nan_is_named_in_any_nesting_and_again_with_the_same_spec() -> None:
    spec = nanscan.BatchSpec()
    for wrap in (lambda x: [x, paddle.to_tensor([0, 1, 2, 1])], lambda x: ({"pixels": x}, 3)):
        for _ in range(2):
            (problem,) = nanscan.check_batch(wrap(paddle.to_tensor(image())), spec)
            assert "[2] has 1 NaN of 75 (first at [1, 4, 0])" in str(problem)


def test_a_paddle_dtype_is_a_dtype_of_a_field() -> None:
    spec = nanscan.BatchSpec(fields={"x": nanscan.FieldSpec(dtype=paddle.float32, shape=(None, 2))})
    assert nanscan.check_batch({"x": paddle.ones([3, 2])}, spec) == []
    (problem,) = nanscan.check_batch({"x": paddle.ones([3, 2], dtype="float64")}, spec)
    assert problem.reason == "has dtype float64, expected float32"


class Rows(paddle.io.Dataset):
    """32 rows; row 13 has a NaN."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return np.full(3, NAN if i == 13 else i, "float32"), i % 2


def test_a_data_loader_of_paddle_is_checked_batch_by_batch() -> None:
    loader = paddle.io.DataLoader(Rows(), batch_size=4, shuffle=False)
    checked = nanscan.CheckedLoader(loader, on_bad="skip", spec=nanscan.BatchSpec(num_classes=2))
    assert len(checked) == 8
    for epoch in range(2):
        with pytest.warns(nanscan.NonFiniteWarning, match=r"batch 3 of epoch \d: batch\[0\]\[1\] has 3 NaN of 3"):
            assert sum(isinstance(batch[0], paddle.Tensor) for batch in checked) == 7
        assert checked.skipped_batches == epoch + 1
    with pytest.raises(nanscan.BadBatch, match=r"batch 3 of epoch 0 is bad"):
        list(nanscan.CheckedLoader(loader))


class Classifier(paddle.nn.Layer):
    """Tokens, positions, a block with layers of its own, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = paddle.nn.Embedding(50, 8, padding_idx=0)
        self.position_embeddings = paddle.nn.Embedding(12, 8)
        self.encoder = paddle.nn.TransformerEncoder(paddle.nn.TransformerEncoderLayer(8, 2, 16), 1)
        self.classifier = paddle.nn.Linear(8, 4)


class Pictures(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.body = paddle.nn.Sequential(paddle.nn.Conv2D(3, 8, 3), paddle.nn.ReLU())
        self.head = paddle.nn.Conv2D(8, 5, 1)


@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (Classifier, (50, 12, 4)),
        (Pictures, (None, None, 5)),
        (lambda: paddle.DataParallel(Classifier()), (50, 12, 4)),
        (lambda: paddle.nn.LSTM(3, 4), (None, None, None)),
    ],
)
def test_sizes_are_read_off_a_layer(make: Callable[[], Any], sizes: tuple[int | None, ...]) -> None:
    spec = nanscan.BatchSpec.from_model(make())
    assert (spec.vocab_size, spec.max_positions, spec.num_classes) == sizes


def test_a_batch_is_held_against_the_layer_it_is_for() -> None:
    spec = nanscan.BatchSpec.from_model(Classifier())
    batch = {"input_ids": paddle.full([2, 13], 50, "int64"), "labels": paddle.to_tensor([0, 4])}
    problems = nanscan.check_batch(batch, spec)
    text = "\n".join(map(str, problems))
    assert "sequence length 13 > 12 positions (module position_embeddings)" in text
    assert "= 50, vocabulary 50 (max 49); 26 of 26 bad" in text and "module word_embeddings" in text
    assert "sample 1 has 4, allowed 0..3" in text and "module classifier" in text
