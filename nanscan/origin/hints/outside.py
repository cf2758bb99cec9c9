"""Hints for what was NaN or Inf before any op of the trace: the batch, a parameter, a constant that was written in."""

from __future__ import annotations

import math

from nanscan.origin.hints.row import Row, names
from nanscan.origin.hints.view import View, places

__all__ = ["ROWS"]


def _bad_elements(view: View) -> str:
    bad = view.bad
    return f"{places(~bad.isfinite())} of shape {list(bad.shape)}"


def _input(view: View) -> str | None:
    word = "NaN" if view.nan else "Inf"
    sample = f", first in sample {view.at[0]}" if view.bad.dim() > 1 else ""
    return f"the {word} comes in with the batch ({_bad_elements(view)}{sample})"


def _constant(view: View) -> str | None:
    if view.bad.dim() > 0:
        return None
    return f"a single {'NaN' if view.nan else 'Inf'} (shape []) that no traced op made"


def _logdet(view: View) -> str | None:
    if view.bad.dim() > 0 or "logdet" not in view.code:
        return None
    return "logdet gives NaN where the determinant is negative"


def _factor(view: View) -> str | None:
    numbers = {name: v for name, v in view.event.kwargs.items() if name in ("alpha", "value", "lr") and v != v}
    return f"its factor ({', '.join(numbers)}) is NaN" if numbers else None


def _hook(view: View) -> str | None:
    return f"a full backward hook of a module changed the gradient{view.where}"


def _never_written(view: View) -> str | None:
    return f"memory that nobody wrote to was read ({_bad_elements(view)}), and it holds whatever was there before"


def _custom(view: View) -> str | None:
    return f"a custom autograd.Function made NaN by other means than PyTorch's ops ({_bad_elements(view)})"


def _custom_backward(view: View) -> str | None:
    zero = ", where its incoming gradient was exactly 0" if view.event.zero_gradient else ""
    word = "NaN" if view.nan else "Inf"
    return f"the backward of your custom autograd.Function made {word} out of finite gradients{view.where}{zero}"


def _parameter(view: View) -> str | None:
    word = "NaN" if view.nan else "Inf"
    return f"the parameter or buffer held {word} before this pass ({_bad_elements(view)})"


def _written(view: View) -> str | None:
    numbers = [v for v in (*view.event.args, *view.event.kwargs.values()) if isinstance(v, float)]
    if not any(math.isnan(v) for v in numbers):
        return None
    return "the program itself writes NaN here, as a fill value"


ROWS = (
    Row(
        "logdet of a negative determinant",
        names("input"),
        "the log of a negative number has no real value",
        "Use torch.linalg.slogdet, which gives the sign and the log of the absolute value",
        _logdet,
    ),
    Row(
        "bad constant",
        names("input"),
        "a single number that is NaN or Inf: a coefficient, a weight of the loss, a number written into a tensor",
        "Look where that number comes from on this line",
        _constant,
    ),
    Row(
        "bad input",
        names("input"),
        "the batch brings a NaN or Inf with it; a mask does not take it away, since 0 * NaN is NaN",
        "nanscan.check_batch names the sample and the field; look at the data and its preprocessing (0/0 of constants, "
        "log of 0)",
        _input,
    ),
    Row(
        "step with a factor of NaN",
        names("add addcdiv addcmul sub _fused_adam _fused_adamw _fused_sgd"),
        "the learning rate (or a weight of a sum) is NaN: a schedule that divided 0 by 0",
        "Look at the scheduler and at optimizer.param_groups",
        _factor,
    ),
    Row(
        "hook that changes the gradient",
        names("BackwardHookFunctionBackward"),
        "a hook of register_full_backward_hook returned NaN or Inf",
        "Look at the hooks of the modules on this path",
        _hook,
    ),
    Row(
        "memory that was never written",
        names("empty empty_like empty_strided empty_permuted new_empty new_empty_strided"),
        "torch.empty holds whatever was in memory before, at times a NaN",
        "Use torch.zeros, or write all of it before it is read",
        _never_written,
    ),
    Row(
        "custom function beyond PyTorch",
        names("Function"),
        "the forward of a custom autograd.Function calls numpy, C++ or a kernel of its own, whose ops no trace sees",
        "Check what goes in and comes out of its forward: log of 0, a division by 0, memory that is not written",
        _custom,
    ),
    Row(
        "backward of a custom function",
        names("FunctionBackward"),
        "the backward of a custom autograd.Function divides by a saved 0, or takes a log, root or power at its edge",
        "Look at its backward at the inputs that are listed; torch.autograd.gradcheck compares it with the forward",
        _custom_backward,
    ),
    Row(
        "bad parameter or buffer",
        names("parameter"),
        "an earlier step, a checkpoint or memory that was never initialised (torch.empty) left it",
        "Restore a good checkpoint and guard the steps with nanscan.wrap; if new, initialise it (torch.empty does not)",
        _parameter,
    ),
    Row(
        "NaN written by the program",
        names("full full_like fill masked_fill where scalar_tensor new_full index_fill"),
        "a fill value is NaN",
        "Mask with -inf or a large finite number where a softmax follows, or leave the elements out",
        _written,
    ),
)
