"""What a gradient scaler says when it is used in a way that can't work, and what to write instead."""

from __future__ import annotations

import math

__all__ = [
    "ScalerMisuse",
    "check_options",
    "check_scale",
    "closure_given",
    "collapsed_state",
    "mended",
    "no_cuda",
    "no_gradients",
    "no_step",
    "not_scaled",
    "pickled_early",
    "stepped_twice",
    "unscaled_late",
    "unscaled_twice",
]


class ScalerMisuse(RuntimeError, AssertionError):
    """`torch.amp.GradScaler` raises one or the other for these: code that expects either keeps working."""


def not_scaled(called: str) -> ScalerMisuse:
    """The loss was never scaled."""
    return ScalerMisuse(
        f"{called}() was called before any loss was scaled: write scaler.scale(loss).backward() in place of "
        "loss.backward() (_scale is None)"
    )


def unscaled_twice() -> ScalerMisuse:
    """`unscale_` a second time."""
    return ScalerMisuse(
        "unscale_() has already been called on this optimizer since the last update(): it would divide the gradients "
        "twice. Call it once, after the last backward() of the step; with nanscan.wrap(optimizer, clip_norm=...) it "
        "is not needed at all"
    )


def unscaled_late() -> ScalerMisuse:
    """`unscale_` after `step`."""
    return ScalerMisuse(
        "unscale_() is being called after step(): the gradients are unscaled already. Write scaler.unscale_(optimizer)"
        " before scaler.step(optimizer), and scaler.update() after it"
    )


def stepped_twice() -> ScalerMisuse:
    """`step` a second time."""
    return ScalerMisuse(
        "step() has already been called since the last update(): write scaler.update() once after "
        "scaler.step(optimizer) (after the last one, with several optimizers)"
    )


def no_step() -> ScalerMisuse:
    """`update` without a step."""
    return ScalerMisuse(
        "No inf checks were recorded prior to update(): no scaler.step(optimizer) was called since the last update(). "
        "Write scaler.step(optimizer) in place of optimizer.step(), then scaler.update(); with gradient accumulation "
        "both only after the last micro-batch"
    )


def closure_given() -> ScalerMisuse:
    """A closure, which evaluates the model in the middle of the step."""
    return ScalerMisuse(
        "a closure can't be used with a GradScaler: its gradients would have to be unscaled in the middle of the step. "
        "Write scaler.scale(loss).backward() and then scaler.step(optimizer) without one. An optimizer that needs a "
        "closure (LBFGS) needs float32 or bfloat16 and no scaler: optimizer.step(closure), or "
        "nanscan.GradScaler(enabled=False)"
    )


def pickled_early() -> ScalerMisuse:
    """A copy or pickle between `step` and `update`."""
    return ScalerMisuse(
        "a GradScaler can be pickled or copied at the beginning of an iteration or after scaler.update(), not between "
        "unscale_() or step() and update(): call scaler.update() first, or save scaler.state_dict()"
    )


def no_gradients() -> str:
    """The hint when an optimizer without a guard has none."""
    return (
        "nanscan: no gradients: none of the optimizer's parameters has a .grad, so scaler.step() changes nothing and "
        "the loss scale stays. Call scaler.scale(loss).backward() first, and check requires_grad. (This is said once.)"
    )


def no_cuda() -> str:
    """The warning where the default device is not there."""
    return (
        "nanscan.GradScaler is enabled, but CUDA is not available. Disabling. Write nanscan.GradScaler('cpu') for "
        "float16 on the CPU, or enabled=False"
    )


def check_options(init_scale: float, min_scale: float, hysteresis: int) -> None:
    """Refuse what the scale can't start with.

    Raises:
        ValueError: for a scale that is not positive and finite, or below `min_scale`; a `min_scale` that is negative
            or not finite; a `hysteresis` below 1.
        TypeError: if `hysteresis` is no int.

    >>> check_options(0.5, 1.0, 1)
    Traceback (most recent call last):
    ...
    ValueError: init_scale=0.5 is below min_scale=1: give a larger init_scale, or min_scale=0.5
    """
    if not 0.0 <= min_scale < math.inf:
        raise ValueError(f"min_scale must be a finite number, at least 0 (0: no lower limit), got {min_scale}")
    if isinstance(hysteresis, bool) or not isinstance(hysteresis, int):
        raise TypeError(f"hysteresis must be an int, got {hysteresis!r}")
    if hysteresis < 1:
        raise ValueError(f"hysteresis must be at least 1 (1: each overflow lowers the scale), got {hysteresis}")
    check_scale("init_scale", init_scale, min_scale)


def check_scale(name: str, scale: float, min_scale: float) -> None:
    """Refuse a scale that can't be one.

    Raises:
        ValueError: if it is not positive and finite, or below `min_scale`.
    """
    if not 0.0 < scale < math.inf:
        raise ValueError(f"{name} must be a positive, finite number, got {scale}")
    if scale < min_scale:
        raise ValueError(
            f"{name}={scale:g} is below min_scale={min_scale:g}: give a larger {name}, or min_scale={scale:g}"
        )


def mended(saved: float, min_scale: float, present: float) -> float:
    """The scale to go on with where a state says `saved`.

    >>> mended(1024.0, 1.0, 65536.0), mended(0.0, 1.0, 65536.0), mended(float("nan"), 1.0, 65536.0)
    (1024.0, 1.0, 65536.0)
    """
    if not math.isfinite(saved):
        return present
    return max(saved, min_scale) if max(saved, min_scale) > 0 else present


def collapsed_state(saved: float, scale: float) -> str:
    """The warning when the loaded scale can't be used."""
    return (
        f"nanscan: the loss scale in the loaded state is {saved:g}: it had collapsed when that was saved. It is set to "
        f"{scale:g}; look for NaN or Inf in the weights and the optimizer's state that were saved with it "
        "(nanscan.scan)."
    )
