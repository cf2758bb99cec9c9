"""Loss functions, as their ops are seen: probabilities where logits belong, and a loss far from ln(classes)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanscan.origin.modules import storage_key
from nanscan.preflight_checks.codes import found
from nanscan.preflight_checks.finding import Finding
from nanscan.preflight_checks.prone import Makers

__all__ = ["LossOps"]

_NLL = ("nll_loss_forward", "nll_loss2d_forward")


class LossOps:
    """What the loss ops of a forward pass got and gave."""

    def __init__(self) -> None:
        self.averages: list[tuple[str, float, int]] = []  # (where, average cross-entropy, classes)
        self.classes_seen = False  # labels went into a loss, each of them in range
        self._binaries: list[tuple[str, float, int]] = []
        self._double: list[tuple[Tensor, str]] = []  # log-softmax of probabilities, and what is to be said of it
        self._found: list[Finding] = []

    @property
    def trained(self) -> tuple[float, int] | None:
        """(cross-entropy, classes) if it is so low that the model must have been trained before."""
        low = [(loss, classes) for _, loss, classes in self.averages if loss < 0.5 * math.log(classes)]
        return low[0] if low and len(self.averages) == 1 else None

    def see(self, name: str, args: Sequence[Any], out: Any, where: str, makers: Makers, outside: bool) -> None:
        """Told of each op of a forward pass.

        Args:
            name: of the op, without its namespace.
            where: the module that runs, "loss" outside of the model.
            outside: no module of the model is running.
        """
        if name == "_log_softmax" and _probabilities(args[0], args[1], makers):
            text = f"gets values from 0 to 1 that sum to 1 over {args[0].shape[args[1]]} classes"
            self._double.append((out, text))
            if outside:
                self._found.append(found("NS407", where, f"cross-entropy {text}"))
        elif name in _NLL:
            self._nll(args, out, where)
        elif name == "binary_cross_entropy_with_logits":
            self._binary(args, out, where, makers)

    def _binary(self, args: Sequence[Any], out: Any, where: str, makers: Makers) -> None:
        if makers.of(args[0])[0] == "Sigmoid":
            self._found.append(found("NS408", where, "binary_cross_entropy_with_logits gets the output of a sigmoid"))
        weighted = any(isinstance(weight, Tensor) for weight in args[2:4])
        average = float(out.float().mean()) / (args[0].numel() if len(args) > 4 and args[4] == 2 else 1)
        if not weighted and math.isfinite(average):
            self._binaries.append((where, average, 2))

    def _nll(self, args: Sequence[Any], out: Any, where: str) -> None:
        self.classes_seen = True
        logits, reduction = args[0], args[3]
        for kept, text in self._double:
            if storage_key(kept) == storage_key(logits):
                self._found.append(found("NS407", where, f"cross-entropy {text}"))
        highest = float(logits.detach().max()) if logits.numel() else 0.0
        if highest > 1e-3:  # so no average cross-entropy either
            text = f"nll_loss gets values up to {highest:.4g}, and no log-probability is above 0"
            self._found.append(found("NS407", where, text))
            return
        classes = logits.shape[1 if logits.dim() > 1 else 0]
        loss = out[0].float()
        average = float(loss / out[1].float() if reduction == 2 else loss.mean())
        if classes > 1 and math.isfinite(average):
            self.averages.append((where, average, classes))

    def findings(self) -> list[Finding]:
        """What is wrong with them."""
        high = [
            found("NS406", where, f"cross-entropy {loss:.4g} at the start; ln({classes}) = {math.log(classes):.4g}")
            for where, loss, classes in [*self.averages, *self._binaries]
            if loss > 1.5 * math.log(classes) + 1
        ]
        return list(dict.fromkeys([*self._found, *high]))


def _probabilities(x: Tensor, dim: int, makers: Makers) -> bool:
    if x.dim() == 0 or x.shape[dim] < 2 or not x.numel():
        return False
    if makers.of(x)[0] == "Softmax":
        return True
    values = x.detach().float()
    sums = values.sum(dim)
    return bool((values.min() >= 0) & torch.isclose(sums, torch.ones_like(sums), atol=1e-3).all())
