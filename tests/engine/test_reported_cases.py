"""Failures that people reported of other norm and clip code, each with the right numbers here, on every engine."""

from __future__ import annotations

import math

import pytest
import torch

from nanscan.engine import Engine
from nanscan.engine.tensors import full_index

CLIP = 1.0


def clip(engine: Engine, groups: list[dict[str, list[torch.nn.Parameter]]]) -> float:
    """Clip to a joint norm of `CLIP` as the guard does; the norm after it."""
    norm = engine.scan_grads(groups).norm
    engine.scale_grads_(groups, min(1.0, CLIP / norm))
    return engine.scan_grads(groups).norm


def test_fp16_gradients_of_30000_have_a_finite_norm_and_clip_to_one(engine: Engine) -> None:
    params = [torch.nn.Parameter(torch.ones(4, dtype=torch.float16)) for _ in range(2)]
    for p in params:
        p.grad = torch.full((4,), 30000.0, dtype=torch.float16)
    groups = [{"params": params}]
    found = engine.scan_grads(groups)
    assert found.finite and found.bad_rows() == []
    assert found.norm == pytest.approx(84852.8137, rel=1e-6)
    assert clip(engine, groups) == pytest.approx(1.0, rel=1e-3)  # fp16 keeps three digits
    assert params[0].grad is not None and params[0].grad.tolist() == pytest.approx([0.35355] * 4, abs=2e-4)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_element_names_its_tensor_and_leaves_every_gradient_alone(engine: Engine, bad: float) -> None:
    a, b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    a.grad, b.grad = torch.tensor([bad, 1.0]), torch.tensor([3.0, 4.0])
    found = engine.scan_grads([{"params": [a, b]}])
    (row,) = found.bad_rows()
    assert (row.position, row.first_bad, row.nan_count + row.inf_count) == (0, 0, 1)
    assert (row.nan_count == 1) is math.isnan(bad)
    assert found.finite_norm == pytest.approx(math.sqrt(26), rel=1e-15)
    assert str(a.grad.tolist()) == str([bad, 1.0]) and b.grad.tolist() == [3.0, 4.0]


def test_a_sparse_embedding_gradient_is_summed_by_row_and_placed_by_row_id(engine: Engine) -> None:
    emb = torch.nn.Embedding(10, 2, sparse=True)
    emb(torch.tensor([1, 1])).sum().backward()
    groups = [{"params": [emb.weight]}]
    assert engine.scan_grads(groups).norm == pytest.approx(math.sqrt(8), rel=1e-12)
    assert clip(engine, groups) == pytest.approx(1.0, rel=1e-6)
    assert emb.weight.grad is not None and emb.weight.grad.is_sparse
    emb.weight.grad.values()[0, 0] = math.nan
    row = engine.scan_grads(groups).rows()[0]
    assert (row.nan_count, full_index(emb.weight.grad, row.first_bad)) == (1, (1, 0))


def test_two_embeddings_that_share_their_incoming_gradient_both_count(engine: Engine) -> None:
    a, b = torch.nn.Embedding(10, 2, sparse=True), torch.nn.Embedding(10, 2, sparse=True)
    (a(torch.tensor([1, 2])) + b(torch.tensor([3, 4]))).sum().backward()
    groups = [{"params": [a.weight, b.weight]}]
    found = engine.scan_grads(groups)
    assert (found.count, found.norm) == (2, pytest.approx(math.sqrt(8), rel=1e-12))
    engine.scale_grads_(groups, 0.5)
    assert engine.scan_grads(groups).norm == pytest.approx(math.sqrt(2), rel=1e-12)


def test_no_gradient_anywhere_is_not_bad(engine: Engine) -> None:
    p, q = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    groups = [{"params": [p, q]}]
    found = engine.scan_grads(groups)
    assert (found.finite, found.norm, found.count, found.rows()) == (True, 0.0, 0, [])
    engine.scale_grads_(groups, 0.5)
    engine.zero_nonfinite_grads_(groups)
    q.grad = torch.tensor([math.nan, 1.0])
    assert [r.position for r in engine.scan_grads(groups).bad_rows()] == [1]


def test_any_layout_counts_logical_elements_and_clips_each_once(engine: Engine) -> None:
    e = torch.nn.Parameter(torch.zeros(4))
    e.grad = torch.ones(1).expand(4)
    t = torch.nn.Parameter(torch.zeros(2, 3))
    t.grad = torch.ones(3, 2).t()
    c = torch.nn.Parameter(torch.zeros(4, 3, 2, 2))
    c.grad = torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last)
    for p, norm in ((e, 2.0), (t, math.sqrt(6)), (c, math.sqrt(48))):
        groups = [{"params": [p]}]
        assert engine.scan_grads(groups).norm == pytest.approx(norm, rel=1e-15)
        assert clip(engine, groups) == pytest.approx(1.0, rel=1e-6)
    assert c.grad.is_contiguous(memory_format=torch.channels_last)  # changed in place, not replaced
    c.grad[2, 1, 0, 1] = math.inf
    assert engine.scan_grads([{"params": [c]}]).rows()[0].first_bad == ((2 * 3 + 1) * 2 + 0) * 2 + 1


def test_a_tied_weight_counts_and_is_scaled_once(engine: Engine) -> None:
    emb = torch.nn.Embedding(4, 3)
    head = torch.nn.Linear(3, 4, bias=False)
    head.weight = emb.weight
    emb.weight.grad = torch.ones(4, 3)
    groups = [{"params": [*emb.parameters(), *head.parameters()]}]
    found = engine.scan_grads(groups)
    assert found.norm == pytest.approx(math.sqrt(12), rel=1e-15)
    assert [(r.position, tuple(r.also)) for r in found.rows()] == [(0, (1,))]
    assert clip(engine, groups) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize(("value", "count"), [(2e19, 4), (1e-25, 1000), (1e-38, 3)])
def test_float32_whose_squares_leave_float32_has_its_norm(engine: Engine, value: float, count: int) -> None:
    t = torch.full((count,), value)
    assert engine.scan([t]).norm == pytest.approx(float(t[0]) * math.sqrt(count), rel=1e-14)


def test_a_million_fp16_hundreds_have_norm_1e5(engine: Engine) -> None:
    assert engine.scan([torch.full((1_000_000,), 100.0, dtype=torch.float16)]).norm == pytest.approx(1e5, rel=1e-6)
