"""Curves of cost against size: a straight line fitted to them, a table, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanscan.bench.table import print_table, show_time


@dataclass(frozen=True)
class Curve:
    """Seconds against a size, and the line ``fixed + slope × size`` that fits them best (least relative squares)."""

    what: str
    unit: str
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    fixed: float
    slope: float

    def line(self, size: float) -> float:
        return self.fixed + self.slope * size

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """The line through the points, each weighed by its own time, so that small sizes count as much as large ones."""
    weight = 1.0 / np.asarray(seconds)
    matrix = np.stack([weight, weight * np.asarray(sizes, dtype=float)], axis=1)
    (fixed, slope), *_ = np.linalg.lstsq(matrix, np.ones(len(sizes)), rcond=None)
    return float(fixed), float(slope)


def print_curves(curves: Sequence[Curve]) -> None:
    for curve in curves:
        rows = [
            [f"{size:,}", show_time(took), _per_unit(curve, size, took), f"{took / curve.line(size):.2f}"]
            for size, took in zip(curve.sizes, curve.seconds, strict=True)
        ]
        columns = (curve.what, "one scan", curve.unit, "÷ straight line")
        print_table("Cost against size", columns, rows, f"line: {show_time(curve.fixed)} + {_slope(curve)}")


def _scale(curve: Curve) -> float:
    return 1e12 if curve.unit == "ns per kB" else 1e9


def _per_unit(curve: Curve, size: int, took: float) -> str:
    return f"{took / size * _scale(curve):.1f}"


def _slope(curve: Curve) -> str:
    return f"{curve.slope * _scale(curve):.1f} {curve.unit}"


def draw(curves: Sequence[Curve], path: Path) -> str:
    """Plot the curves into a PNG; returns a note where that was not possible."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot was drawn, the table stands for it: matplotlib is not installed (pip install 'nanscan[bench]')"
    figure = Figure(figsize=(6.0 * len(curves), 4.5), layout="constrained")
    for axes, curve in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves, strict=True):
        axes.loglog(curve.sizes, [curve.line(size) for size in curve.sizes], color="0.6", label="straight line")
        axes.loglog(curve.sizes, curve.seconds, "o", color="C0", label="one scan, median")
        axes.set(xlabel=curve.what, ylabel="seconds", title=f"{show_time(curve.fixed)} + {_slope(curve)}")
        axes.grid(True, which="major", alpha=0.3)
        axes.legend()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    return ""
