"""`AdaptiveClip`: which rule finds the limit of a step, and its options. Decides nothing itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["RULES", "AdaptiveClip", "RuleName"]

RuleName = Literal["autoclip", "zclip", "agc"]
RULES = ("autoclip", "zclip", "agc")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "autoclip": {"percentile": 10.0, "window": None, "max_norm": None},
    "zclip": {"alpha": 0.97, "z_threshold": 2.5, "warmup": 25, "eps": 1e-6, "max_norm": None},
    "agc": {"ratio": 0.01, "eps": 1e-3, "exclude": ()},
}


@dataclass(frozen=True)
class AdaptiveClip:
    """A limit for gradient norms that follows the run, for `nanscan.wrap(optimizer, clip_norm=AdaptiveClip(...))`.

    It holds options only and can be given to several optimizers: each keeps a history of its own, which
    `optimizer.guard_state_dict()` saves. Norms are of the unscaled gradients, after `clip_value`. Norms that are not
    finite, and those of steps that were skipped, never enter a history, nor do norms of exactly 0 (no gradients).

    Args:
        rule: how the limit is found.

            - `"zclip"` (Kumar et al. 2025, "ZClip: Adaptive Spike Mitigation for LLM Pre-Training", arXiv:2504.02507):
              with the exponential mean m and deviation s of the norms so far, a norm g of
              z = (g - m) / (s + eps) > `z_threshold` is clipped to m + s * z_threshold**2 / z, the more the higher
              it is; others are left alone. The clipped norm enters the history.
            - `"autoclip"` (Seetharaman et al. 2020, "AutoClip: Adaptive Gradient Clipping for Source Separation
              Networks", arXiv:2007.14469): clip to a percentile of all norms so far, this one included. The norm
              before clipping enters the history.
            - `"agc"` (Brock et al. 2021, "High-Performance Large-Scale Image Recognition Without Normalization",
              arXiv:2102.06171): the gradient of each unit (each index of the first dimension: a row of a linear
              layer, in*k*k weights of a convolution; a vector or scalar as a whole) is scaled down where its norm is
              above `ratio` times max(norm of its weights, `eps`). It has no history.
        percentile: of autoclip, from 0 to 100; default 10. Low values clip nearly every step, as in the paper.
        window: of autoclip: only so many of the last norms count; default None: all (8 bytes a step).
        alpha: of zclip, the part of the old mean that stays, above 0 and below 1; default 0.97.
        z_threshold: of zclip, in deviations, > 0; default 2.5.
        warmup: of zclip: so many norms are collected first, at least 2, and not clipped; default 25.
        max_norm: of autoclip and zclip: the limit is never above it, in the warm-up too; default None.
        ratio: of agc, the largest norm of a unit's gradient relative to that of its weights, > 0; default 0.01 (the
            paper has 0.01 for batches of 4,096; smaller batches take larger ones).
        eps: of agc, the least norm of weights that counts, so that units of zeros can begin to learn, >= 0; default
            1e-3. Of zclip, added to the deviation; default 1e-6.
        exclude: of agc, parameters that are not clipped: names, names of modules (`"head"` is `"head.weight"` and
            `"head.bias"`) or patterns (`"*.bias"`). The paper leaves out the last linear layer; default: none.

    Raises:
        ValueError: if the rule is unknown, an option belongs to another rule, or a value is out of its range.
        TypeError: if `exclude` is not a sequence of strings.

    >>> AdaptiveClip("zclip", z_threshold=3.0).alpha
    0.97
    >>> AdaptiveClip("zclip", percentile=50)
    Traceback (most recent call last):
    ...
    ValueError: percentile is an option of rule 'autoclip', not of 'zclip', which has alpha, z_threshold, warmup, ...
    """

    rule: RuleName = "zclip"
    percentile: float | None = field(default=None, kw_only=True)
    window: int | None = field(default=None, kw_only=True)
    alpha: float | None = field(default=None, kw_only=True)
    z_threshold: float | None = field(default=None, kw_only=True)
    warmup: int | None = field(default=None, kw_only=True)
    max_norm: float | None = field(default=None, kw_only=True)
    ratio: float | None = field(default=None, kw_only=True)
    eps: float | None = field(default=None, kw_only=True)
    exclude: tuple[str, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"rule must be {', '.join(map(repr, RULES))}, got {self.rule!r}")
        own = _DEFAULTS[self.rule]
        for name in dict.fromkeys(name for options in _DEFAULTS.values() for name in options):
            value = getattr(self, name)
            if value is not None and name not in own:
                raise ValueError(_not_of(self.rule, name))
            if name in own:
                object.__setattr__(self, name, _checked(name, own[name] if value is None else value))

    def options(self) -> dict[str, Any]:
        """The options of this rule."""
        return {name: getattr(self, name) for name in _DEFAULTS[self.rule]}

    def __repr__(self) -> str:
        own = _DEFAULTS[self.rule]
        given = "".join(f", {name}={value!r}" for name, value in self.options().items() if value != own[name])
        return f"AdaptiveClip({self.rule!r}{given})"


def _not_of(rule: str, name: str) -> str:
    home = " and ".join(repr(other) for other, options in _DEFAULTS.items() if name in options)
    return f"{name} is an option of rule {home}, not of {rule!r}, which has {', '.join(_DEFAULTS[rule])}"


def _checked(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name == "exclude":
        if isinstance(value, str) or not all(isinstance(item, str) for item in value):
            raise TypeError(f"exclude must be a sequence of names, such as ('head',), got {value!r}")
        return tuple(value)
    if name in ("window", "warmup"):
        least = 1 if name == "window" else 2
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")
        return value
    low_in, low, high, high_in, words = _RANGES[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be {words}, got {value!r}")
    number = float(value)
    if not (low < number < high or (low_in and number == low) or (high_in and number == high)):
        raise ValueError(f"{name} must be {words}, got {value!r}")
    return number


_RANGES = {
    "percentile": (True, 0.0, 100.0, True, "a number from 0 to 100"),
    "alpha": (False, 0.0, 1.0, False, "a number above 0 and below 1"),
    "z_threshold": (False, 0.0, math.inf, False, "a positive finite number"),
    "max_norm": (False, 0.0, math.inf, False, "a positive finite number, or None for no such limit"),
    "ratio": (False, 0.0, math.inf, False, "a positive finite number"),
    "eps": (True, 0.0, math.inf, False, "a finite number that is not negative"),
}
