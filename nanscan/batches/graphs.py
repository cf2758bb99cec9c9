"""Graphs: edges that lead to nodes that are not there, and one entry for each node and edge."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from nanscan.batches.fields import Field, Placed, families, is_int
from nanscan.batches.problem import BatchProblem
from nanscan.batches.question import Answers, Question
from nanscan.batches.quick import Quick
from nanscan.batches.spec import BatchSpec
from nanscan.batches.walk import Step

__all__ = ["ask_graphs", "has_edges", "judge_graph_shapes"]

_EDGES = re.compile(r"((train|val|test)_)?((pos|neg)_)?edge_(label_)?index")  # (2, edges): from which node, to which
_PER_NODE = ("x", "node_feat", "node_features", "z", "pos", "batch")
_PER_EDGE = ("edge_attr", "edge_weight", "edge_type", "edge_feat")  # half as many: of edges that go both ways
_MASKS = re.compile(r".*edge.*mask")


class _Nodes(NamedTuple):
    """How many nodes there are, and which field says so; `leaf`: it does so with its value, the number is not known."""

    field: Field
    number: float = math.inf
    leaf: int | None = None


class _Limit(NamedTuple):
    """All nodes are below `number`, or below the sum of that one of the tensors beside the edges."""

    number: float
    beside: int | None

    def of(self, told: Sequence[Tensor]) -> Tensor | float:
        return self.number if self.beside is None else told[self.beside].sum()


Family = dict[str, Placed]


def ask_graphs(readable: Sequence[Placed], spec: BatchSpec) -> list[Question]:
    """Does each edge begin and end at a node? Asked where the nodes beside it, or those of its types, are counted."""
    by_place = families(readable)
    return [
        question
        for place, family in by_place.items()
        for name, (i, field) in family.items()
        if _EDGES.fullmatch(name) and is_int(field.dtype) and len(field.shape) == 2 and field.shape[0] == 2
        for question in _ask(i, field, family, _ends(place, by_place))
    ]


def _ends(place: tuple[Step, ...], by_place: dict[tuple[Step, ...], Family]) -> tuple[_Nodes | None, _Nodes | None]:
    """The nodes that edges begin and end at; under a key of three parts they are of the first and the last type."""
    key = place[-1][1] if place else None
    if isinstance(key, tuple) and len(key) == 3:
        first, last = (by_place.get((*place[:-1], ("k", kind)), {}) for kind in (key[0], key[2]))
        return _nodes(first), _nodes(last)
    nodes = _nodes(by_place[place])
    return nodes, nodes


def _nodes(family: Family) -> _Nodes | None:
    if "num_nodes" in family:
        leaf, field = family["num_nodes"]
        return _Nodes(field, leaf=leaf) if is_int(field.dtype) and len(field.shape) <= 1 else None
    for name in _PER_NODE:
        if name in family and family[name][1].shape:
            field = family[name][1]
            return _Nodes(field, field.shape[0] if len(field.shape) <= 2 else max(field.shape))
    return None


def _ask(i: int, field: Field, family: Family, ends: tuple[_Nodes | None, _Nodes | None]) -> list[Question]:
    if ends == (None, None) or any(_MASKS.fullmatch(name) for name in family):  # edges that fill up are masked
        return []
    leaves = [*dict.fromkeys(end.leaf for end in ends if end is not None and end.leaf is not None)]
    begin, end = (_limit(one, leaves) for one in ends)
    quick = Quick("within", 0.0, begin.number - 1) if begin == end and begin.beside is None else None
    judge = partial(_judge, field, ends, (begin, end))
    return [Question(i, partial(_beyond, begin, end), judge, (0, -1), quick, tuple(leaves))]


def _limit(nodes: _Nodes | None, leaves: Sequence[int]) -> _Limit:
    if nodes is None:
        return _Limit(math.inf, None)
    return _Limit(nodes.number, None if nodes.leaf is None else leaves.index(nodes.leaf))


def _beyond(begin: _Limit, end: _Limit, edges: Tensor, *told: Tensor) -> tuple[Tensor, Tensor]:
    """The least index, and by how much the largest one is above the number of nodes (-1: it is the last)."""
    if begin == end:
        low, high = torch.aminmax(edges)
        return low, high.long() - begin.of(told)
    first, last = edges.amax(1).long()
    return edges.amin(), torch.maximum(first - begin.of(told), last - end.of(told))


def _judge(
    field: Field,
    ends: Sequence[_Nodes | None],
    limits: Sequence[_Limit],
    edges: Tensor,
    answers: Answers,
    *told: Tensor,
) -> list[BatchProblem]:
    most = [float(limit.of(told)) for limit in limits]
    bad = torch.stack([(row < 0) | (row >= limit) for row, limit in zip(edges, most, strict=True)])
    _, index, _, _ = field.first(bad)
    side, value, nodes = index[0], int(edges[index]), ends[index[0]]
    count = f"{int(most[side])} nodes" if nodes else "nodes"
    says = f" (says {nodes.field.path})" if nodes else ""
    guess = "; nodes count from 0: subtract 1" if value == most[side] and int(edges.amin()) >= 1 else ""
    reason = (
        f"{field.name}{list(index)} is {value}, edges {'begin' if side == 0 else 'end'} at one of {count}{says}; "
        f"{int(bad.sum())} of {edges.numel()} bad{guess or '. Number the nodes anew where some were left out'}"
    )
    return [BatchProblem(field.path, reason, int(bad.sum()), index, "error", "node", field.field)]


def has_edges(field: Field) -> bool:
    """True for what a graph without an edge, such as a single atom, has none of."""
    name = field.name.lower()
    return name.endswith(("edge_index", "edge_label_index")) or name in _PER_EDGE


def judge_graph_shapes(fields: Sequence[Field]) -> list[BatchProblem]:
    """Each edge has its weight, and each node its graph."""
    with_edges = [family for family in families([*enumerate(fields)]).values() if "edge_index" in family]
    return [problem for family in with_edges for problem in _entries(family)]


def _entries(family: Family) -> list[BatchProblem]:
    edges, nodes = family["edge_index"][1], family.get("x")
    if len(edges.shape) != 2 or edges.shape[0] != 2:
        return []
    count = edges.shape[1]
    wanted = [(name, count, edges, "edges") for name in _PER_EDGE]
    if nodes is not None and len(nodes[1].shape) == 2:
        wanted.append(("batch", nodes[1].shape[0], nodes[1], "nodes"))
    return [
        BatchProblem(
            family[name][1].path,
            f"has {family[name][1].shape[0]} entries, {other.path} has {count} {what}: one for each is needed",
            kind="size",
            field=family[name][1].field,
        )
        for name, count, other, what in wanted
        if name in family and family[name][1].shape and family[name][1].shape[0] not in (count, count / 2)
    ]
