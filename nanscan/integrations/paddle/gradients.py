"""The gradients of a Paddle optimizer: which parameters it would change, their gradients, writing to these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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
        return [param for group in optimizer._param_groups for param in group["params"]]
    return list(optimizer._param_groups or ())


def gather(optimizer: Any, parameters: Iterable[Any] | None = None) -> Gradients:
    """The parameters that a step would change, each once, with their gradients.

    Args:
        optimizer: a `paddle.optimizer.Optimizer`.
        parameters: those of one step only (an argument of `minimize`); None: the optimizer's.
    """
    params = all_params(optimizer) if parameters is None else list(parameters)
    trained = {id(p): p for p in params if not p.stop_gradient}.values()
    clipped = [p for p in trained if getattr(p, "need_clip", True)]
    free = [p for p in trained if not getattr(p, "need_clip", True)] if len(clipped) < len(trained) else []
    read = _gradient if is_grouped(optimizer) else _main_gradient
    return Gradients([*clipped, *free], [read(p) for p in (*clipped, *free)], len(clipped))


def _gradient(param: Any) -> Any:
    return param._grad_ivar()


def _main_gradient(param: Any) -> Any:
    """The float32 gradient that mixed-precision utilities keep beside a float16 parameter, where there is one."""
    main = getattr(param, "main_grad", None)
    return param._grad_ivar() if main is None else main


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
