"""The guard's options, and what they say is to be done about a step. Decides; prints and touches nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from nanscan.clipping.adaptive import AdaptiveClip
from nanscan.report import StepReport

__all__ = [
    "ACTIONS",
    "Action",
    "OnNonfinite",
    "OnSpike",
    "Policy",
    "SHRINK",
    "clip_factor",
    "eps_is_lost",
    "valid_limit",
]

Action = Literal["skip", "raise", "zero", "warn"]
OnSpike = Literal["warn", "clip", "skip"]
OnNonfinite = Action | Callable[[StepReport], str]
ACTIONS = ("skip", "raise", "zero", "warn")
ON_SPIKE = (None, "warn", "clip", "skip")
SHRINK = 2.0**-512  # brings float64 gradients whose norm is beyond float64 within its range
FP16_SMALLEST_EPS = 6e-8  # about the smallest positive float16, 2^-24: a smaller eps is 0 there, or nearly


@dataclass(frozen=True)
class Policy:
    """The options of `nanscan.wrap` that decide; see there. Checked when made.

    Raises:
        ValueError: if a value is not one that the option knows; the message names those.
        TypeError: if it has the wrong type.

    >>> Policy(on_nonfinite="stop")
    Traceback (most recent call last):
    ...
    ValueError: on_nonfinite must be 'skip', 'raise', 'zero', 'warn' or a function of the report, got 'stop'
    """

    clip_norm: float | AdaptiveClip | None = None
    clip_value: float | None = None
    on_nonfinite: OnNonfinite = "skip"
    max_consecutive_skips: int | None = 20
    check_params_every: int = 0
    history: int = 1024
    on_spike: OnSpike | None = None
    spike_sigma: float = 6.0

    def __post_init__(self) -> None:
        if self.adaptive is None:
            object.__setattr__(self, "clip_norm", valid_limit("clip_norm", self.clip_norm))
        object.__setattr__(self, "clip_value", valid_limit("clip_value", self.clip_value))
        if not callable(self.on_nonfinite) and self.on_nonfinite not in ACTIONS:
            raise ValueError(
                f"on_nonfinite must be {_choices()} or a function of the report, got {self.on_nonfinite!r}"
            )
        if self.max_consecutive_skips is not None:
            _check_count("max_consecutive_skips", self.max_consecutive_skips, 1, " or None (never give up)")
        _check_count("check_params_every", self.check_params_every, 0, " (0 = never)")
        _check_count("history", self.history, 0, "")
        if self.on_spike not in ON_SPIKE:
            raise ValueError(f"on_spike must be {', '.join(map(repr, ON_SPIKE))}, got {self.on_spike!r}")
        sigma: Any = self.spike_sigma
        if isinstance(sigma, bool) or not isinstance(sigma, (int, float)) or not 0 < sigma < math.inf:
            raise ValueError(f"spike_sigma must be a positive finite number, got {sigma!r}")

    @property
    def adaptive(self) -> AdaptiveClip | None:
        """`clip_norm` where it is a limit that follows the run."""
        return self.clip_norm if isinstance(self.clip_norm, AdaptiveClip) else None

    @property
    def fixed_norm(self) -> float | None:
        """`clip_norm` where it is a number."""
        return None if isinstance(self.clip_norm, AdaptiveClip) else self.clip_norm

    def updated(self, **options: Any) -> Policy:
        """A copy in which every given option that isn't at its default replaces the present one."""
        defaults = {item.name: item.default for item in fields(self)}
        return replace(self, **{name: value for name, value in options.items() if value != defaults[name]})

    def decide(self, report: StepReport) -> Action:
        """What to do about a step whose report is not finite.

        Raises:
            ValueError: if the function given as `on_nonfinite` returns something else than an action.
        """
        choice = self.on_nonfinite(report) if callable(self.on_nonfinite) else self.on_nonfinite
        if choice not in ACTIONS:
            raise ValueError(f"the function given as on_nonfinite must return {_choices()}, it returned {choice!r}")
        return choice  # type: ignore[return-value]


def valid_limit(name: str, value: Any) -> float | None:
    """A limit for clipping as a float, None for none.

    Raises:
        ValueError: for 0, negative numbers and NaN, and for what is no number.

    >>> valid_limit("clip_norm", 0)
    Traceback (most recent call last):
    ...
    ValueError: clip_norm must be a positive number, got 0; for no clipping give None
    """
    if value is None:
        return None
    if isinstance(value, (str, bytes)):
        known = name == "clip_norm" and value in ("agc", "autoclip", "zclip")
        raise ValueError(
            f"{name} must be a positive number{f' or nanscan.AdaptiveClip({value!r})' if known else ''}, got the text "
            f"{value!r}{'' if known else ': make a float of it, or give None for no clipping'}"
        )
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    except OverflowError:  # an int beyond every float
        number = math.inf if value > 0 else -math.inf
    if not number > 0:
        raise ValueError(f"{name} must be a positive number, got {value}; for no clipping give None")
    return None if number == math.inf else number


def clip_factor(norm: float, max_norm: float | None) -> float:
    """What gradients of 2-norm `norm` are multiplied by so that their norm is at most `max_norm`; 1.0 = nothing to do.

    It is `min(1, max_norm / (norm + 1e-6))`, as in `torch.nn.utils.clip_grad_norm_`.

    >>> round(clip_factor(5.0, 1.0), 6), clip_factor(0.5, 1.0), clip_factor(5.0, None)
    (0.2, 1.0, 1.0)
    """
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


def eps_is_lost(group: dict[str, Any], dtype: str) -> bool:
    """True if an optimizer's group has an `eps` of 0, or one that rounds to 0 in its float16 parameters (or nearly).

    A fused optimizer computes in float32, where only 0 is 0.

    >>> eps_is_lost({"eps": 1e-8}, "float16"), eps_is_lost({"eps": 1e-8}, "float32"), eps_is_lost({"eps": 0}, "float32")
    (True, False, True)
    """
    eps = group.get("eps")
    if not isinstance(eps, (int, float)):
        return False
    return eps == 0 or (dtype == "float16" and not group.get("fused") and eps < FP16_SMALLEST_EPS)


def _choices() -> str:
    return ", ".join(map(repr, ACTIONS))


def _check_count(name: str, value: Any, least: int, note: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}{note}, got {value}")
