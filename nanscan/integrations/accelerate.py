"""Accelerate: guarded optimizers inside of its `AcceleratedOptimizer`, whose `step_was_skipped` then says the truth.

Importing this module (which `Accelerator.prepare` of a guarded optimizer and `nanscan.wrap` of a prepared one do by
themselves) changes four methods of Accelerate, for accelerators with a guarded optimizer only:
`AcceleratedOptimizer.__init__` makes a `PreparedOptimizer`, `Accelerator.clip_grad_norm_` and `clip_grad_value_` leave
gradients alone that hold a NaN or Inf, and `Accelerator.backward` shows the guard the loss where that was asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nanscan
from nanscan import messages
from nanscan.errors import NonFiniteError
from nanscan.guard import GuardedOptimizer
from nanscan.integrations.late_norm import LateNorm
from nanscan.integrations.versions import require

messages.point_past(require("accelerate", "1.1", "2", extra="accelerate"))

from accelerate import Accelerator  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer, patch_optimizer_step  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402

__all__ = ["PreparedOptimizer", "guard_inside", "keep_guard_state", "prepare"]

GUARD_FILE = "nanscan_guard.pt"
_CLIP_THEMSELVES = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.XLA, DistributedType.MEGATRON_LM)
_STEP_THEMSELVES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def prepare(accelerator: Accelerator, *objects: Any, observe_loss: bool = True, **options: Any) -> Any:
    """`accelerator.prepare(*objects)` whose optimizers are guarded.

    Args:
        accelerator: the `accelerate.Accelerator`.
        objects: as for its `prepare`: models, optimizers, dataloaders and schedulers in any order.
        observe_loss: the loss given to `accelerator.backward` joins the scan (only where there is one optimizer: with
            several, nothing says whose loss it is).
        options: those of `nanscan.wrap`. `process_group` is the default group where several processes train and
            nothing else is given.

    Returns:
        The prepared objects, in the same order. Each optimizer is a `PreparedOptimizer`; its state as a guard is saved
        and loaded by `accelerator.save_state` and `load_state`, in a file of its own beside the others.

    Raises:
        NotImplementedError: DeepSpeed or Megatron-LM, whose engines step by themselves.
        ValueError: options are given, but no optimizer that they could be for.
        TypeError: `accelerator` is none.
        ValueError, TypeError: as `nanscan.wrap`.

    >>> import torch, accelerate
    >>> model = torch.nn.Linear(2, 1)
    >>> accelerator = accelerate.Accelerator(cpu=True)
    >>> model, optimizer = prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=1.0)
    >>> accelerator.backward(model(torch.full((1, 2), float("inf"))).sum())
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     optimizer.step()
    >>> optimizer.step_was_skipped, accelerator.optimizer_step_was_skipped, optimizer.last_report.bad[0].name
    (True, True, 'weight')
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"accelerator must be an accelerate.Accelerator, got {type(accelerator).__name__}")
    _refuse(accelerator.distributed_type)
    if options and not any(isinstance(item, torch.optim.Optimizer) for item in objects):
        raise ValueError(f"{', '.join(options)} given, but no optimizer among the objects to prepare: give it here too")
    models = [item for item in objects if isinstance(item, nn.Module)]
    models = models or [accelerator.unwrap_model(model) for model in accelerator._models]
    options.setdefault("process_group", group_of(accelerator.state))
    prepared = accelerator.prepare(*objects)
    optimizers = [item for item in _several(prepared) if isinstance(item, torch.optim.Optimizer)]
    for optimizer in optimizers:
        guarded = nanscan.wrap(optimizer, _model_of(optimizer, models), **options)
        guarded.sees_loss = observe_loss and len(optimizers) == 1  # type: ignore[attr-defined]
    keep_guard_state(accelerator, optimizers)
    return prepared


