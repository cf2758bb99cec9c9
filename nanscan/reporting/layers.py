"""Tensors grouped into layers, few enough for a log line and a screen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["coarser", "layer_of"]

FEW = 4  # a quarter of the limit


def layer_of(name: str) -> str:
    """The layer that a tensor belongs to: its name without the last part.

    >>> layer_of("encoder.3.weight"), layer_of("emb.weight (= head.weight)"), layer_of("scale")
    ('encoder.3', 'emb', 'scale')
    """
    first = name.split(" (= ", 1)[0]
    return first.rpartition(".")[0] or first


def coarser(layers: Sequence[str], limit: int) -> dict[str, str]:
    """Layer -> the group it is shown in; as many parts of the names are kept as give at most `limit` groups.

    Where that would leave few groups, neighbours are put together instead.

    >>> coarser(["a.0.x", "a.0.y", "b.0.x"], 2)
    {'a.0.x': 'a.0', 'a.0.y': 'a.0', 'b.0.x': 'b.0'}
    >>> coarser([f"net.{i}" for i in range(8)], 5)["net.7"]
    'net.6 … 7'
    """
    depth = max((layer.count(".") + 1 for layer in layers), default=1)
    for parts in range(depth, 0, -1):
        groups = _cut(layers, parts)
        count = _count(groups.values())
        if count <= limit and (parts == depth or count * FEW >= limit):
            return groups
        if count <= limit:
            return _neighbours(groups, _cut(layers, parts + 1), limit)
    kept = list(dict.fromkeys(layer.split(".")[0] for layer in layers))[: limit - 1]
    return {layer: first if (first := layer.split(".")[0]) in kept else "(others)" for layer in layers}


def _cut(layers: Sequence[str], parts: int) -> dict[str, str]:
    return {layer: ".".join(layer.split(".")[:parts]) for layer in layers}


def _neighbours(groups: dict[str, str], finer: dict[str, str], limit: int) -> dict[str, str]:
    """Of each group as many parts as its share of `limit` allows, each of neighbouring finer groups."""
    members: dict[str, list[str]] = {}
    for layer, group in groups.items():
        inside = members.setdefault(group, [])
        if not inside or inside[-1] != finer[layer]:
            inside.append(finer[layer])
    total = sum(map(len, members.values()))
    names: dict[tuple[str, str], str] = {}
    for group, inside in members.items():
        inside = list(dict.fromkeys(inside))
        parts = 1 + (limit - len(members)) * len(inside) // total
        size = -(-len(inside) // parts)
        for at in range(0, len(inside), size):
            part = inside[at : at + size]
            name = part[0] if len(part) == 1 else f"{part[0]} … {part[-1].removeprefix(group + '.')}"
            names |= {(group, one): name for one in part}
    return {layer: names[group, finer[layer]] for layer, group in groups.items()}


def _count(names: Iterable[str]) -> int:
    return len(set(names))
