"""Short forms for tests of `check_batch`: its one finding, and a tensor of integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanscan import BatchProblem, BatchSpec, check_batch


def only(batch: Any, spec: BatchSpec | None = None) -> BatchProblem:
    """The one problem that is found."""
    problems = check_batch(batch, spec)
    assert len(problems) == 1, [str(problem) for problem in problems]
    return problems[0]


def ints(*values: Any) -> Tensor:
    """A tensor of these numbers."""
    return torch.tensor(values)
