"""Wrappers that derive their class from that of the optimizer inside (Lightning, Fabric): how they show the guard."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from nanscan import messages

__all__ = ["derived_kind", "forward_module", "guard_inside", "notice_question", "show_the_guard"]

_KINDS = frozenset({"LightningOptimizer", "_FabricOptimizer"})
_OF_THE_INSTANCE = frozenset({"_optimizer", "_strategy", "_callbacks", "_on_before_step", "_on_after_step"})
_STEP_THEMSELVES = ("DeepSpeed", "XLA")
_MOVE_WEIGHTS = frozenset({"first_step", "second_step", "ascent_step", "descent_step", "fused_backward"})  # SAM, LOMO


def notice_question(optimizer: Any, name: str) -> None:
    """An attribute of the inner optimizer is asked for: act on those that say what is about to happen."""
    if name == "_is_accelerate_prepared":  # Accelerator.prepare asks: its wrapper is to know of skipped steps
        importlib.import_module("nanscan.integrations.accelerate")
    elif name in _MOVE_WEIGHTS and hasattr(optimizer, name):
        messages.warn(messages.moves_by_itself(name), UserWarning)


def derived_kind(kind: type[Any]) -> type[Any] | None:
    """Lightning's or Fabric's own class among the bases of `kind`, None where it is no wrapper of theirs."""
    return next((base for base in kind.__mro__ if base.__name__ in _KINDS), None)


def show_the_guard(kind: type[Any]) -> None:
    """Let a wrapper that is derived from the guard's class, too, read and set everything in the guard that it holds.

    Methods found in the class would run on the wrapper and keep their state there, where the guard's own steps don't
    see it. Other classes are left alone.
    """
    base = derived_kind(kind)
    if base is None:
        return
    own = set(_OF_THE_INSTANCE)
    for theirs in kind.__mro__[: kind.__mro__.index(base) + 1]:
        own |= {name for name in vars(theirs) if not name.startswith("__")}
    kind.__getattribute__, kind.__setattr__ = _reader(own), _setter(own)  # type: ignore[assignment]
    messages.point_past(sys.modules[base.__module__.partition(".")[0]])


def _reader(own: set[str]) -> Callable[[Any, str], Any]:
    def __getattribute__(self: Any, name: str) -> Any:
        if name in own or name.startswith("__"):
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "_optimizer"), name)

    return __getattribute__


def _setter(own: set[str]) -> Callable[[Any, str, Any], None]:
    def __setattr__(self: Any, name: str, value: Any) -> None:
        if name in own or name.startswith("__"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._optimizer, name, value)

    return __setattr__


def guard_inside(wrapper: Any, guard: Any) -> Any:
    """Put a guard into a wrapper, around the optimizer that it holds; the object stays the same.

    Args:
        wrapper: what `fabric.setup` or `self.optimizers()` of a LightningModule has returned.
        guard: the guarded optimizer; it holds what `wrapper.optimizer` is now.

    Returns:
        `wrapper`, whose steps are now guarded where it makes them: behind its gradient scaler.

    Raises:
        NotImplementedError: for strategies whose engine steps by itself.
    """
    base: Any = derived_kind(type(wrapper))
    strategy = type(wrapper._strategy).__name__
    if any(name in strategy for name in _STEP_THEMSELVES):
        raise NotImplementedError(
            f"nanscan can't guard an optimizer under {strategy}: its engine steps by itself. Leave nanscan.wrap out"
        )
    wrapper._optimizer = guard
    prefix = type(wrapper).__name__.removesuffix(type(guard.optimizer).__name__)
    wrapper.__class__ = type(f"{prefix}{type(guard).__name__}", (base, type(guard)), {})
    return wrapper


def forward_module(model: Any) -> Any:
    """The module inside of Fabric's wrapper, with DDP or FSDP around it where there is one; others as they are."""
    inside = getattr(model, "_forward_module", None)
    return inside if type(model).__name__ == "_FabricModule" and inside is not None else model
