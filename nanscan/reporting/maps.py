"""Heat maps: a quantity of each layer or module over the steps, in few enough cells for a screen."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from nanscan.reporting.layers import coarser
from nanscan.reporting.reading import Run
from nanscan.reporting.series import Axis
from nanscan.reporting.values import as_int, as_list, as_mapping, as_text, number

__all__ = ["in_numbers", "layer_map", "range_maps"]

MAX_COLUMNS = 240
MAX_ROWS = 80
QUANTITIES = ("absmax", "rms", "zero_fraction", "underflow_fraction")
Cell = tuple[int, str, float]  # place, row, value


def layer_map(runs: Sequence[Run], axis: Axis) -> dict[str, Any] | None:
    """The gradient norm of each layer; of several that share a cell, the largest. None if none was noted."""
    names = list(dict.fromkeys(name for run in runs for _, norms in run.layers for name in norms))
    groups = coarser(names, MAX_ROWS)
    cells: list[Cell] = []
    for index, run in enumerate(runs):
        for row, norms in run.layers:
            place = axis.at(index, row)
            cells += [(place, groups[name], value) for name, value in norms.items()]
    return _map(cells)


def in_numbers(found: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A heat map's rows as a table: the first, median, last and largest value, and how many cells hold a NaN or Inf."""
    table = []
    for name, cells in zip(*(found[key] for key in ("rows", "cells")), strict=True) if found else ():
        good = [value for value in cells if isinstance(value, float)]
        numbers = (
            {
                "first": good[0],
                "median": statistics.median(good),
                "last": good[-1],
                "largest": max(good),
            }
            if good
            else {}
        )
        table.append({"name": name, **numbers, "bad": cells.count("bad")})
    return table


def range_maps(runs: Sequence[Run], axis: Axis) -> dict[str, dict[str, Any]]:
    """Kind -> quantity -> heat map, of what `watch` has noted."""
    found: dict[tuple[str, str], list[Cell]] = {}
    rows = [(axis.at(index, note["row"]), row) for index, run in enumerate(runs) for note, row in _range_rows(run)]
    groups = coarser(list(dict.fromkeys(as_text(row.get("module")) for _, row in rows)), MAX_ROWS)
    for place, row in rows:
        for quantity in QUANTITIES:
            value = _quantity(row, quantity)
            if value is not None:
                key = (as_text(row.get("kind")), quantity)
                found.setdefault(key, []).append((place, groups[as_text(row.get("module"))], value))
    maps: dict[str, dict[str, Any]] = {}
    for (kind, quantity), cells in found.items():
        maps.setdefault(kind, {})[quantity] = _map(cells)
    return maps


def _range_rows(run: Run) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(note, as_mapping(row)) for note in run.notes["ranges"] for row in as_list(note.get("rows"))]


def _quantity(row: dict[str, Any], name: str) -> float | None:
    if as_int(row.get("nan_count")) or as_int(row.get("inf_count")):
        return math.nan
    if name != "absmax":
        return number(row.get(name))
    low, high = number(row.get("min")), number(row.get("max"))
    return None if low is None or high is None else max(abs(low), abs(high))


def _map(cells: Sequence[Cell]) -> dict[str, Any] | None:
    """Columns, rows and for each row a value in each column: None where there is none, "bad" for a NaN or Inf."""
    if not cells:
        return None
    places = sorted({place for place, _, _ in cells})
    width = max(1.0, (places[-1] - places[0] + 1) / MAX_COLUMNS) if len(places) > MAX_COLUMNS else 0.0
    columns = {place: int((place - places[0]) // width) if width else at for at, place in enumerate(places)}
    labels: dict[int, int] = {}
    for place in places:
        labels.setdefault(columns[place], place)
    order = {column: at for at, column in enumerate(labels)}
    rows = {name: at for at, name in enumerate(dict.fromkeys(name for _, name, _ in cells))}
    values: dict[tuple[int, int], float] = {}
    for place, name, value in cells:
        key = (order[columns[place]], rows[name])
        values[key] = _worse(values.get(key), value)
    matrix = [[_shown(values.get((x, y))) for x in range(len(labels))] for y in range(len(rows))]
    return {"columns": list(labels.values()), "rows": list(rows), "cells": matrix}


def _worse(a: float | None, b: float) -> float:
    if a is None or not math.isfinite(b):
        return b
    return a if not math.isfinite(a) else max(a, b)


def _shown(value: float | None) -> float | str | None:
    if value is None:
        return None
    return float(f"{value:.4g}") if math.isfinite(value) else "bad"
