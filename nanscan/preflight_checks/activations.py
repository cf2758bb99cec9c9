"""How large layers' outputs are, and which sigmoid, tanh and ReLU do nothing any more."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from nanscan.origin.dispatch import unseen
from nanscan.preflight_checks.codes import found
from nanscan.preflight_checks.finding import Finding
from nanscan.preflight_checks.subject import LAYERS

__all__ = ["Activations"]

_RATIO = 1e6
_FLAT = 0.75  # of a layer's outputs that must be saturated
_DEAD = 0.95  # of a ReLU's outputs that must be 0; half of them are, usually
_LEAST = 16  # outputs from which on a fraction says something


class Activations:
    """Numbers of one forward pass; they stay on their device until `findings` brings them over."""

    def __init__(self) -> None:
        self.order: list[str] = []  # layers in the order of their calls
        self._sizes: list[tuple[str, Tensor]] = []
        self._fractions: list[tuple[str, str, Tensor]] = []

    def layer(self, path: str, module: nn.Module, output: Any) -> None:
        """Told of what a module returns."""
        out = output[0] if isinstance(output, tuple) and output else output
        if isinstance(module, LAYERS) and isinstance(out, Tensor) and out.is_floating_point() and out.numel():
            with unseen():
                self._sizes.append((path, out.detach().abs().amax().double()))
            self.order.append(path)

    def op(self, name: str, path: str, out: Any) -> None:
        """Told of the output of an activation function."""
        if not isinstance(out, Tensor) or out.numel() < _LEAST:
            return
        values = out.detach()
        if name in ("sigmoid", "sigmoid_"):
            self._fractions.append((name, path, ((values < 0.01) | (values > 0.99)).double().mean()))
        elif name in ("tanh", "tanh_"):
            self._fractions.append((name, path, (values.abs() > 0.99).double().mean()))
        elif name in ("relu", "relu_"):
            self._fractions.append((name, path, (values == 0).double().mean()))

    def findings(self) -> list[Finding]:
        """What is wrong with them."""
        flat = [(name.rstrip("_"), path, float(value)) for name, path, value in self._fractions]
        saturated = [(n, p, v) for n, p, v in flat if n != "relu" and v > _FLAT]
        dead = [(p, v) for n, p, v in flat if n == "relu" and v > _DEAD]
        told = [found("NS409", p, f"{v:.0%} of the outputs of {n} are saturated") for n, p, v in saturated]
        told += [found("NS410", p, f"{v:.1%} of the outputs of ReLU are 0 for the whole batch") for p, v in dead]
        return list(dict.fromkeys(told)) + self._scale()

    def _scale(self) -> list[Finding]:
        """The first layer whose outputs are 1e6 times those of an earlier one, or a millionth of them."""
        least, most = (math.inf, ""), (0.0, "")
        for path, tensor in self._sizes:
            size = float(tensor)
            if not math.isfinite(size) or size == 0:  # the loss tells; a last layer may start at 0
                continue
            if size > least[0] * _RATIO:
                return [found("NS411", path, f"outputs up to {size:.3g}, after {least[0]:.3g} in {least[1]}")]
            if size < most[0] / _RATIO:
                return [found("NS411", path, f"outputs up to {size:.3g} only, after {most[0]:.3g} in {most[1]}")]
            least, most = min(least, (size, path)), max(most, (size, path))
        return []
