"""A cause of NaN or Inf made to happen, and its healthy twin: what the tests of the hints share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import nanscan
from nanscan.origin.hints import hint_table

__all__ = ["INF", "NAN", "Case", "case", "check", "leaf", "params"]

INF, NAN = math.inf, math.nan
_CURES = {name: cure for name, _, cure in hint_table()}


@dataclass(frozen=True)
class Case:
    """`bad` makes the fault of a row, `healthy` is a near miss that makes none; words are what the hint must say."""

    row: str
    words: tuple[str, ...]
    bad: Callable[[], Any]
    healthy: Callable[[], Any]
    other: bool = False  # the near miss has an origin too, for another reason


def case(row: str, *words: str, bad: Callable[[], Any], healthy: Callable[[], Any], other: bool = False) -> Case:
    return Case(row, words, bad, healthy, other)


def params(cases: Iterable[Case]) -> Any:
    """One test for each case, under its row's name."""
    return pytest.mark.parametrize("given", cases, ids=lambda c: c.row.replace(" ", "_"))


def check(given: Case) -> None:
    """The row speaks in its words where it happens, and is silent where it does not."""
    cure = _CURES[given.row]
    hints = [origin.hint or "" for origin in _origins(given.bad)]
    spoken = [hint for hint in hints if hint.endswith(f". {cure}.")]
    assert spoken, f"no origin has the hint of {given.row!r}: {hints}"
    for hint in spoken:
        assert len(re.findall(r"\.\s", hint)) <= 1, f"more than two sentences: {hint}"
    for word in given.words:
        assert any(word in hint for hint in spoken), f"{word!r} is not in {spoken}"
    twin = _origins(given.healthy)
    assert given.other == bool(twin), [str(origin) for origin in twin]
    assert not any((origin.hint or "").endswith(f". {cure}.") for origin in twin), [str(origin) for origin in twin]


def _origins(function: Callable[[], Any]) -> list[nanscan.Origin]:
    torch.manual_seed(0)
    with nanscan.trace() as traced:
        kept = function()  # a result that is kept, as a program keeps it
        if isinstance(kept, Tensor) and kept.requires_grad and kept.grad_fn is not None:
            kept.backward(torch.ones_like(kept))  # not as a sum: a loss of -inf would be a fault of its own
    del kept
    return traced.origins


def leaf(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A parameter, as a vector."""
    return torch.tensor(values, dtype=dtype, requires_grad=True)