class PreparedOptimizer(AcceleratedOptimizer, GuardedOptimizer):  # type: ignore[misc]
    """An `AcceleratedOptimizer` with a guarded optimizer inside: it steps as the first and tells what the second found.

    `accelerator.prepare(nanscan.wrap(optimizer, model))` and `nanscan.wrap(accelerator.prepare(optimizer), model)` are
    both one. `step()` looks and acts when gradients are complete (`accelerator.accumulate`), with the accelerator's
    gradient scaler if it has one. `.optimizer` is the `GuardedOptimizer` itself.
    """

    sees_loss = False  # `Accelerator.backward` hands the loss to `observe`
    clips_for: tuple[float, int] | None = None  # the call of `Accelerator.clip_grad_norm_` that the guard clips instead

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step, by the guard's verdict or the gradient scaler's, left weights and state alone."""
        return bool(self.optimizer.step_was_skipped)  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: Any) -> None:
        guard = vars(self).get("optimizer")
        theirs = guard is not None and name in vars(guard) and name not in vars(self)
        if theirs and not hasattr(AcceleratedOptimizer, name):
            setattr(guard, name, value)
        else:
            super().__setattr__(name, value)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """As Accelerate's. Where the guard raises, the scaler's step is ended: a loop that catches it can go on."""
        try:
            super().step(closure)
        except NonFiniteError:
            if self.scaler is not None:
                self.scaler.update()
                self.optimizer.step = self._optimizer_original_step_method  # type: ignore[method-assign]
                self._accelerate_step_called = False
            raise

    __deepcopy__ = None  # type: ignore[assignment]  # the state is copied as Accelerate says, not as the guard does

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"


def _shown(name: str) -> property:
    return property(lambda self: getattr(self.optimizer, name), doc=f"`{name}` of the guarded optimizer inside.")


def _show_the_guard() -> None:
    """Whatever a guarded optimizer has and Accelerate's does not is the inner one's, with its own `self`."""
    mine, theirs = vars(PreparedOptimizer), vars(AcceleratedOptimizer)
    for kind in GuardedOptimizer.__mro__[: GuardedOptimizer.__mro__.index(torch.optim.Optimizer)]:
        for name in vars(kind):
            if not name.startswith("__") and name not in mine and name not in theirs:
                setattr(PreparedOptimizer, name, _shown(name))


_show_the_guard()


def guard_inside(optimizer: Any, guard: GuardedOptimizer) -> PreparedOptimizer:
    """Put a guard into a prepared optimizer, around the one that it holds; the object stays the same.

    Args:
        optimizer: the `AcceleratedOptimizer`.
        guard: the guarded optimizer; it holds what `optimizer.optimizer` is now.

    Returns:
        `optimizer`, now a `PreparedOptimizer`: the accelerator and its schedulers know it already.

    Raises:
        NotImplementedError: for DeepSpeed and Megatron-LM, whose engines step by themselves.
    """
    if type(optimizer) not in (AcceleratedOptimizer, PreparedOptimizer):
        raise NotImplementedError(
            f"nanscan can't guard a {type(optimizer).__name__}: its engine steps by itself. Guard the optimizer that "
            "you give to prepare(), or leave nanscan.wrap out"
        )
    _refuse(optimizer.accelerator_state.distributed_type)
    optimizer.optimizer = guard
    if optimizer.scaler is not None:  # it looks through this method whether the scaler called step()
        optimizer._optimizer_original_step_method = guard.step
        optimizer._optimizer_patched_step_method = patch_optimizer_step(optimizer, guard.step)
    optimizer.__class__ = PreparedOptimizer
    return optimizer  # type: ignore[no-any-return]


def group_of(state: Any) -> bool | None:
    """What `process_group` is where nothing is given: the default group if several processes train by DDP.

    The losses that join the scan are each rank's own. Sharded parameters imply their group themselves.
    """
    ddp = state.num_processes > 1 and state.distributed_type not in _CLIP_THEMSELVES
    return True if ddp and torch.distributed.is_initialized() else None


def _refuse(kind: Any) -> None:
    if kind in _STEP_THEMSELVES:
        raise NotImplementedError(
            f"nanscan can't guard an optimizer under {kind.value}: its engine steps by itself. It has its own check "
            "for overflow; leave nanscan out there"
        )


def _several(prepared: Any) -> Sequence[Any]:
    return prepared if isinstance(prepared, tuple) else (prepared,)


def _model_of(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> nn.Module | None:
    """The model that holds most of the optimizer's parameters."""
    ours = {id(param) for group in optimizer.param_groups for param in group["params"]}
    shared = [sum(id(param) in ours for param in model.parameters()) for model in models]
    return models[shared.index(max(shared))] if any(shared) else None


# ---- what is saved ---------------------------------------------------------------------------------------------------


