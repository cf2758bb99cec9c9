"""The gradients of a Paddle optimizer: which parameters it would change, their gradients, writing to these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

import paddle

from nanscan.integrations.paddle.tensors import merged_rows

__all__ = ["Gradients", "all_params", "gather", "writable"]


@dataclass(frozen=True)
class Gradients:
    """What one step goes by. `params` and `grads` (None: no gradient) are aligned.

    The first `clipped` ones count for the norm; those after them have `need_clip=False` (`paddle.ParamAttr`): they are
    looked at, but neither measured nor scaled, as in Paddle's own clipping.
    """

    params: list[Any]
    grads: list[Any]
    clipped: int

    @property
    def to_clip(self) -> list[Any]:
        """The gradients that count for the norm."""
        return self.grads[: self.clipped]

    @property
    def others(self) -> list[Any]:
        """The gradients of parameters with `need_clip=False`."""
        return self.grads[self.clipped :]


def is_grouped(optimizer: Any) -> bool:
    """True if the optimizer has groups of parameters (dicts), else it has one plain list."""
    groups = optimizer._param_groups
    return bool(groups) and isinstance(groups[0], dict)


def all_params(optimizer: Any) -> list[Any]:
    """Every parameter of a Paddle optimizer, in order."""
    if is_grouped(optimizer):
        return list(chain.from_iterable(group["params"] for group in optimizer._param_groups))
    return list(optimizer._param_groups or ())


def gather(optimizer: Any, parameters: Iterable[Any] | None = None) -> Gradients:
    """The parameters that a step would change, each once, with their gradients.

    Args:
        optimizer: a `paddle.optimizer.Optimizer`.
        parameters: those of one step only (an argument of `minimize`); None: the optimizer's.
    """
    params = all_params(optimizer) if parameters is None else list(parameters)
    # Every step comes here with every parameter: what is asked of each one is asked by `map`, not by the interpreter.
    trained = params
    if len(set(map(id, params))) < len(params) or any(map(_is_frozen, params)):
        trained = list({id(p): p for p in params if not p.stop_gradient}.values())
    clipped = len(trained)
    if not all(map(getattr, trained, repeat("need_clip"), repeat(True))):
        free = [p for p in trained if not getattr(p, "need_clip", True)]
        trained = [p for p in trained if getattr(p, "need_clip", True)] + free
        clipped -= len(free)
    grads = list(map(_gradient, trained))
    return Gradients(trained, grads if is_grouped(optimizer) else _main_gradients(trained, grads), clipped)


_is_frozen = attrgetter("stop_gradient")
_gradient = paddle.Tensor._grad_ivar


def _main_gradients(params: list[Any], grads: list[Any]) -> list[Any]:
    """The float32 gradients that mixed-precision utilities keep beside float16 parameters, where there are some."""
    if not any(map(hasattr, params, repeat("main_grad"))):
        return grads
    mains = [getattr(p, "main_grad", None) for p in params]
    return [grad if main is None else main for main, grad in zip(mains, grads, strict=True)]


def writable(params: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
    """The dense tensors to be changed in place of `grads`; equal rows of sparse ones are merged first."""
    return [_dense(p, g) for p, g in zip(params, grads, strict=True) if g is not None]


def _dense(param: Any, grad: Any) -> Any:
    if grad.is_dist():
        return grad._local_value()
    if grad.is_selected_rows():
        param.grad = merged_rows(grad)
        return param._grad_ivar()._get_tensor_from_selected_rows()
    if grad.is_sparse_coo():
        param.grad = grad.coalesce()
        return param._grad_ivar().values()
    return grad
