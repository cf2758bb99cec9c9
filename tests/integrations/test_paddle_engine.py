"""Paddle's tensors read by the compiled engine through their own table, and by Paddle's operators: one answer."""

import math
import os
import subprocess
import sys

import numpy as np
import paddle
import pytest
import torch

import nanscan
from nanscan.engine import active_engine
from nanscan.engine.result import BadInput
from nanscan.integrations.paddle import engine, operators
from nanscan.integrations.paddle.tensors import label_of, sparse_places

NAN, INF = math.nan, math.inf


def matrix(dtype="float32"):
    return paddle.to_tensor(np.arange(-6, 6, dtype="float32").reshape(3, 4)).astype(dtype)


def planted(value, dtype="float32"):
    """A 3 × 4 matrix with `value` at [1, 2] and [2, 3]."""
    array = np.arange(-6, 6, dtype="float32").reshape(3, 4)
    array[1, 2] = array[2, 3] = value
    return paddle.to_tensor(array).astype(dtype)


def sparse_rows(ids, weights=None):
    """The gradient of an embedding with sparse=True; row i of it is the sum of the weights of the ids that are i."""
    embedding = paddle.nn.Embedding(10, 4, sparse=True)
    out = embedding(paddle.to_tensor(ids))
    (out * paddle.to_tensor(weights or [1.0] * len(ids)).unsqueeze(1)).sum().backward()
    return embedding.weight._grad_ivar()


TENSORS = {
    **{dtype: lambda dtype=dtype: matrix(dtype) for dtype in ("float32", "float16", "bfloat16", "float64")},
    "float8": lambda: matrix("float8_e4m3fn"),
    "complex64": lambda: paddle.to_tensor([1 + 2j, complex(NAN, 1), complex(1, INF)]),
    "complex128": lambda: paddle.to_tensor(np.array([3 + 4j])),
    "huge": lambda: matrix("float64") * 1e300,
    "0-dim": lambda: paddle.to_tensor(1.5),
    "empty": lambda: paddle.zeros([0, 3]),
    "no data yet": lambda: paddle.Tensor(),
    "parameter": lambda: paddle.nn.Linear(3, 4).weight,
    "transposed": lambda: planted(NAN).t(),
    "strided": lambda: planted(INF)[1:, ::2],
    "overlapping": lambda: paddle.as_strided(matrix(), [6, 2], [1, 1]),
    "offset": lambda: paddle.as_strided(planted(NAN), [2, 2], [1, 4], 12),
    "permuted": lambda: paddle.ones([2, 3, 4, 5]).transpose([0, 2, 3, 1]),
    **{f"{dtype} with NaN": lambda dtype=dtype: planted(NAN, dtype) for dtype in ("float16", "bfloat16", "float64")},
    "sparse rows": lambda: sparse_rows([3, 1, 3], [1.0, 2.0, INF]),
    "coo": lambda: paddle.sparse.sparse_coo_tensor([[0, 0, 1], [1, 1, 0]], [1.0, 2.0, NAN], [2, 2]),
    "csr": lambda: paddle.sparse.sparse_csr_tensor([0, 1, 2], [0, 1], [1.0, 2.0], [2, 2]),
}


def dense(tensor):
    """Its elements in float64, in the order that indices count in; of sparse ones the values."""
    if tensor.is_selected_rows():
        wide = {}
        for row, values in zip(tensor.rows(), tensor._get_tensor_from_selected_rows().numpy(), strict=True):
            wide[row] = wide.get(row, 0) + values
        return np.stack([wide[row] for row in sorted(wide)]).ravel()
    tensor = tensor.coalesce().values() if tensor.is_sparse_coo() else tensor
    tensor = tensor.values() if tensor.is_sparse_csr() else tensor
    if tensor.size == 0:
        return np.zeros(0)
    name = str(tensor.dtype)
    whole = tensor if "64" in name or "128" in name else tensor.astype("float32")
    return whole.numpy().astype("complex128" if "complex" in name else "float64").ravel()


