"""What an engine accepts, what it refuses and with which words, and what counts as the same tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nanscan.engine import BadInput, Engine, reference
from nanscan.engine.tensors import full_index, may_overlap, resolve
from tests.engine.make import Subclass

NAN = math.nan


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def freed() -> Tensor:
    t = torch.ones(3)
    t.untyped_storage().resize_(0)
    return t


def cut_short() -> Tensor:
    t = torch.ones(8)[2:]
    t.untyped_storage().resize_(16)
    return t


def quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8)


class Pair(Tensor):
    """A wrapper subclass without memory, over two tensors."""

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a, b

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} on a Pair")


class Box(Pair):
    """A wrapper subclass over one tensor."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a"], None


class Empty(Pair):
    """A wrapper subclass that doesn't say what it wraps."""

    __tensor_flatten__ = property()  # type: ignore[assignment]  # hasattr() is False


REFUSED: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    ("numpy", lambda: np.ones(3), TypeError,
     "is a numpy.ndarray, not a tensor: use torch.from_numpy (or torch.as_tensor)"),
    ("float", lambda: 1.5, TypeError, "is the number 1.5 (float), not a tensor: use torch.tensor"),
    ("int", lambda: 3, TypeError, "is the number 3 (int), not a tensor: use torch.tensor"),
    ("text", lambda: "w", TypeError, "is a str, not a tensor"),
    ("list", lambda: [torch.ones(1)], TypeError,
     "is a list, not a tensor: give the tensors in it in one flat list or dict"),
    ("int64", lambda: torch.ones(3, dtype=torch.int64), TypeError,
     "has dtype torch.int64: only floating-point and complex tensors can hold NaN or Inf"),
    ("bool", lambda: torch.ones(3, dtype=torch.bool), TypeError,
     "has dtype torch.bool: only floating-point and complex tensors can hold NaN or Inf"),
    ("sparse ints", lambda: torch.ones(3, dtype=torch.int32).to_sparse(), TypeError,
     "has dtype torch.int32: only floating-point and complex tensors can hold NaN or Inf"),
    ("float4", lambda: torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), TypeError,
     "has dtype torch.float4_e2m1fn_x2, which PyTorch cannot convert: scan a copy in a wider dtype"),
    ("quantized", quantized, TypeError, "is quantized (torch.qint8): scan its .dequantize()"),
    ("meta", lambda: torch.ones(3, device="meta"), ValueError,
     "is a meta or fake tensor: it has a shape but no numbers to scan"),
    ("fake", fake, ValueError, "is a meta or fake tensor: it has a shape but no numbers to scan"),
    ("freed", freed, ValueError, "has no memory: its storage holds 0 of 12 bytes (freed or resized)"),
    ("lazy", lambda: torch.nn.LazyLinear(2).weight, ValueError, "is not initialized yet: run one forward pass first"),
    ("pair", lambda: Pair(torch.ones(2), torch.ones(2)), TypeError, "is a Pair: scan the tensors inside it, a, b"),
    ("empty wrapper", lambda: Empty(torch.ones(2), torch.ones(2)), ValueError,
     "has no memory: its storage holds 0 of 8 bytes (freed or resized)"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(("make", "kind", "reason"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_what_cannot_be_read_is_refused_with_position_reason_and_kind(
    engine: Engine, make: Callable[[], Any], kind: type[Exception], reason: str
) -> None:
    with pytest.raises(BadInput) as caught:
        engine.scan([torch.ones(2), None, make()])
    assert (caught.value.position, caught.value.reason, caught.value.kind) == (2, reason, kind)
    assert str(caught.value) == f"tensor 2 {reason}"
    with pytest.raises(BadInput) as caught:
        engine.scan([torch.ones(2)], [torch.ones(1), make()])
    assert caught.value.position == 2


def test_a_tensor_that_outgrows_its_storage_is_refused() -> None:
    with pytest.raises(
        BadInput, match=r"^tensor 0 has no memory: its storage holds 16 of 32 bytes \(freed or resized\)$"
    ):
        reference.scan([cut_short()])


def test_an_integer_gradient_is_refused_at_its_flat_position(engine: Engine) -> None:
    params = [torch.nn.Parameter(torch.ones(2, dtype=d), requires_grad=False) for d in (torch.float32, torch.int32)]
    params[1].grad = torch.ones(2, dtype=torch.int32)
    for call in (engine.scan_grads, lambda groups: engine.launch_grads(groups, clip_norm=None)):
        with pytest.raises(BadInput, match=r"^tensor 2 has dtype torch\.int32") as caught:
            call([{"params": [params[0], params[0]]}, {"params": [params[1]]}])
        assert caught.value.kind is TypeError


def test_a_tensor_inside_a_function_transform_is_refused(engine: Engine) -> None:
    def inside(x: Tensor) -> Tensor:
        engine.scan([x])
        return x

    for transformed in (torch.vmap(inside), torch.func.grad(lambda x: inside(x * 2).sum())):
        with pytest.raises(
            BadInput, match=r"tensor 0 is a tensor inside of torch\.func\.grad, vmap or another transform"
        ):
            transformed(torch.ones(2, 2))


def test_nothing_to_scan_is_finite_with_norm_zero(engine: Engine) -> None:
    for tensors in ([], [None, None], [torch.zeros(0, 3)]):
        found = engine.scan(tensors)
        assert (found.finite, found.norm, found.finite_norm, found.inf_norm, found.numel) == (True, 0.0, 0.0, 0.0, 0)
        assert found.count == len(found.rows()) == sum(t is not None for t in tensors)


def test_the_same_tensor_counts_once_with_every_position(engine: Engine) -> None:
    t, other = torch.full((4, 3), 1.0), torch.full((4, 3), 1.0)
    found = engine.scan([t, None, other, t, t.view(4, 3), t.t(), t[:2]])
    assert [(r.position, tuple(r.also)) for r in found.rows()] == [(0, (3, 4)), (2, ()), (5, ()), (6, ())]
    assert (found.count, found.numel) == (4, 12 + 12 + 12 + 6)
    assert found.norm == pytest.approx(math.sqrt(42), rel=1e-15)


def test_memory_that_is_read_as_another_dtype_is_another_tensor(engine: Engine) -> None:
    t = torch.ones(4)
    assert engine.scan([t, t.view(torch.bfloat16)[:4], t.view(torch.complex64)]).count == 3


def test_empty_tensors_are_the_same_only_if_they_are_one_object(engine: Engine) -> None:
    a, b = torch.zeros(0), torch.zeros(0)
    assert [(r.position, tuple(r.also)) for r in engine.scan([a, b, a]).rows()] == [(0, (2,)), (1, ())]


def test_extra_tensors_join_the_counts_but_not_norms_and_numel(engine: Engine) -> None:
    loss = torch.tensor(NAN)
    found = engine.scan([torch.tensor([3.0, 4.0]), None], [loss, torch.full((2,), 1e30), torch.tensor(math.inf)])
    assert (found.norm, found.finite_norm, found.inf_norm, found.numel, found.count) == (5.0, 5.0, 4.0, 2, 1)
    assert (found.finite, found.nan_count, found.inf_count) == (False, 1, 1)
    assert [r.position for r in found.rows()] == [0, 2, 3, 4]
    assert [(r.position, r.first_bad) for r in found.bad_rows()] == [(2, 0), (4, 0)]


@pytest.mark.parametrize(
    ("values", "norm"),
    [([1.0, NAN, math.inf], NAN), ([1.0, -math.inf], math.inf), ([3.0, 4.0], 5.0)],
    ids=["nan", "inf", "finite"],
)
def test_norm_is_nan_before_inf_before_the_finite_norm(engine: Engine, values: list[float], norm: float) -> None:
    found = engine.scan([torch.ones(2, dtype=torch.bfloat16), torch.tensor(values, dtype=torch.float64)][1:])
    assert found.norm == norm or math.isnan(norm) and math.isnan(found.norm)
    assert found.finite_norm == math.sqrt(sum(v * v for v in values if math.isfinite(v)))


def test_a_complex_element_counts_once_as_nan_if_either_part_is(engine: Engine) -> None:
    t = torch.tensor([complex(1, 0), complex(NAN, math.inf), complex(math.inf, 2), complex(3, NAN), complex(3, 4)])
    row = engine.scan([t]).rows()[0]
    assert (row.nan_count, row.inf_count, row.first_bad) == (2, 1, 1)
    assert row.finite_norm == pytest.approx(math.sqrt(26), rel=1e-15)
    assert row.inf_norm == 5.0  # the modulus


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_sparse_rows_are_summed_before_they_are_scanned(engine: Engine, dtype: torch.dtype) -> None:
    i = torch.tensor([[3, 1, 3, 0]])
    v = torch.tensor([[1.0, 2], [1, 1], [1, math.inf], [0, 0]]).to(dtype)
    t = torch.sparse_coo_tensor(i, v, (5, 2), check_invariants=True)
    row = engine.scan([t]).rows()[0]
    assert (row.nan_count, row.inf_count) == (0, 1)
    assert row.finite_norm == pytest.approx(math.sqrt(6), rel=1e-7)
    assert full_index(t, row.first_bad) == (3, 1)


def test_infs_of_opposite_sign_in_one_sparse_row_are_a_nan(engine: Engine) -> None:
    t = torch.sparse_coo_tensor([[1, 1]], [math.inf, -math.inf], (3,), check_invariants=True)
    row = engine.scan([t]).rows()[0]
    assert (row.nan_count, row.inf_count) == (1, 0)


def test_sparse_tensors_with_the_same_values_in_other_rows_are_two_tensors(engine: Engine) -> None:
    values = torch.tensor([3.0, 4.0])
    a, b = (
        torch.sparse_coo_tensor(i, values, (9,), is_coalesced=True, check_invariants=True) for i in ([[0, 1]], [[5, 7]])
    )
    assert a.values().data_ptr() == b.values().data_ptr()
    found = engine.scan([a, b, a])
    assert [(r.position, tuple(r.also)) for r in found.rows()] == [(0, (2,)), (1, ())]
    assert found.norm == pytest.approx(math.sqrt(50), rel=1e-15)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
def test_compressed_sparse_tensors_are_scanned_and_placed(engine: Engine, layout: str) -> None:
    dense = torch.zeros(6, 8)
    dense[4, 5], dense[1, 1], dense[5, 0] = NAN, 3.0, 4.0
    block = ((2, 4),) if layout in ("bsr", "bsc") else ()
    t = getattr(dense, f"to_sparse_{layout}")(*block)
    row = engine.scan([t]).rows()[0]
    assert (row.nan_count, row.finite_norm) == (1, 5.0)
    assert full_index(t, row.first_bad) == (4, 5)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["csr", "csc"])
def test_compressed_batches_are_placed_with_their_batch_index(layout: str) -> None:
    dense = torch.zeros(2, 3, 4)
    dense[0, 0, 0], dense[1, 2, 3] = 1.0, NAN
    t = getattr(dense, f"to_sparse_{layout}")()
    bad = int(torch.isnan(t.values().flatten()).nonzero()[0])
    assert full_index(t, bad) == (1, 2, 3)


def test_subclasses_are_scanned_as_what_they_wrap(engine: Engine) -> None:
    plain = torch.tensor([1.0, NAN, 3.0])
    jagged = torch.nested.nested_tensor([torch.ones(2), plain], layout=torch.jagged)
    for t in (
        plain.as_subclass(Subclass),
        Box(plain, plain),
        torch.nn.Parameter(plain),
        torch.nn.Buffer(plain),
        jagged,
    ):
        found = engine.scan([t])
        assert (found.nan_count, found.count) == (1, 1), type(t)


def test_a_subclass_and_its_memory_are_one_tensor(engine: Engine) -> None:
    t = torch.ones(3)
    found = engine.scan([t, t.as_subclass(Subclass), torch.nn.Parameter(t), Box(t, t)])
    assert [(r.position, tuple(r.also)) for r in found.rows()] == [(0, (1, 2, 3))]


def test_complex32_and_the_other_float8_dtypes_are_scanned(engine: Engine) -> None:
    half = torch.view_as_complex(torch.tensor([[3.0, 4.0], [NAN, 0.0]], dtype=torch.float16))
    row = engine.scan([half]).rows()[0]
    assert (row.finite_norm, row.nan_count, row.first_bad) == (5.0, 1, 1)
    for dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu):
        row = engine.scan([torch.tensor([2.0, 2.0, NAN, 2.0, 2.0]).to(dtype)]).rows()[0]
        assert (row.finite_norm, row.inf_norm, row.nan_count, row.first_bad) == (4.0, 2.0, 1, 2), dtype


def test_a_dtensor_is_scanned_as_its_local_shard(engine: Engine) -> None:
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        t = distribute_tensor(torch.tensor([3.0, 4.0, NAN]), init_device_mesh("cpu", (1,)), [Shard(0)])
        found = engine.scan([t])
        assert (found.finite_norm, found.nan_count, found.rows()[0].first_bad) == (5.0, 1, 2)
    finally:
        destroy_process_group()


def test_a_scan_neither_changes_nor_keeps_a_tensor(engine: Engine) -> None:
    import sys

    t = torch.tensor([1.0, NAN, -0.0, math.inf], requires_grad=True)
    before, version, references = t.detach().clone(), t._version, sys.getrefcount(t)
    found = engine.scan([t])
    assert found.nan_count == 1
    assert t.detach().view(torch.int32).equal(before.view(torch.int32)) and t._version == version
    assert sys.getrefcount(t) == references
    assert t.grad is None and t.is_leaf


@pytest.mark.parametrize(
    ("tensor", "overlaps"),
    [
        (torch.ones(1).expand(4), True),
        (torch.ones(3, 1).expand(3, 2), True),
        (torch.ones(10).as_strided((4, 3), (2, 1)), True),
        (torch.ones(1, 1).expand(1, 1), False),
        (torch.ones(3, 4).t(), False),
        (torch.ones(4, 6)[::2, 1::2], False),
        (torch.ones(()), False),
        (torch.ones(1, 0).expand(5, 0), False),
    ],
)
def test_overlap_is_seen(tensor: Tensor, overlaps: bool) -> None:
    assert may_overlap(tensor) is overlaps


def test_resolve_shares_memory_with_conjugated_and_negated_views() -> None:
    t = torch.tensor([1 + 2j, 3 - 1j])
    assert resolve(t.conj()).data_ptr() == t.data_ptr() and not resolve(t.conj()).is_conj()
    assert resolve(t.conj().imag).data_ptr() == t.data_ptr() + 4 and not resolve(t.conj().imag).is_neg()


def test_overlapping_windows_count_each_logical_element(engine: Engine) -> None:
    windows = torch.tensor([1.0, 2.0, NAN, 4.0, 5.0]).unfold(0, 3, 1)
    row = engine.scan([windows]).rows()[0]
    assert (row.nan_count, row.first_bad) == (3, 2)
    assert row.finite_norm == pytest.approx(reference.scan([windows.contiguous()]).finite_norm, rel=1e-15)


def test_memory_that_is_not_aligned_to_its_dtype_is_read_right(engine: Engine) -> None:
    for dtype, size in ((np.float32, 4), (np.float64, 8), (np.float16, 2)):
        raw = np.full(size * 300 + 8, 0xFF, dtype=np.uint8)  # NaN outside
        for shift in range(1, size):
            inside = np.ndarray((200,), dtype=dtype, buffer=raw, offset=size * 50 + shift)
            inside[:] = np.linspace(-2, 2, 200)
            t = torch.frombuffer(raw, dtype=torch.uint8)[size * 50 + shift :][: size * 200]
            try:
                t = t.view(torch.from_numpy(np.zeros(1, dtype)).dtype)
            except RuntimeError:  # PyTorch views no memory as a dtype that it isn't aligned to
                continue
            assert engine.scan([t]).norm == pytest.approx(reference.scan([t.clone()]).norm, rel=1e-6)
