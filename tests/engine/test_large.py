"""More elements than 32 bits can count."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanscan.engine import Engine, eager, measure
from tests.conftest import load_engine
from tests.engine.test_apply import group

BEYOND = 2**31 + 8


@pytest.fixture
def engine() -> Engine:
    """The native engine alone: the eager one would need minutes, the reference 50 GB."""
    return load_engine("native")


@given(st.lists(st.integers(0, 7), max_size=5), st.integers(1, 40))
def test_pieces_of_the_eager_engine_follow_row_major_order(shape: list[int], limit: int) -> None:
    t = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    cut = list(measure._cut(t, limit))
    assert all(1 <= piece.numel() <= limit for piece in cut)
    assert torch.cat([piece.reshape(-1) for piece in cut] or [t.reshape(-1)]).equal(t.reshape(-1))


def test_the_eager_engine_counts_on_from_piece_to_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_CPU_PIECE", 50)
    t = torch.ones(70, 90, dtype=torch.float64).t()
    t[61, 40], t[80, 3] = math.nan, math.inf
    for scan in (eager.scan([t]), eager.launch_grads(group(t), clip_norm=None).result()):
        row = scan.rows()[0]
        assert (row.nan_count, row.inf_count, row.first_bad) == (1, 1, 61 * 70 + 40)
        assert row.finite_norm == pytest.approx(math.sqrt(6298), rel=1e-14)


def test_a_dense_tensor_beyond_2_to_31_elements_is_read_to_its_end(engine: Engine) -> None:
    t = torch.zeros(BEYOND, dtype=torch.uint8).view(torch.float8_e5m2)  # zero pages: no memory until they are written
    t[0], t[2**31 + 3], t[-1] = 3.0, math.nan, 4.0
    found = engine.scan([t])
    row = found.rows()[0]
    assert (found.numel, row.nan_count, row.inf_count, row.first_bad) == (BEYOND, 1, 0, 2**31 + 3)
    assert (row.finite_norm, row.inf_norm) == (5.0, 4.0)


def test_an_expanded_tensor_beyond_2_to_31_elements_is_counted_logically(engine: Engine) -> None:
    columns = 2**15
    rows = 2**16 + 1
    cells = torch.ones(rows, 1, dtype=torch.float16)
    cells[-1, 0] = math.inf
    found = engine.scan([cells.expand(rows, columns)])
    row = found.rows()[0]
    assert (found.numel, row.nan_count, row.inf_count, row.first_bad) == (rows * columns, 0, columns, 2**31)
    assert row.finite_norm == pytest.approx(math.sqrt(2**31), rel=1e-9)
