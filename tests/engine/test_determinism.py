"""The same bits for the same shapes, strides and values, whatever runs beside and however often."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from nanscan.engine import Engine, EngineScan
from tests.engine.make import DTYPES, Spec, make

SIZES = (3, 1000, 16_385, 70_001, 530_003)


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def tensors(dtype: torch.dtype) -> list[Tensor]:
    rng = np.random.default_rng(1)
    made = []
    for size in SIZES:
        x = torch.from_numpy(rng.standard_normal(2 * size)).float()
        made.append(torch.view_as_complex(x.view(-1, 2)).to(dtype) if dtype.is_complex else x[:size].to(dtype))
    return made


def bits(scan: EngineScan) -> bytes:
    floats = [x for row in scan.rows() for x in (row.finite_norm, row.inf_norm)]
    return struct.pack(f"{len(floats) + 3}d", *floats, scan.norm, scan.finite_norm, scan.inf_norm)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_nan", [False, True])
def test_bits_do_not_depend_on_the_thread_count_or_the_run(engine: Engine, dtype: torch.dtype, with_nan: bool) -> None:
    given = tensors(dtype)
    if with_nan:
        for t in given:
            t[t.numel() // 2] = math.nan
    found = set()
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        found.add(bits(engine.scan(given)))
        found.add(bits(engine.launch_grads([{"params": [_holder(t) for t in given]}], clip_norm=1.0).result()))
    assert len(found) <= 2  # a launch may add up in another order than a scan …
    torch.set_num_threads(2)
    assert {bits(engine.scan(given)) for _ in range(3)} <= found  # … but each in its own


def _holder(grad: Tensor) -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.zeros_like(grad), requires_grad=False)
    p.grad = grad
    return p


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "sliced", "half_permuted", "misaligned"])
def test_bits_do_not_depend_on_where_in_memory_a_tensor_lies(engine: Engine, layout: str) -> None:
    spec = Spec(torch.float32, layout, (9, 7, 31, 20), 0.4, 0.6, (), 7)
    found, kept = set(), []
    for _ in range(4):
        kept.append((torch.zeros(np.random.default_rng(len(kept)).integers(1, 99)), make(spec)[0]))
        found.add(bits(engine.scan([kept[-1][1]])))
    assert len(found) == 1


def test_bits_of_a_tensor_do_not_depend_on_its_neighbours(engine: Engine) -> None:
    given = tensors(torch.float32)
    alone = [engine.scan([t]).rows()[0] for t in given]
    together = engine.scan([*given, torch.full((5,), math.nan)]).rows()
    assert [(r.finite_norm, r.inf_norm) for r in together[:-1]] == [(r.finite_norm, r.inf_norm) for r in alone]


def test_threads_that_scan_at_the_same_time_get_their_own_answers(engine: Engine) -> None:
    given = [torch.full((n,), float(n)) for n in (10, 5000, 70_000, 300_000)]
    want = [bits(engine.scan([t])) for t in given]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert [bits(s) for s in pool.map(lambda t: engine.scan([t]), given)] == want
