"""Reports as plain data and strict JSON, and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from nanscan.clipping.record import Spike
from nanscan.report_rows import TensorReport

__all__ = ["parsed", "plain", "strict"]


def plain(value: Any) -> Any:
    """A field's value as plain Python data: tuples become lists, rows dicts."""
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    return value


def strict(value: Any) -> Any:
    """`value` for strict JSON: a float that is not finite becomes the string "NaN", "Infinity" or "-Infinity"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    return [strict(item) for item in value] if isinstance(value, (list, tuple)) else value


def parsed(name: str, value: Any) -> Any:
    """The inverse of `plain` and `strict`, for the field called `name`."""
    if name == "origin" and isinstance(value, Mapping):
        from nanscan.origin.record import Origin  # not above: it needs torch, and a report does not

        return Origin.from_dict(value)
    if name == "spike":
        return None if value is None else Spike.from_dict(value)
    if name in ("clip_limit", "loss"):
        return None if value is None else float(value)
    if name == "dropped" and isinstance(value, Sequence):
        return tuple(value)
    if name in ("tensors", "bad", "buffers", "parameters", "stale"):
        return tuple(_parse_row(row) for row in value)
    return float(value) if name.endswith(("norm", "factor", "time", "scale")) else value


def _parse_row(row: Mapping[str, Any]) -> TensorReport:
    values: dict[str, Any] = {name: float(value) if name.endswith("norm") else value for name, value in row.items()}
    for name in ("shape", "first_bad"):
        values[name] = values[name] if values[name] is None else tuple(values[name])
    return TensorReport(**values)
