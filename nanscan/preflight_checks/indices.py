"""Class labels and table rows that an op is about to look up: out of range they end in a crash, on a GPU for good."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from nanscan.preflight_checks.codes import found
from nanscan.preflight_checks.finding import Finding

__all__ = ["LOOKUPS", "OutOfRange", "out_of_range"]

LOOKUPS = frozenset({"nll_loss_forward", "nll_loss2d_forward", "embedding", "_embedding_bag"})


class OutOfRange(Exception):
    """Ends the pass before the op that would crash; `.finding` says why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding


def out_of_range(name: str, args: Sequence[Any], where: str) -> Finding | None:
    """What is wrong with the indices that one of `LOOKUPS` gets, None if nothing is.

    Args:
        args: of the op: (logits, target, weight, reduction, ignore_index) or (table, indices, …).
        where: the module that runs.
    """
    table, indices = args[0], args[1]
    if not isinstance(indices, Tensor) or not indices.numel() or indices.is_meta:
        return None
    if name.startswith("nll"):
        classes, ignored = table.shape[1 if table.dim() > 1 else 0], args[4]
        bad = ((indices < 0) | (indices >= classes)) & (indices != ignored)
        return _said("NS502", where, indices, bad, f"target is {{}}, allowed are 0..{classes - 1} and {ignored}")
    bad = (indices < 0) | (indices >= table.shape[0])
    return _said("NS503", where, indices, bad, f"row {{}} of a table with rows 0..{table.shape[0] - 1}")


def _said(code: str, where: str, indices: Tensor, bad: Tensor, text: str) -> Finding | None:
    count = int(bad.sum())
    if not count:
        return None
    first = bad.nonzero()[0].tolist()
    value = int(indices[tuple(first)])
    return found(code, where, f"{text.format(value)} (at {first}; {count} of {indices.numel()} bad)")
