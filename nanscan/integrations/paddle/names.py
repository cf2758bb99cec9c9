"""What the parameters of a Paddle layer are called."""

from __future__ import annotations

from collections.abc import Iterator
from operator import is_not
from typing import Any

import paddle

from nanscan.integrations.paddle.gradients import Gradients
from nanscan.integrations.paddle.tensors import label_of
from nanscan.report import Label

__all__ = ["Names", "buffers_of"]


class Names:
    """The labels of gradients, by position; built anew when the parameters change.

    Args:
        layer: where names come from first; tied parameters have all theirs. A parameter that it does not know goes by
            Paddle's own `param.name`.
    """

    def __init__(self, layer: Any = None) -> None:
        self.layer = layer
        self._params: list[Any] = []  # held, so that no other tensor can take the id of one of them
        self._labels: list[Label] = []

    def labels(self, gradients: Gradients) -> list[Label]:
        """The labels of the gradients, one for each parameter."""
        params = gradients.params
        if len(params) != len(self._params) or any(map(is_not, params, self._params)):
            self._labels = self._build(gradients)
            self._params = params
        return self._labels

    def of(self, params: list[Any]) -> list[tuple[str, ...]]:
        """All names of each parameter."""
        known = _names_of(self.layer)
        return [known.get(id(p)) or (str(p.name),) for p in params]

    def _build(self, gradients: Gradients) -> list[Label]:
        names = self.of(gradients.params)
        pairs = zip(gradients.params, gradients.grads, strict=True)
        return [
            label_of(p if g is None else g, n, "grad")._replace(shape=tuple(int(i) for i in p.shape))
            for (p, g), n in zip(pairs, names, strict=True)
        ]


def _names_of(layer: Any) -> dict[int, tuple[str, ...]]:
    found: dict[int, tuple[str, ...]] = {}
    for prefix, inner in _layers(layer):
        for name, param in inner._parameters.items():
            if param is not None:
                full = f"{prefix}.{name}" if prefix else name
                found[id(param)] = (*found.get(id(param), ()), full)
    return found


def buffers_of(layer: Any) -> tuple[list[Any], list[Label]]:
    """The floating-point buffers of a layer and their labels.

    BatchNorm's running statistics are parameters in Paddle, ones that are not trained: those count too.
    """
    buffers, labels = [], []
    for prefix, inner in _layers(layer):
        untrained = [(name, p) for name, p in inner._parameters.items() if p is not None and p.stop_gradient]
        for name, buffer in (*inner._buffers.items(), *untrained):
            if buffer is not None and buffer._is_initialized() and (buffer.is_floating_point() or buffer.is_complex()):
                buffers.append(buffer)
                labels.append(label_of(buffer, (f"{prefix}.{name}" if prefix else name,), "buffer"))
    return buffers, labels


def _layers(layer: Any) -> Iterator[tuple[str, Any]]:
    """(prefix, layer) of a layer and all below it, without DataParallel around it; a shared one at each of its places.

    Layer.named_parameters leaves the further places of a shared layer out.
    """
    if layer is None:
        return
    while isinstance(layer, paddle.DataParallel):
        layer = layer._layers
    yield "", layer
    for name, child in layer._sub_layers.items():
        if child is not None:
            for prefix, inner in _layers(child):
                yield f"{name}.{prefix}" if prefix else name, inner