def keep_guard_state(accelerator: Accelerator, optimizers: Any) -> None:
    """Let `accelerator.save_state` and `load_state` save and load the guards' counters and statistics as well.

    They lie in a file of their own, so that a checkpoint loads with and without nanscan, whichever wrote it.

    Args:
        accelerator: the accelerator that saves.
        optimizers: its guarded optimizers, one or several; the order counts. Called again, it adds to those that it was
            given before (but for those that `accelerator.free_memory` has dropped).

    Raises:
        TypeError: one of them is not guarded.
    """
    optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    for optimizer in optimizers:
        if not isinstance(optimizer, GuardedOptimizer):
            raise TypeError(f"a {type(optimizer).__name__} is not guarded: give what nanscan.wrap or prepare returned")
    if not optimizers:
        return
    hooked = "_nanscan_guards" in vars(accelerator)
    kept: list[Any] = vars(accelerator).setdefault("_nanscan_guards", [])
    present = accelerator._optimizers  # `free_memory` has dropped the others
    kept[:] = [guard for guard in kept if not isinstance(guard, PreparedOptimizer) or _is_in(guard, present)]
    kept.extend(optimizer for optimizer in optimizers if not _is_in(optimizer, kept))
    if not hooked:
        accelerator.register_save_state_pre_hook(functools.partial(_save_guards, accelerator))
        accelerator.register_load_state_pre_hook(functools.partial(_load_guards, accelerator))


def _is_in(item: Any, items: Iterable[Any]) -> bool:
    return any(item is other for other in items)


def _save_guards(accelerator: Any, models: Any, weights: Any, folder: str) -> None:
    if accelerator.is_main_process:
        states = [guard.guard_state_dict() for guard in accelerator._nanscan_guards]
        nanscan.save({"guards": states}, Path(folder) / GUARD_FILE, check_finite=False)


def _load_guards(accelerator: Any, models: Any, folder: str) -> None:
    path, guards = Path(folder) / GUARD_FILE, accelerator._nanscan_guards
    states = nanscan.load(path)["guards"] if path.exists() else []
    if states and len(states) != len(guards):
        raise ValueError(
            f"{path} holds the state of {len(states)} guarded optimizers, and this accelerator has {len(guards)}: "
            "prepare the same ones in the same order, or remove the file to begin with fresh counters"
        )
    for guard, state in zip(guards, states, strict=False):
        guard.load_guard_state_dict(state)


# ---- what Accelerate learns ------------------------------------------------------------------------------------------


def _guards(accelerator: Accelerator) -> list[PreparedOptimizer]:
    return [item for item in accelerator._optimizers if isinstance(item, PreparedOptimizer)]


def _teach_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(self, optimizer, *args, **kwargs)
        if isinstance(optimizer, GuardedOptimizer):
            guard_inside(self, optimizer)

    return __init__


def _teach_clip(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip_grad_norm_(self: Accelerator, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        guards = _guards(self)
        if not guards or self.distributed_type in _CLIP_THEMSELVES:
            return original(self, parameters, max_norm, norm_type)
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if len(guards) == 1 and guards[0].clips_for == (max_norm, len(parameters)) and norm_type == 2:
            return LateNorm.of(self, guards[0], parameters)
        self.unscale_gradients()
        return nanscan.clip_grad_norm_(parameters, max_norm, norm_type)

    return clip_grad_norm_


def _teach_clip_value(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def clip_grad_value_(self: Accelerator, parameters: Any, clip_value: float) -> None:
        if not _guards(self) or self.distributed_type in _CLIP_THEMSELVES:
            original(self, parameters, clip_value)
            return
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self.unscale_gradients()
        for grad in (param.grad for param in parameters if param.grad is not None):
            grad.copy_(torch.where(grad.isinf(), grad, grad.clamp(-clip_value, clip_value)))

    return clip_grad_value_


def _teach_backward(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def backward(self: Accelerator, loss: Tensor, **kwargs: Any) -> None:
        guards = _guards(self)
        if guards and len(self._optimizers) == 1 and guards[0].sees_loss:
            guards[0].observe(loss)
        original(self, loss, **kwargs)

    return backward


AcceleratedOptimizer.__init__ = _teach_init(AcceleratedOptimizer.__init__)
Accelerator.clip_grad_norm_ = _teach_clip(Accelerator.clip_grad_norm_)
Accelerator.clip_grad_value_ = _teach_clip_value(Accelerator.clip_grad_value_)
Accelerator.backward = _teach_backward(Accelerator.backward)