@pytest.mark.parametrize("which", TENSORS)
@pytest.mark.parametrize("read", [engine.scan_tensors, operators.scan], ids=["native", "operators"])
def test_rows_are_those_of_a_plain_float64_loop(which, read):
    tensor = TENSORS[which]()
    before = None if tensor.size == 0 or not tensor.is_dense() else tensor.astype("float32").numpy().tobytes()
    scan = read([None, tensor, tensor])
    elements = dense(tensor)
    nan, fine = np.isnan(elements), np.isfinite(elements)
    (row,) = scan.rows()
    assert (row.position, row.also, scan.numel) == (1, (2,), elements.size)
    assert (row.nan_count, row.inf_count) == (nan.sum(), (~nan & ~fine).sum())
    assert row.first_bad == (int(np.argmin(fine)) if (~fine).any() else -1)
    largest = np.abs(elements[fine]).max(initial=0.0)
    assert row.inf_norm == pytest.approx(largest, rel=1e-12)
    norm = largest * np.linalg.norm(elements[fine] / largest) if largest else 0.0
    assert row.finite_norm == pytest.approx(norm, rel=1e-12)
    assert scan.finite == fine.all() == math.isfinite(scan.norm)
    assert before is None or tensor.astype("float32").numpy().tobytes() == before


def test_the_compiled_engine_is_what_reads():
    assert engine.name() == "native"
    module = engine._module()
    assert active_engine().name == "native"  # it teaches the module torch's types
    assert module.scan([paddle.ones([2]), torch.ones(3)], [], None, None).numel == 5  # nothing had to be resolved


def test_an_extra_tensor_counts_but_is_not_measured():
    scan = engine.scan_tensors([paddle.ones([4])], [paddle.to_tensor(NAN), paddle.full([9], 9.0)])
    assert (scan.finite, scan.nan_count, scan.finite_norm, scan.numel) == (False, 1, 2.0, 4)
    assert [row.position for row in scan.bad_rows()] == [1]


def test_views_of_one_memory_with_another_shape_are_two_tensors():
    whole = paddle.ones([4])
    assert engine.scan_tensors([whole, whole.detach(), whole.reshape([2, 2])]).count == 2


def cleared(how):
    tensor = paddle.ones([3])
    getattr(tensor, how)()
    return tensor


def lazy():
    with paddle.LazyGuard():
        return paddle.nn.Linear(2, 3).weight


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: cleared("_clear"), ValueError, "no memory"),
        (lambda: cleared("_clear_data"), ValueError, "no memory"),
        (lazy, ValueError, "not initialized"),
        (lambda: paddle.arange(3), TypeError, "dtype int64"),
        (lambda: 3.0, TypeError, "use paddle.to_tensor"),
        (lambda: np.ones(3), TypeError, "use paddle.to_tensor"),
        (lambda: "x", TypeError, "is a str"),
    ],
)
@pytest.mark.parametrize("read", [engine.scan_tensors, operators.scan], ids=["native", "operators"])
def test_what_has_no_elements_is_refused_with_its_position(make, kind, words, read):
    with pytest.raises(BadInput, match=words) as caught:
        read([paddle.ones([2]), make()])
    assert (caught.value.position, caught.value.kind) == (1, kind)


def test_a_sparse_gradient_has_the_shape_and_the_index_of_its_table():
    gradient = sparse_rows([7, 2, 7], [1.0, NAN, 1.0])
    assert label_of(gradient, ("emb",)).shape == (10, 4)
    assert sparse_places(engine.scan_tensors([gradient]), [gradient]) == {0: (2, 0)}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "complex64"])
@pytest.mark.parametrize("scale", [engine.scale_, operators.scale_], ids=["native", "operators"])
def test_scaling_and_clamping_change_memory_in_place_and_a_tied_tensor_once(dtype, scale):
    tensor = matrix(dtype)
    view, place = tensor.t(), tensor.data_ptr()
    scale([tensor, tensor.detach()], 0.5, 1.0)
    expected = np.clip(np.arange(-6, 6).reshape(3, 4) * 0.5, -1, 1)
    assert tensor.data_ptr() == place and str(tensor.dtype) == f"paddle.{dtype}"
    shown = (view if dtype in ("complex64", "float64") else view.astype("float32")).numpy()
    assert np.array_equal(shown.T, expected)


