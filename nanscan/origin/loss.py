"""The origin where a model is fine and its loss is not: all that is left of a loss function is its graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nanscan.names import clean
from nanscan.origin.ranges import bad_counts, range_of
from nanscan.origin.record import Origin

__all__ = ["beside_origin", "is_beside", "loss_nodes", "loss_origin"]

MAX_NODES = 12
_OF_OUTPUT = "gradient of the model's output"
_EARLIER = (
    "the last {} forwards before this step, which are those that can be run again, show no NaN or Inf: an earlier one "
    "does, or what is added beside them. optimizer.check_microbatch(loss) after each backward says which"
)
_NEXT = "it is traced, and the next such step names the op; or put `with nanscan.trace(model):` around a step yourself"
# What can turn finite numbers into NaN or Inf in backward or forward; the others of a loss only add, select or reshape.
_RISKY = (
    "Div",
    "Log",
    "Sqrt",
    "Pow",
    "Exp",
    "Norm",
    "Mean",
    "Acos",
    "Asin",
    "Std",
    "Var",
    "Rsqrt",
    "Reciprocal",
    "Loss",
)


def loss_nodes(loss: Tensor) -> list[str]:
    """The names of the nodes nearest to the loss, the loss's own first."""
    found: list[str] = []
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while waiting and len(found) < MAX_NODES:
        node = waiting.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() != "AccumulateGrad":
            found.append(node.name())
        waiting += [child for child, _ in node.next_functions]
    return found


def loss_origin(loss: Tensor | None, gradient: Tensor | None, nodes: list[str], masked: Tensor | None) -> Origin:
    """The origin for a loss function that was not traced; `masked` is an output of the model that holds an Inf."""
    bad = loss if loss is not None else gradient
    assert bad is not None
    counts = bad_counts(bad.detach())
    what = range_of("loss" if loss is not None else _OF_OUTPUT, bad.detach())
    return Origin(
        kind="nan" if counts[0] else "inf",
        phase="forward" if loss is not None else "backward",
        op="loss",
        outputs=(what,),
        note=_note(loss, nodes),
        hint=_masked(masked)
        + (_scaled(bad) if loss is None and not counts[0] else "")
        + (
            "no op of the model makes a NaN or Inf when it is run again: the loss function made it. From now on "
            f"{_NEXT}" + ("" if loss is not None else ", and give the loss to optimizer.observe(loss)")
        ),
    )


def beside_origin(model: nn.Module | None, forwards: int = 0) -> Origin | None:
    """The origin where weights have a bad gradient that came to them on another way than through the model's output.

    `forwards`: only so many, the last ones, could be run again; 0: all.
    """
    named = [] if model is None else model.named_parameters()
    for name, weight in named:
        if weight.grad is not None and bad_counts(weight.grad) != (0, 0):
            return Origin(
                kind="nan" if bad_counts(weight.grad)[0] else "inf",
                phase="backward",
                op="loss",
                outputs=(range_of(f"gradient of {clean(name)}", weight.grad),),
                hint=_EARLIER.format(forwards)
                if forwards
                else (
                    "neither the model, when it is run again, nor the gradient of its output shows a NaN or Inf: what "
                    "is added beside it made it, as a penalty on weights or gradients, or what changes gradients after "
                    f"backward, or it does not repeat. From now on {_NEXT}"
                ),
            )
    return None


def is_beside(origin: Origin) -> bool:
    """Whether an origin says no more than that weights have a bad gradient: of another rank's making, perhaps."""
    return origin.op == "loss" and origin.phase == "backward" and origin.outputs[0].name != _OF_OUTPUT


def _masked(output: Tensor | None) -> str:
    """What an Inf in the model's output is that no op made out of finite numbers."""
    if output is None:
        return ""
    return (
        f"the model's output holds {bad_counts(output.detach())[1]} Inf that were written on purpose (a mask), and the "
        "loss takes them in: mask with a large finite number (-1e4), or leave such rows out of the loss; else "
    )


def _scaled(gradient: Tensor) -> str:
    """What an Inf in a float16 gradient usually is."""
    if gradient.dtype is not torch.float16:
        return ""
    return (
        "a gradient beyond 65504 in float16: the scale of the loss is too large. A GradScaler skips this step and "
        "lowers it, no fault if rare; else "
    )


def _note(loss: Tensor | None, nodes: list[str]) -> str | None:
    if loss is None or not nodes:
        return None
    risky = [name for name in nodes if any(word in name for word in _RISKY)]
    return f"its graph, from the loss: {', '.join(dict.fromkeys(risky or nodes))}"
