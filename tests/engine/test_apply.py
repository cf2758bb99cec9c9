"""Scaling, clamping and zeroing gradients in place: the right elements, each once, and nothing beside them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nanscan.engine import Engine
from tests.engine.make import COMPLEX, DTYPES, REAL, Spec, make, numbers, specs

NAN, INF = math.nan, math.inf


LAZY = frozenset({"conjugated", "negated"})  # PyTorch cannot copy some of these, so there is nothing to compare with


def group(*grads: Tensor | None) -> list[dict[str, list[torch.nn.Parameter]]]:
    """One parameter group for these gradients."""
    params = []
    for grad in grads:
        like = torch.zeros(1) if grad is None else torch.zeros(grad.shape, dtype=grad.dtype)
        params.append(torch.nn.Parameter(like, requires_grad=False))
        params[-1].grad = grad
    return [{"params": params}]


def grads_of(groups: list[dict[str, list[torch.nn.Parameter]]]) -> list[Tensor | None]:
    return [p.grad for g in groups for p in g["params"]]


def bits(t: Tensor) -> list[int]:
    """The bytes of the elements in row-major order."""
    return list(t.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).tolist())


def wide(t: Tensor) -> Tensor:
    return t.detach().to(torch.complex128 if t.is_complex() else torch.float64)


def close_to_rounded(got: Tensor, want: Tensor) -> bool:
    """``got`` is ``want`` (float64) rounded to its dtype, by at most one unit in the last place more."""
    if got.is_complex():
        got, want = torch.view_as_real(got), torch.view_as_real(want.contiguous())
    info = torch.finfo(got.dtype)
    slack = 2 * info.eps * want.abs() + 2 * info.tiny * info.eps
    return bool(((wide(got) - want).abs() <= slack).logical_or(want.isnan() & got.isnan()).all())


@given(batch=st.lists(specs(without=LAZY), min_size=4, max_size=16), factor=st.floats(1e-30, 1.0))
def test_scaling_multiplies_every_element_once_in_any_dtype_and_layout(
    engine: Engine, batch: list[Spec], factor: float
) -> None:
    tensors = [make(spec)[0] for spec in batch if not spec.planted]
    groups = group(*[t.detach() for t in tensors])
    before = [wide(t).clone(memory_format=torch.contiguous_format) for t in tensors]
    engine.scale_grads_(groups, factor)
    for grad, old in zip(grads_of(groups), before, strict=True):
        assert grad is not None and close_to_rounded(grad, old * factor), (
            grad,
            old,
            factor,
        )


@given(batch=st.lists(specs(without=LAZY), min_size=4, max_size=16))
def test_zeroing_changes_the_bad_elements_only(engine: Engine, batch: list[Spec]) -> None:
    made = [make(spec) for spec in batch]
    groups = group(*[t.detach() for t, _ in made])
    before = [t.detach().clone(memory_format=torch.contiguous_format) for t, _ in made]
    engine.zero_nonfinite_grads_(groups)
    for grad, old, (_, planted) in zip(grads_of(groups), before, made, strict=True):
        assert grad is not None
        want = old.reshape(-1).clone()
        for at in planted:
            want[at] = 0
        assert bits(grad) == bits(want)


def test_conjugated_and_negated_views_are_changed_as_what_they_view(engine: Engine) -> None:
    base = torch.tensor([complex(2, 4), complex(NAN, 1), complex(-8, 6)])
    groups = group(base.conj(), base.clone().conj().imag)
    engine.zero_nonfinite_grads_(groups)
    engine.scale_grads_(groups, 0.5, 2.0)
    assert base.tolist() == [1 + 2j, 0j, -2 + 2j]
    assert grads_of(groups)[1].tolist() == [-2.0, -0.5, -2.0]  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", ["scale", "clamp", "zero", "clear"])
def test_nothing_outside_the_gradient_is_written(engine: Engine, dtype: torch.dtype, call: str) -> None:
    outer = torch.full((9, 41), NAN, dtype=torch.float32).to(dtype)
    for inner in (outer[1:8:2, 3:38], outer[0, 1:40:3], outer[:, 5], outer[4:6, 7:9]):
        inner.copy_(torch.ones(inner.shape).to(dtype))
        outside = torch.ones(outer.shape, dtype=torch.bool)
        outside[tuple(torch.isfinite(outer.float() if not dtype.is_complex else outer).nonzero().T)] = False
        before = [b for b, keep in zip(outer.flatten(), outside.flatten(), strict=True) if keep]
        change(engine, group(inner), call)
        after = [b for b, keep in zip(outer.flatten(), outside.flatten(), strict=True) if keep]
        assert all(bits(a) == bits(b) for a, b in zip(after, before, strict=True))
        assert (
            not torch.ones(inner.shape).to(dtype).to(torch.complex64).equal(inner.to(torch.complex64)) or call == "zero"
        )
        outer.copy_(torch.full(outer.shape, NAN).to(dtype))


def change(engine: Engine, groups: list[dict[str, list[torch.nn.Parameter]]], call: str) -> None:
    if call == "scale":
        engine.scale_grads_(groups, 0.5)
    elif call == "clamp":
        engine.scale_grads_(groups, 1.0, 0.25)
    elif call == "zero":
        engine.zero_nonfinite_grads_(groups)
    else:
        engine.clear_grads_if(groups, torch.tensor(1.0))


@pytest.mark.parametrize("call", ["scale", "clamp", "zero", "clear"])
def test_an_overlapping_gradient_is_replaced_by_a_dense_one_and_changed_once(engine: Engine, call: str) -> None:
    cell = torch.tensor([2.0])
    windows = torch.tensor([1.0, 2.0, 3.0, 4.0]).unfold(0, 3, 1)
    groups = group(cell.expand(4), windows)
    change(engine, groups, call)
    wide_grad, rolled = grads_of(groups)
    assert wide_grad is not None and rolled is not None
    want = {"scale": (1.0, 0.5), "clamp": (0.25, 0.25), "zero": (2.0, 1.0), "clear": (0.0, 0.0)}[call]
    assert wide_grad.tolist() == [want[0]] * 4 and wide_grad.is_contiguous()
    assert rolled[0, 0].item() == want[1] and rolled.is_contiguous()
    assert cell.item() == 2.0  # what was shared is left alone


def test_a_tied_gradient_is_scaled_once(engine: Engine) -> None:
    grad, cell = torch.full((3,), 8.0), torch.tensor([4.0])
    groups = group(grad, grad.view(3), cell.expand(2))
    groups.append({"params": [groups[0]["params"][0], groups[0]["params"][2]]})
    engine.scale_grads_(groups, 0.5)
    assert grad.tolist() == [4.0] * 3
    assert [g.tolist() for g in grads_of(groups) if g is not None] == [
        [4.0] * 3,
        [4.0] * 3,
        [2.0] * 2,
        [4.0] * 3,
        [2.0] * 2,
    ]
    engine.scale_grads_(groups, 0.5)
    assert grad.tolist() == [2.0] * 3


@pytest.mark.parametrize("call", ["scale", "clamp", "zero", "clear"])
def test_a_sparse_gradient_is_summed_then_changed_in_its_values(engine: Engine, call: str) -> None:
    grad = torch.sparse_coo_tensor([[1, 3, 1]], [[1.0, 2.0], [4.0, 4.0], [1.0, 2.0]], (5, 2), check_invariants=True)
    groups = group(grad)
    change(engine, groups, call)
    (new,) = grads_of(groups)
    assert new is not None and new.is_sparse and new.is_coalesced()
    want = {"scale": [[1, 2], [2, 2]], "clamp": [[0.25, 0.25]] * 2, "zero": [[2, 4], [4, 4]], "clear": [[0, 0]] * 2}
    assert new.values().tolist() == want[call] and new.indices().tolist() == [[1, 3]]


@pytest.mark.parametrize("bad", [NAN, INF])
def test_zeroing_a_complex_element_clears_both_its_parts(engine: Engine, bad: float) -> None:
    groups = group(torch.tensor([complex(1, 2), complex(3, bad), complex(bad, 4)]))
    engine.zero_nonfinite_grads_(groups)
    assert grads_of(groups)[0].tolist() == [1 + 2j, 0j, 0j]  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clamping_comes_after_scaling(engine: Engine, dtype: torch.dtype) -> None:
    values = torch.tensor([-16.0, -2.0, 0.0, 1.0, 8.0])
    groups = group(values.to(dtype) if not dtype.is_complex else torch.complex(values, -values).to(dtype))
    engine.scale_grads_(groups, 0.5, 2.0)
    got = grads_of(groups)[0]
    assert got is not None
    real = got.real if dtype.is_complex else got.float()
    assert real.tolist() == [-2.0, -1.0, 0.0, 0.5, 2.0]
    if dtype.is_complex:
        assert got.imag.tolist() == [2.0, 1.0, -0.0, -0.5, -2.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("limit", [1.0, 1e6, 1e300])
def test_clamping_keeps_nan_and_accepts_any_limit(engine: Engine, dtype: torch.dtype, limit: float) -> None:
    grad = torch.tensor([NAN, 0.5, -0.5]).to(dtype)
    groups = group(grad)
    engine.scale_grads_(groups, 1.0, limit)
    assert [str(v) for v in grad.to(torch.complex64).real.tolist()] == ["nan", "0.5", "-0.5"]


@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX], ids=str)
@pytest.mark.parametrize("factor", [1e-38, 1e-40, 1e-44, 1e-60])
def test_a_factor_below_float32_keeps_its_digits(engine: Engine, dtype: torch.dtype, factor: float) -> None:
    real = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
    grad = numbers(1000, real, 1.0, 1.0, 0)
    grad = torch.view_as_complex(grad.view(-1, 2)) if dtype.is_complex else grad
    want = wide(grad) * factor
    engine.scale_grads_(group(grad), factor)
    assert close_to_rounded(grad, want)


def test_factor_one_without_a_limit_leaves_the_gradient_object_alone(engine: Engine) -> None:
    grad = torch.ones(1).expand(4)
    groups = group(grad)
    engine.scale_grads_(groups, 1.0)
    assert grads_of(groups)[0] is grad


@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_gradients_are_cleared_exactly_where_the_flag_is_one(engine: Engine, flag: float) -> None:
    made = [torch.tensor([NAN, 1.0, INF]).to(dtype) for dtype in DTYPES] + [torch.ones(2, 3).t(), torch.zeros(0)]
    before = [bits(t) for t in made]
    groups = group(*made, None)
    engine.clear_grads_if(groups, torch.tensor(flag))
    for grad, old in zip(grads_of(groups)[:-1], before, strict=True):
        assert grad is not None
        assert bits(grad) == (bits(torch.zeros_like(grad)) if flag else old), grad.dtype


def test_a_gradient_made_in_inference_mode_is_scaled(engine: Engine) -> None:
    with torch.inference_mode():
        grad = torch.full((3,), 2.0)
    groups = group(grad)
    engine.scale_grads_(groups, 0.5)
    assert grads_of(groups)[0].tolist() == [1.0] * 3  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_gradient_with_a_graph_is_scaled_outside_the_graph(engine: Engine) -> None:
    w = torch.nn.Parameter(torch.tensor([3.0]))
    (w**3).sum().backward(create_graph=True)
    engine.scale_grads_([{"params": [w]}], 0.5)
    assert w.grad is not None and w.grad.tolist() == [13.5]


def test_scaling_bumps_the_version_so_that_autograd_notices(engine: Engine) -> None:
    grad = torch.ones(3)
    version = grad._version
    engine.scale_grads_(group(grad), 0.5)
    if engine.name != "native":  # it writes through the memory, as an optimizer's fused kernel does
        assert grad._version > version
    assert grad.tolist() == [0.5] * 3
