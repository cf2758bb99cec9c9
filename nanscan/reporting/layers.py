"""Tensors grouped into layers, few enough for a log line and a screen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["coarser", "layer_of"]


def layer_of(name: str) -> str:
    """The layer that a tensor belongs to: its name without the last part.

    >>> layer_of("encoder.3.weight"), layer_of("emb.weight (= head.weight)"), layer_of("scale")
    ('encoder.3', 'emb', 'scale')
    """
    first = name.split(" (= ", 1)[0]
    return first.rpartition(".")[0] or first


def coarser(layers: Sequence[str], limit: int) -> dict[str, str]:
    """Layer -> the group it is shown in; as many parts of the names are kept as give at most `limit` groups.

    >>> coarser(["a.0.x", "a.0.y", "b.0.x"], 2)
    {'a.0.x': 'a.0', 'a.0.y': 'a.0', 'b.0.x': 'b.0'}
    """
    depth = max((layer.count(".") + 1 for layer in layers), default=1)
    for parts in range(depth, 0, -1):
        groups = {layer: ".".join(layer.split(".")[:parts]) for layer in layers}
        if _count(groups.values()) <= limit:
            return groups
    kept = list(dict.fromkeys(layer.split(".")[0] for layer in layers))[: limit - 1]
    return {layer: first if (first := layer.split(".")[0]) in kept else "(others)" for layer in layers}


def _count(names: Iterable[str]) -> int:
    return len(set(names))
