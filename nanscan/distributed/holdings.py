"""Which rank holds which part of the model, so that each logical element counts once.

Ranks of one device mesh know it from their coordinates. Where ranks differ (stages of a pipeline, meshes over a part of
the group) they exchange a table once. Two ranks that hold a tensor of the same name and shape outside of a common mesh
hold replicas if their values agree, and tensors of their own otherwise: a sketch of a few elements tells.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanscan.engine.shards import box_of, is_dtensor, local_of
from nanscan.report import Label

__all__ = ["Holding", "Own", "Plan", "first_plan", "plan_of_meshes", "plan_of_tables", "same_values"]

Key = tuple[str, tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]]
_SAMPLES = 16
_SAME = 1e-3  # replicas drift by rounding only; sketches of other values differ by about their own size


class Holding(NamedTuple):
    """One parameter as one rank holds it."""

    label: Label
    mesh: tuple[int, ...] | None
    box: tuple[tuple[int, ...], tuple[int, ...]]
    sketch: float
    constant: bool  # all sampled elements are equal, as in new biases: values that prove no relation

    @property
    def key(self) -> Key:
        """What replicas have in common."""
        return self.label.names[0], self.label.shape, self.box


class Own:
    """What this rank holds.

    Args:
        params: the optimizer's parameters.
        labels: of their gradients.
        ranks: of the group.

    Attributes:
        layout: a checksum of names, shapes, meshes and placements.
        sketch: a number made from a few elements of the tensors that are no DTensors.
        regular: True if every mesh has exactly the ranks of the group.
    """

    def __init__(self, params: Sequence[Tensor], labels: Sequence[Label], ranks: Sequence[int]) -> None:
        self.params: list[Any] = list(params)
        self.labels = list(labels)
        look = [(label.names, label.shape, label.dtype, _mesh_of(p)) for p, label in zip(params, labels, strict=True)]
        self.layout = float(zlib.crc32(repr(look).encode()))
        meshes = {id(p.device_mesh): p.device_mesh for p in self.params if is_dtensor(p)}.values()
        self.regular = all(sorted(mesh.mesh.flatten().tolist()) == sorted(ranks) for mesh in meshes)
        plain = [sketch for p, (sketch, _) in zip(params, _sketches(params), strict=True) if not is_dtensor(p)]
        self.sketch = math.fsum(plain) if not any(map(math.isnan, plain)) else math.nan

    def table(self) -> list[Holding]:
        """What the other ranks have to know where not all hold the same."""
        sketches = _sketches(self.params)
        return [
            Holding(label, _mesh_ranks(p), _box(p), *sketch)
            for p, label, sketch in zip(self.params, self.labels, sketches, strict=True)
        ]


@dataclass
class Plan:
    """Who counts what.

    Attributes:
        kinds: for each rank of the group a number; ranks with the same number hold the same elements.
        counted: for each position of this rank whether it counts here (another kind of rank counts the others).
        part: (index of a rank, position) -> what identifies the elements held there.
        holders: the same -> how many ranks hold them.
        label: the same -> the label of that gradient.
    """

    kinds: list[int]
    counted: list[bool]
    part: Callable[[int, int], Hashable]
    holders: Callable[[int, int], int]
    label: Callable[[int, int], Label]

    def __post_init__(self) -> None:
        self.all_counted = all(self.counted)


def first_plan(own: Own, ranks: Sequence[int], rank: int) -> Plan:
    """The plan before a word from the others."""
    if own.regular:
        return plan_of_meshes(own, ranks, rank)
    return plan_of_tables([own.table() if other == rank else [] for other in ranks], ranks.index(rank))


def plan_of_meshes(own: Own, ranks: Sequence[int], rank: int) -> Plan:
    """The plan where all ranks hold the same parameters, on meshes that have exactly the ranks of the group."""
    patterns = [_pattern(param) for param in own.params]
    places: dict[Hashable, list[Hashable]] = {}
    for param, pattern in zip(own.params, patterns, strict=True):
        if pattern not in places:
            places[pattern] = [_coordinates(param, pattern, other) for other in ranks]
    held = [frozenset((pattern, by_rank[i]) for pattern, by_rank in places.items()) for i in range(len(ranks))]
    kinds, first, count = _assigned(held)
    mine = ranks.index(rank)

    def key(index: int, position: int) -> Hashable:
        return patterns[position], places[patterns[position]][index]

    return Plan(
        kinds,
        [first[key(mine, position)] == kinds[mine] for position in range(len(patterns))],
        lambda index, position: (position, key(index, position)),
        lambda index, position: count[key(index, position)],
        lambda index, position: own.labels[position],
    )


def plan_of_tables(tables: Sequence[Sequence[Holding]], mine: int) -> Plan:
    """The plan for ranks that hold different things, from what each of them holds."""
    owners = _owners(tables, _linked(tables))
    keys = [[(owners[i][h.key], *h.key) for h in table] for i, table in enumerate(tables)]
    kinds, first, count = _assigned([frozenset(row) for row in keys])
    return Plan(
        kinds,
        [first[key] == kinds[mine] for key in keys[mine]],
        lambda index, position: keys[index][position],
        lambda index, position: count[keys[index][position]],
        lambda index, position: tables[index][position].label,
    )


def same_values(one: float, other: float) -> bool:
    """True if two sketches are of replicas; a NaN in the weights leaves them unknown, which counts as the same."""
    return math.isnan(one) or math.isnan(other) or abs(one - other) <= _SAME * max(abs(one), abs(other))


def _assigned(held: Sequence[frozenset[Any]]) -> tuple[list[int], dict[Hashable, int], dict[Hashable, int]]:
    """Each rank's kind; of each part the first kind that holds it, and how many ranks do."""
    numbers: dict[frozenset[Any], int] = {}
    kinds = [numbers.setdefault(parts, len(numbers)) for parts in held]
    first: dict[Hashable, int] = {}
    count: dict[Hashable, int] = {}
    for kind, parts in zip(kinds, held, strict=True):
        for part in parts:
            first.setdefault(part, kind)
            count[part] = count.get(part, 0) + 1
    return kinds, first, count


