"""`nanscan.scan` reads Paddle's tensors and layers, and says of them what it says of equal ones of PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
import torch

import nanscan

NAN, INF = float("nan"), float("inf")
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "dense": lambda x: x,
    "transposed": lambda x: x.t(),
    "sliced": lambda x: x[1:, ::2],
    "expanded": lambda x: x[:1].expand([5, 6]),
    "0-dim": lambda x: x[0, 0],
    "empty": lambda x: x[:0],
}


def values(planted: bool) -> np.ndarray:
    found = np.random.default_rng(7).normal(size=(4, 6)).astype("float32")
    if planted:
        found[0, 2], found[2, 4], found[3, 0] = NAN, -INF, INF
    return found


DTYPES = ("float32", "float16", "bfloat16", "float64", "complex64")
LOOKS = [*itertools.product(DTYPES, LAYOUTS), ("float8_e4m3fn", "dense"), ("float8_e5m2", "0-dim")]


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize(("dtype", "layout"), LOOKS)
def test_numbers_are_those_of_the_equal_torch_tensor(dtype: str, layout: str, planted: bool) -> None:
    given = paddle.to_tensor(values(planted))
    look, eight_bit = LAYOUTS[layout], dtype.startswith("float8")
    mine = look(given).astype(dtype) if eight_bit else look(given.astype(dtype))  # Paddle has no views of 8 bits
    twin = torch.from_dlpack(mine).clone()
    got, wanted = nanscan.scan([mine]), nanscan.scan([twin])
    assert repr(got.to_dict()) == repr(wanted.to_dict())  # repr: NaN equals itself there
    assert got.finite is (wanted.nan_count + wanted.inf_count == 0)
    row = got.tensors[0]
    assert (row.dtype, row.device, row.shape) == (dtype, "cpu", tuple(mine.shape))
    assert type(row.shape) is tuple and all(type(size) is int for size in row.shape)


class Tied(paddle.nn.Layer):
    """An output layer with the weight of its embedding, a buffer that counts and one that can hold a NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.table = paddle.nn.Embedding(7, 3)
        self.norm = paddle.nn.BatchNorm1D(3)
        self.head = paddle.nn.Linear(3, 2)
        self.head2 = self.head
        self.register_buffer("mean", paddle.zeros([3]))
        self.register_buffer("count", paddle.zeros([1], dtype="int64"))
        self.unused = self.create_parameter([2])

    def forward(self, ids: Any) -> Any:
        return self.head(self.norm(self.table(ids).mean(1) - self.mean))


def test_a_layer_gives_its_parameters_and_floating_buffers_by_their_names() -> None:
    layer = Tied()
    layer.mean[1] = NAN
    report = nanscan.scan(layer)
    assert {row.name.split(" ")[0] for row in report.tensors} == {
        name for name, value in [*layer.named_parameters(), *layer.named_buffers()] if name != "count"
    }
    assert "head.weight (= head2.weight)" in [row.name for row in report.tensors]
    (bad,) = report.bad
    assert (bad.name, bad.kind, bad.first_bad, bad.describe()) == (
        "mean", "buffer", (1,), "buffer 'mean' has 1 NaN, 0 Inf of 3 (first at [1])",
    )  # fmt: skip


def test_gradients_of_a_layer_are_named_and_counted_once() -> None:
    layer = Tied()
    layer(paddle.to_tensor([[1, 2], [3, 3]])).sum().backward()
    with paddle.no_grad():
        layer.head.bias.grad[1] = INF
    report = nanscan.scan(layer, grads=True)
    assert {row.kind for row in report.tensors} == {"grad"} and len(report.tensors) == 5  # 'unused' has none
    grads = [p.grad.numpy().astype("float64") for n, p in layer.named_parameters() if p.grad is not None]
    with np.errstate(invalid="ignore"):
        squares = sum(float((g[np.isfinite(g)] ** 2).sum()) for g in grads)
    assert report.finite_norm == pytest.approx(squares**0.5, rel=1e-6)
    assert report.bad[0].describe() == "grad of 'head.bias (= head2.bias)' has 0 NaN, 1 Inf of 2 (first at [1])"


@pytest.mark.parametrize("sparse_gradient", [False, True])
def test_the_first_bad_row_of_an_embedding_gradient_is_that_of_the_table(sparse_gradient: bool) -> None:
    table = paddle.nn.Embedding(9, 2, sparse=sparse_gradient)
    rows = table(paddle.to_tensor([[4, 6, 4]]))
    (rows * paddle.to_tensor([[[1.0, 1.0], [1.0, NAN], [1.0, 1.0]]])).sum().backward()
    report = nanscan.scan(table, grads=True)
    assert report.bad[0].describe() == "grad of 'weight' has 1 NaN, 0 Inf of 18 (first at [6, 1])"
    assert report.finite_norm == pytest.approx(3.0)  # row 4 was read twice: 2, 2; row 6: 1


def test_a_sparse_tensor_is_read_as_its_values() -> None:
    sparse = paddle.sparse.sparse_coo_tensor([[2, 0], [1, 3]], [3.0, NAN], [4, 5])
    row = nanscan.scan({"adjacency": sparse}).bad[0]
    assert (row.nan_count, row.first_bad, row.shape) == (1, (0, 3), (4, 5))


def test_tensors_of_both_libraries_are_scanned_together() -> None:
    report = nanscan.scan({"paddle": paddle.to_tensor([3.0, INF]), "torch": torch.tensor([4.0])})
    assert report.finite_norm == 5.0 and [row.name for row in report.bad] == ["paddle"]


def test_a_state_dict_is_scanned_without_its_counters_and_schedules() -> None:
    layer = Tied()
    schedule = paddle.optimizer.lr.StepDecay(0.1, 3)
    optimizer = paddle.optimizer.Adam(schedule, parameters=layer.parameters())
    layer(paddle.to_tensor([[1, 2], [3, 3]])).sum().backward()
    optimizer.step()
    assert "count" not in [row.name for row in nanscan.scan(layer.state_dict()).tensors]
    report = nanscan.scan(optimizer.state_dict())
    assert report.finite and len(report.tensors) == len(optimizer.state_dict()) - 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: [paddle.ones([2]), paddle.to_tensor([1, 2])], ["'[1]'", "position 1", "int64"]),
        (lambda: {"w": paddle.ones([2]), "note": "x"}, ["'note'", "is a str, not a tensor"]),
        (lambda: paddle.optimizer.SGD(parameters=[paddle.create_parameter([2], "float32")]), ["SGD", "scan(model)"]),
    ],
)  # fmt: skip
def test_refusals_name_the_place_and_the_remedy(given: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(TypeError) as caught:
        nanscan.scan(given())
    assert all(word in str(caught.value) for word in words)


def test_nothing_of_the_scanned_memory_is_copied() -> None:
    from nanscan.paddle_objects import as_torch

    layer = paddle.nn.Linear(4, 4)
    assert as_torch(layer.weight).data_ptr() == layer.weight.data_ptr()
    assert not layer.weight.stop_gradient  # left as it was
