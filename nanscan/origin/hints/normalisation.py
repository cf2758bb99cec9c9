"""Hints for normalisation layers: eps of 0, running statistics that can't be used."""

from __future__ import annotations

import torch

from nanscan.origin.hints.row import Row, names
from nanscan.origin.hints.view import View, places, short

__all__ = ["ROWS"]

_BATCH = names(
    "native_batch_norm batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit "
    "_native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update batch_norm_elemt"
)
_LAYER = names("native_layer_norm native_group_norm _fused_rms_norm layer_norm rms_norm")


def _eps(view: View) -> float | None:
    """The eps of the layer: the last plain float among the arguments."""
    found = [value for value in view.event.args if isinstance(value, float)]
    return found[-1] if found else None


def _running_var(view: View) -> str | None:
    var, eps = view.operand(4), _eps(view)
    if not isinstance(var, torch.Tensor) or eps is None:
        return None
    unusable = ~(var + eps > 0)
    if not bool(unusable.any()):
        return None
    value = float(var.reshape(-1)[unusable.reshape(-1)][0])
    kind = "NaN" if value != value else "negative" if value < 0 else "0"
    return f"running_var is {kind} ({short(value)}) with eps={short(eps)} in {places(unusable)}"


def _one_value(view: View) -> str | None:
    values, training = view.operand(0), view.setting(5, "training")
    if training is not True or not isinstance(values, torch.Tensor) or values.dim() < 2 or view.event.output == 0:
        return None
    if values.numel() != values.shape[1]:
        return None
    return f"one value per channel (input {list(values.shape)}): the unbiased variance for running_var divides by 0"


def _statistics_overflow(view: View) -> str | None:
    values = view.operand(0)
    if view.nan or view.event.output == 0 or not isinstance(values, torch.Tensor):
        return None
    largest = float(values.abs().max())
    return (
        f"the running statistics became Inf{view.where}: the input is up to {short(largest)}, and they hold its square"
    )


def _constant(view: View) -> str | None:
    values, eps = view.operand(0), _eps(view)
    if eps is None or not isinstance(values, torch.Tensor) or not bool(values.isfinite().all()):
        return None
    if eps >= torch.finfo(values.dtype).smallest_normal:
        return None
    return f"eps={short(eps)} and an input {list(values.shape)} that is constant within a group{view.where} give 0/0"


def _half_deviation(view: View) -> str | None:
    """What forward saved: 1 / sqrt(var + eps), in the dtype of the input."""
    inverse = view.event.saved.get("result2")
    if not isinstance(inverse, torch.Tensor) or not bool(inverse.isinf().any()):
        return None
    dtype = str(inverse.dtype).removeprefix("torch.")
    largest = short(float(torch.finfo(inverse.dtype).max))
    return f"1 / sqrt(var + eps) is beyond {largest} in {dtype} for a group that is constant{view.aside}"


def _weight_norm(view: View) -> str | None:
    weight, dim = view.operand(0), view.setting(2, "dim", 0)
    if not isinstance(weight, torch.Tensor):
        return None
    rows = weight.movedim(dim, 0).reshape(weight.shape[dim], -1)
    zero = (rows == 0).all(1)
    return f"weight_norm of a direction that is all 0: {places(zero)}" if bool(zero.any()) else None


def _spectral_norm(view: View) -> str | None:
    if view.event.module_type != "_SpectralNorm" or view.value(1) != 0.0:
        return None
    return f"the spectral norm of the weight is 0{view.aside}"


def _rms(view: View) -> str | None:
    if view.event.module_type not in ("RMSNorm", "LayerNorm", "LlamaRMSNorm", "T5LayerNorm") or view.value(0) != 0.0:
        return None
    return f"{view.event.module_type} of a zero vector{view.where} with an eps that is 0 in {view.dtype}"


ROWS = (
    Row(
        "BatchNorm with an unusable running_var",
        _BATCH,
        "in eval a running variance that is 0 with eps=0, negative or NaN goes under the root",
        "Give the layer an eps of 1e-5 and reset_running_stats(); a NaN came from a bad batch or one of one value",
        _running_var,
    ),
    Row(
        "BatchNorm over one value per channel",
        _BATCH,
        "in training the running variance divides by n - 1, which is 0: the output is fine, running_var stays NaN",
        "Use larger batches (drop_last=True), GroupNorm, or put the layer in eval(); then reset_running_stats()",
        _one_value,
    ),
    Row(
        "running statistics overflow",
        _BATCH,
        "the variance of a huge input is beyond the dtype: the output is 0, and so it stays in eval",
        "Look where the huge input comes from, and reset_running_stats()",
        _statistics_overflow,
    ),
    Row(
        "normalisation with eps=0",
        _BATCH | _LAYER,
        "a norm layer with eps=0 (or one that the dtype rounds to 0) divides a constant input by its variance of 0",
        "Give the layer eps=1e-5",
        _constant,
    ),
    Row(
        "norm layer with an eps too small for float16",
        names("NativeLayerNormBackward NativeGroupNormBackward"),
        "1 / sqrt(eps) of a constant group is beyond 65504 for an eps below 2.4e-10: fine in forward, NaN in backward",
        "Give the layer eps=1e-5, or compute it in float32",
        _half_deviation,
    ),
    Row(
        "weight_norm of a zero weight",
        names("_weight_norm_interface weight_norm_interface"),
        "g * v / |v| is 0/0 where a row of v is 0: a layer that was set to 0 before or after weight_norm",
        "Initialise the weight with anything but 0; to start at 0 set the gain g (original0) to 0",
        _weight_norm,
    ),
    Row(
        "spectral_norm of a zero weight",
        names("div"),
        "a weight of zeros is divided by its largest singular value, which is 0",
        "Initialise the weight with anything but 0 before spectral_norm",
        _spectral_norm,
    ),
    Row(
        "RMSNorm with eps=0",
        names("rsqrt"),
        "1 / rms of a zero vector (padding) is infinite without eps",
        "Give the layer eps=1e-6, and compute it in float32",
        _rms,
    ),
)