def _linked(tables: Sequence[Sequence[Holding]]) -> list[int]:
    """For each rank the first one that it shares parameters with, through a mesh or as a replica."""
    leader = list(range(len(tables)))
    for i in range(len(tables)):
        for j in range(i):
            if leader[i] != leader[j] and _share(tables[i], tables[j]):
                low, high = sorted((leader[i], leader[j]))
                leader = [low if at == high else at for at in leader]
    return leader


def _share(one: Sequence[Holding], other: Sequence[Holding]) -> bool:
    if {h.mesh for h in one} & {h.mesh for h in other} - {None}:
        return True
    theirs = {h.key: h.sketch for h in other}
    pairs = [(h.sketch, theirs[h.key]) for h in one if h.key in theirs]
    return bool(pairs) and all(same_values(*pair) for pair in pairs)


def _owners(tables: Sequence[Sequence[Holding]], linked: Sequence[int]) -> list[dict[Key, int]]:
    """For each tensor of each rank the first rank that holds the same: ranks may share a part and differ elsewhere."""
    owners: list[dict[Key, int]] = []
    for i, table in enumerate(tables):
        own = {h.key: linked[i] for h in table}
        for j in range(i):
            if linked[i] != linked[j]:
                own.update({key: owners[j][key] for key in _replicated(table, tables[j]) if own[key] == linked[i]})
        owners.append(own)
    return owners


def _replicated(one: Sequence[Holding], other: Sequence[Holding]) -> list[Key]:
    """The plain tensors that both ranks hold, as experts have a dense part in common.

    Equal values tell; new biases are equal anyway, and follow the weight of their module, else all the weights.
    """
    theirs = {h.key: h for h in other if h.mesh is None}
    common = [h for h in one if h.mesh is None and h.key in theirs]
    equal = {h.key: abs(h.sketch - theirs[h.key].sketch) <= _SAME * abs(h.sketch) for h in common}
    telling = [h for h in common if not (h.constant and theirs[h.key].constant)]

    def same(holding: Holding) -> bool:
        module = holding.key[0].rpartition(".")[0]
        beside = [equal[h.key] for h in telling if h.key[0].rpartition(".")[0] == module]
        return all(beside) if beside else any(equal[h.key] for h in telling)

    return [h.key for h in common if equal[h.key] and (h in telling or same(h))]


def _pattern(param: Any) -> Hashable:
    """What says which ranks hold the same elements: the mesh and its dimensions over which the tensor is split."""
    if not is_dtensor(param):
        return None
    split = tuple(dim for dim, placement in enumerate(param.placements) if hasattr(placement, "dim"))
    return tuple(param.device_mesh.mesh.flatten().tolist()), tuple(param.device_mesh.mesh.shape), split


def _coordinates(param: Any, pattern: Any, rank: int) -> Hashable:
    if pattern is None:
        return ()
    at = (param.device_mesh.mesh == rank).nonzero()[0].tolist()
    return tuple(at[dim] for dim in pattern[2])


def _mesh_of(param: Any) -> Any:
    return (param.device_mesh.mesh.tolist(), str(param.placements)) if is_dtensor(param) else None


def _mesh_ranks(param: Any) -> tuple[int, ...] | None:
    return tuple(sorted(param.device_mesh.mesh.flatten().tolist())) if is_dtensor(param) else None


def _box(param: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return box_of(param) if is_dtensor(param) else (tuple(param.shape), (0,) * param.dim())


@torch.no_grad()
def _sketches(params: Sequence[Tensor]) -> list[tuple[float, bool]]:
    """For each tensor one number, made from at most 16 elements of the part that is here, and whether these are equal.

    NaN where there are none.
    """
    weights = torch.linspace(1.0, 40.0, _SAMPLES, dtype=torch.float64, device="cpu").sin()
    rows: dict[torch.device, list[Tensor]] = {}
    places: dict[torch.device, list[int]] = {}
    found = [(math.nan, True)] * len(params)
    for position, param in enumerate(params):
        try:
            sample = _sample(local_of(param) if is_dtensor(param) else param)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):  # it has no numbers yet, or unusual ones
            continue
        rows.setdefault(sample.device, []).append(sample)
        places.setdefault(sample.device, []).append(position)
    for device, samples in rows.items():
        table = torch.stack(samples).cpu()
        told = zip((table @ weights).tolist(), (table == table[:, :1]).all(1).tolist(), strict=True)
        for position, value in zip(places[device], told, strict=True):
            found[position] = value
    return found


def _sample(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        raise ValueError
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    sample = torch.zeros(_SAMPLES, dtype=torch.float64, device=values.device)
    if values.numel():
        count = min(_SAMPLES, values.numel())
        at = torch.linspace(0, values.numel() - 1, count, dtype=torch.float64, device="cpu").long()
        taken = values.take(at.to(values.device)).to(torch.float64)
        sample = taken[-1].repeat(_SAMPLES)
        sample[: len(at)] = taken
    return sample