@pytest.mark.parametrize("scale", [engine.scale_, operators.scale_], ids=["native", "operators"])
def test_scaling_a_view_reaches_its_elements_only_and_shared_ones_once(scale):
    whole, band = paddle.ones([4, 4]), paddle.ones([5])
    scale([whole.t()[1:, ::2], paddle.as_strided(band, [4, 2], [1, 1])], 3.0)
    assert whole.numpy().sum() == 16 + 2 * 6 and np.array_equal(band.numpy(), [3.0] * 5)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "complex64"])
def test_zeroing_changes_bad_elements_only(dtype):
    tensor = planted(NAN, dtype)
    engine.zero_nonfinite_([tensor])
    assert np.array_equal(dense(tensor), dense(planted(0.0, dtype)))


def test_threads_can_scan_while_others_make_tensors():
    from concurrent.futures import ThreadPoolExecutor

    big = paddle.ones([1 << 19])
    with ThreadPoolExecutor(3) as pool:
        norms = list(pool.map(lambda i: engine.scan_tensors([big, paddle.full([1 << 17], float(i))]).norm, range(30)))
    assert norms == pytest.approx([math.sqrt((1 << 19) + i * i * (1 << 17)) for i in range(30)], rel=1e-12)


def test_a_tensor_lives_no_longer_for_having_been_scanned():
    tensor = paddle.ones([3])
    before = sys.getrefcount(tensor)
    for _ in range(5):
        engine.scan_tensors([tensor, tensor], [tensor])
        engine.scale_([tensor], 1.5)
        with pytest.raises(BadInput):
            engine.scan_tensors([tensor, "x"])
    assert sys.getrefcount(tensor) == before


TRAINING = """
import sys
import paddle
from nanscan.integrations.paddle import engine, wrap
layer = paddle.nn.Linear(2, 1)
optimizer = wrap(paddle.optimizer.SGD(parameters=layer.parameters()), layer, clip_norm=1e-3, log=print)
for value in (1.0, float("nan"), 1.0):
    layer(paddle.full([3, 2], value)).sum().backward()
    optimizer.observe(0.5)
    optimizer.step()
    optimizer.clear_grad()
assert [r.action for r in optimizer.history] == ["step", "skip", "step"], optimizer.history
assert optimizer.history[0].clip_factor < 0.01 and optimizer.history[1].bad[0].name == "weight"
assert "torch" not in sys.modules
print("engine", engine.name())
"""


@pytest.mark.parametrize("chosen", ["native", "eager"])
def test_a_guarded_training_imports_no_torch(chosen):
    environment = {**os.environ, "NANSCAN_ENGINE": chosen}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRAINING], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert f"engine {chosen}" in run.stdout


def test_both_frameworks_are_read_in_one_process():
    """Here torch was imported first; there it is paddle."""
    code = """
import paddle, torch, nanscan
from nanscan.integrations.paddle import engine
assert engine.scan_tensors([paddle.full([4], 2.0)]).norm == 4.0
assert nanscan.scan([torch.full((4,), 2.0)]).norm == 4.0
assert engine.scan_tensors([paddle.nn.Linear(2, 2).weight]).finite
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "torch" in sys.modules and engine.scan_tensors([paddle.full([4], 2.0)]).norm == 4.0


def test_what_belongs_to_paddle_is_sent_there_by_what_is_for_torch():
    layer = paddle.nn.Linear(2, 1)
    layer(paddle.ones([1, 2])).sum().backward()
    with pytest.raises(TypeError, match=r"SGD of Paddle: nanscan.integrations.paddle.wrap guards it"):
        nanscan.wrap(paddle.optimizer.SGD(parameters=layer.parameters()))
    with pytest.raises(TypeError, match="Paddle's: use nanscan.integrations.paddle.clip_grad_norm_"):
        nanscan.clip_grad_norm_(layer.parameters(), 1.0)
