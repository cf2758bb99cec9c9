"""Hints for finite inputs whose result is beyond the largest number of the dtype; asked after all others."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from nanscan.origin.hints.row import Row, names
from nanscan.origin.hints.view import View, short

__all__ = ["ROWS"]

_PRODUCTS = names(
    "mm bmm addmm baddbmm convolution dot mv linear addmv einsum _addmm_activation mkldnn_linear thnn_conv2d "
    "cudnn_convolution mkldnn_convolution linalg_matrix_exp _trilinear"
)
_SUMS = names("sum cumsum mean prod cumprod mse_loss huber_loss smooth_l1_loss norm linalg_vector_norm logcumsumexp")
_POINTWISE = names("mul add sub rsub pow square addcmul float_power lerp div")


def _overflows(view: View) -> bool:
    if view.nan or view.event.phase != "forward":
        return False
    tensors = [t for t in view.event.inputs if t is not None and (t.is_floating_point() or t.is_complex())]
    return all(bool(t.isfinite().all()) for t in tensors)


def _largest(view: View) -> str:
    """The largest magnitudes of the inputs."""
    tensors = [t for t in view.event.inputs if t is not None and t.is_floating_point() and t.numel()]
    return " and ".join(short(float(t.abs().max())) for t in tensors[:3])


def _product(view: View) -> str | None:
    if not _overflows(view):
        return None
    what = f"{view.name} overflowed {view.dtype} (beyond {short(view.limit)})"
    return f"{what}{view.where}, inputs are up to {_largest(view)}"


def _reduction(view: View) -> str | None:
    if not _overflows(view):
        return None
    count = view.event.inputs[0].numel() if view.event.inputs and view.event.inputs[0] is not None else 0
    return f"{view.name} of {count} elements up to {_largest(view)} is beyond {short(view.limit)} in {view.dtype}"


def _pointwise(view: View) -> str | None:
    if not _overflows(view):
        return None
    values = [short(v) for v in (view.value(0), view.value(1)) if v is not None]
    return f"{view.name} of {' and '.join(values)}{view.where} is beyond {short(view.limit)} in {view.dtype}"


def _apart(view: View) -> str | None:
    values = view.operand(0)
    if not _overflows(view) or not isinstance(values, Tensor):
        return None
    low, high = short(float(values.min())), short(float(values.max()))
    return f"log_softmax of scores from {low} to {high}{view.where}: their distance is beyond {short(view.limit)}"


def _in_float16(said: Callable[[View], str | None]) -> Callable[[View], str | None]:
    return lambda view: said(view) if view.is_float16 else None


def _gradient(view: View) -> str | None:
    if view.event.phase != "backward" or view.nan or not view.is_float16:
        return None
    gradient = view.largest_gradient
    how = "" if gradient is None else f" from incoming gradients up to {short(gradient)}"
    return f"a gradient overflowed float16 (beyond 65504) in {view.name}{view.where}{how}"


def _large_gradient(view: View) -> str | None:
    if view.event.phase != "backward" or view.nan or view.is_float16:
        return None
    gradient = view.largest_gradient
    if gradient is None:
        return f"the sum of gradients{view.where} is beyond {short(view.limit)} in {view.dtype}"
    if gradient < 1e3:
        return None
    return f"incoming gradients up to {short(gradient)} overflowed {view.dtype} in {view.name}{view.where}"


_DIVERGED = (
    "Numbers of this size mean that the run diverges: look at the growth with nanscan.watch, lower the learning rate, "
    "clip gradients, normalise activations"
)

ROWS = (
    Row(
        "float16 overflow of a matrix product or convolution",
        _PRODUCTS,
        "the products sum up to more than 65504",
        "Use bfloat16 or float32 for this layer, or scale its inputs down (in attention q before q @ k.T)",
        _in_float16(_product),
    ),
    Row(
        "overflow of a matrix product or convolution",
        _PRODUCTS,
        "the products sum up to more than the largest number of the dtype, 3.4e38 in float32 and bfloat16",
        _DIVERGED,
        _product,
    ),
    Row(
        "float16 overflow of a sum",
        _SUMS,
        "a sum, mean, norm or loss over many elements is beyond 65504",
        "Reduce in float32: x.sum(dtype=torch.float32), x.float().square().mean()",
        _in_float16(_reduction),
    ),
    Row(
        "overflow of a product over many",
        names("prod cumprod"),
        "the product of many factors above 1 grows exponentially",
        "Add logarithms instead (x.log().sum().exp() at the very end), or normalise the factors",
        _reduction,
    ),
    Row("overflow of a sum", _SUMS, "a sum is beyond the largest number of the dtype", _DIVERGED, _reduction),
    Row(
        "float16 overflow of a product or sum of two",
        _POINTWISE,
        "the result is beyond 65504, as the square of anything above 255",
        "Compute this in float32 or bfloat16, or scale the operands down before",
        _in_float16(_pointwise),
    ),
    Row(
        "overflow of a product or sum of two",
        _POINTWISE,
        "the result is beyond the largest number of the dtype",
        _DIVERGED,
        _pointwise,
    ),
    Row(
        "log_softmax of scores too far apart",
        names("_log_softmax log_softmax"),
        "log_softmax subtracts the maximum: finfo.min of a mask minus a positive score is -inf, in float16 sooner",
        "Mask with -1e4 instead of finfo.min, or compute log_softmax in float32",
        _apart,
    ),
    Row(
        "loss-scale overflow",
        frozenset(),
        "the loss scale (or the loss) is too large for float16 gradients",
        "A GradScaler skips this step and lowers its scale: no fault if rare; else lower the scale or use bfloat16",
        _gradient,
    ),
    Row(
        "gradient that grew too large",
        frozenset(),
        "gradients grow from layer to layer until they overflow",
        "Lower the learning rate or the loss, clip gradients, or look at the growth with nanscan.watch",
        _large_gradient,
    ),
)
