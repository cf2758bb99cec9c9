"""Values of images and other inputs: outside their range, not scaled, scaled twice, or all equal."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from nanscan.batches.fields import Field
from nanscan.batches.problem import BatchProblem

__all__ = [
    "any_may_be_constant",
    "any_may_be_silent",
    "judge_constant",
    "judge_range",
    "judge_scale",
    "judge_silent",
    "odd_scales",
]

_FEW, _PROBES = 4, 32
_STEP = 1 / 255
_TWICE, _PIXELS = (0.0, _STEP * 1.001), (100.0, 255.0)  # largest magnitudes, above and up to


def judge_range(
    field: Field, value: Tensor, low: float, high: float, bounds: tuple[float, float]
) -> list[BatchProblem]:
    """Finite values outside `bounds`; rounding of the last bits is forgiven."""
    rounds = value.is_floating_point() and math.isfinite(bounds[1] - bounds[0])
    slack = 1e-5 * (bounds[1] - bounds[0]) if rounds else 0.0
    if low >= bounds[0] - slack and high <= bounds[1] + slack:
        return []
    bad = (value < bounds[0] - slack) | (value > bounds[1] + slack)
    bad &= value.isfinite() if value.is_floating_point() else True
    if not bad.any():
        return []
    count, index, path, within = field.first(bad)
    where = f" at {list(within)}" if within else ""
    reason = (
        f"has {_number(value[index].item())}{where}, allowed {_allowed(bounds)}; {count} of "
        f"{value.numel()} values of {field.name} outside{_unscaled(low, high, bounds)}"
    )
    return [BatchProblem(path, reason, count, within, "error", "range", field.field)]


def _unscaled(low: float, high: float, bounds: tuple[float, float]) -> str:
    if low >= 0 and 2 < high <= 255 and 0 < bounds[1] <= 4:
        return "; images look not scaled (uint8 pixels 0..255): divide by 255"
    return ""


def judge_scale(field: Field, value: Tensor, high: float, told: bool) -> list[BatchProblem]:
    """Images whose largest magnitude is that of pixels never scaled, or scaled twice.

    Args:
        high: the largest magnitude.
        told: the range is known, and kept to; then only images scaled twice are left to find.
    """
    if _TWICE[0] < high <= _TWICE[1]:
        return _scaled_twice(field, value, high)
    if told or not _PIXELS[0] < high <= _PIXELS[1] or not bool(((value >= 0) & (value == value.round())).all()):
        return []
    reason = (
        f"has whole values 0..{high:g}: images look not scaled (uint8 pixels 0..255); most models expect them divided "
        "by 255 (say value_range=(0, 255) if that is meant)"
    )
    return [BatchProblem(field.path, reason, value.numel(), None, "warning", "scale", field.field)]


def odd_scales(told: bool) -> list[tuple[float, float]]:
    """The largest magnitudes (above, up to) at which `judge_scale` looks at the values."""
    return [_TWICE] if told else [_TWICE, _PIXELS]


def _scaled_twice(field: Field, value: Tensor, high: float) -> list[BatchProblem]:
    """Pixels scaled once are multiples of 1/255: very dark ones are 0 or 1/255, and nothing between."""
    between = (value > _STEP * 0.01 / 255) & (value < _STEP * 0.99)
    if bool((value < 0).any()) or not bool(between.any()):
        return []
    reason = f"has values up to {high:.3g} only: images look scaled twice (divided by 255 two times)"
    return [BatchProblem(field.path, reason, value.numel(), None, "warning", "scale", field.field)]


def any_may_be_constant(value: Tensor) -> Tensor:
    """0-dim bool: does a sample hold one value, not 0, at all of some places? Each is a read from far memory.

    So most samples are looked at in a few places only. On a device all go at once: an answer would be waited for.
    """
    flat = value.reshape(value.shape[0], -1)
    few = _any_equal(flat, _FEW) if value.is_cpu else None
    return few if few is not None and not few else _any_equal(flat, _PROBES)


def _any_equal(flat: Tensor, places: int) -> Tensor:
    probes = flat[:, :: max(1, flat.shape[1] // places)]
    return ((probes == probes[:, :1]).all(1) & (probes[:, 0] != 0)).any()


def judge_constant(field: Field, value: Tensor) -> list[BatchProblem]:
    """Samples whose elements are all equal while others of the batch vary. All 0 is padding and passes."""
    return _equal_samples(
        field,
        value,
        lambda first: (
            f"is constant (every value is {first:g}): a broken or blank image; normalising it by its own range "
            "or deviation is 0/0"
        ),
        zeros=False,
    )


def any_may_be_silent(value: Tensor) -> Tensor:
    """0-dim bool: does a recording hold one value, 0 or another, at all of some places?"""
    probes = value.reshape(value.shape[0], -1)[:, :: max(1, value[0].numel() // _PROBES)]
    return (probes == probes[:, :1]).all(1).any()


def judge_silent(field: Field, value: Tensor) -> list[BatchProblem]:
    """Recordings whose samples are all equal, while others of the batch vary."""
    return _equal_samples(
        field,
        value,
        lambda first: (
            f"is silent (every value is {first:g}): normalising it by its own deviation is 0/0, and the log of "
            "its spectrum is -inf"
        ),
        zeros=True,
    )


def _equal_samples(field: Field, value: Tensor, says: Callable[[float], str], zeros: bool) -> list[BatchProblem]:
    """A warning for each sample of one value, unless all are; those of 0 only with `zeros`."""
    flat = value.reshape(value.shape[0], -1)
    equal = (flat == flat[:, :1]).all(1)
    if bool(equal.all()):
        return []
    found = equal if zeros else equal & (flat[:, 0] != 0)
    return [
        BatchProblem(
            f"{field.path}[{sample}]",
            says(flat[sample, 0].item()),
            flat.shape[1],
            None,
            "warning",
            "constant",
            field.field,
        )
        for sample in found.nonzero().flatten().tolist()
    ]


def _allowed(bounds: tuple[float, float]) -> str:
    if bounds[0] == -math.inf:
        return f"at most {_number(bounds[1])}"
    if bounds[1] == math.inf:
        return f"at least {_number(bounds[0])}"
    return f"{_number(bounds[0])}..{_number(bounds[1])}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.6g}"
