"""Values from a log that anybody may have written: of the right type, or None."""

from __future__ import annotations

import math
import re
from typing import Any

__all__ = ["as_int", "as_list", "as_mapping", "as_text", "number"]

MAX_TEXT = 2000
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
BIGGEST = 2**53  # what a browser counts exactly


def number(value: Any, *, finite: bool = True) -> float | None:
    """A float, None for what is none; with `finite`, also for NaN and Inf, which a log spells as strings or tokens.

    >>> number(1), number("Infinity"), number("NaN", finite=False), number(True), number("fast")
    (1.0, None, nan, None, None)
    """
    if isinstance(value, str) and value not in ("NaN", "Infinity", "-Infinity"):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) or not finite else None


def as_int(value: Any) -> int | None:
    """A whole number from 0 that a browser can count, None for anything else.

    >>> as_int(3), as_int(3.0), as_int("3"), as_int(-1), as_int(True)
    (3, 3, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if not 0 <= value < BIGGEST or value != int(value):  # NaN compares false
        return None
    return int(value)


def as_text(value: Any) -> str:
    """Text, cut after 2,000 characters; "" for None. What would steer its direction or a terminal is spelt out.

    >>> as_text("w\u202etegiew"), as_text(None)
    ('w\\\\u202etegiew', '')
    """
    text = "" if value is None else str(value)
    text = text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " …"
    return STEERING.sub(lambda found: ascii(found.group())[1:-1], text)


def as_list(value: Any) -> list[Any]:
    """A list, [] for anything else."""
    return value if isinstance(value, list) else []


def as_mapping(value: Any) -> dict[str, Any]:
    """A dict, {} for anything else."""
    return value if isinstance(value, dict) else {}
