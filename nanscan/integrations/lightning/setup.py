"""What a `Trainer` says about how its optimizers are to be guarded."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nanscan
from nanscan.policy import Policy

__all__ = ["check_alone", "check_options", "check_trainer", "hooks_look_at_gradients", "is_optimizer", "options_for"]

_PATIENCE = inspect.signature(nanscan.Recovery).parameters["patience"].default


def check_options(options: Mapping[str, Any], recovery: Mapping[str, Any] | None) -> None:
    """Raise what `nanscan.wrap` and `nanscan.Recovery` would raise about their options, before a training has begun.

    Args:
        options: of `wrap`.
        recovery: of `Recovery`, None where there is none.

    Raises:
        TypeError, ValueError: also where `Recovery` would never have its turn.
    """
    _check_names(options, nanscan.wrap, {"optimizer", "model"})
    decided = {field.name for field in fields(Policy)}
    policy = Policy(**{name: value for name, value in options.items() if name in decided})
    if recovery is not None:
        _check_names(recovery, nanscan.Recovery, {"model", "optimizer", "scheduler", "scaler"})
        _check_turn(policy, recovery.get("patience", _PATIENCE))


def _check_names(options: Mapping[str, Any], function: Any, given: set[str]) -> None:
    known = inspect.signature(function).parameters.keys() - given
    unknown = sorted(options.keys() - known)
    if unknown:
        raise TypeError(
            f"NanScanCallback has no option {unknown[0]!r}; those of nanscan.{function.__name__} are: "
            f"{', '.join(sorted(known))}"
        )


def _check_turn(policy: Policy, patience: int) -> None:
    """Raise ValueError if the guard ends the training before Recovery goes back."""
    if policy.on_nonfinite == "raise":
        raise ValueError(
            "NanScanCallback(recovery=...) goes back after several skipped steps, and on_nonfinite='raise' ends the "
            "training at the first: leave one of them out"
        )
    skips = policy.max_consecutive_skips
    if skips is not None and skips <= patience:
        raise ValueError(
            f"NanScanCallback(recovery=...) goes back after {patience} skipped steps, max_consecutive_skips={skips} "
            "ends the training before: make it larger than Recovery's patience, or None"
        )


def check_alone(trainer: Any, kind: type[Any]) -> None:
    """Raise ValueError if several callbacks of this kind are to guard the same optimizers."""
    kinds = [type(callback).__name__ for callback in trainer.callbacks if isinstance(callback, kind)]
    if len(kinds) > 1:
        raise ValueError(
            f"a Trainer takes one NanScanCallback, it has {len(kinds)}: {', '.join(kinds)}. Give one all options"
        )


def check_trainer(trainer: Any) -> None:
    """Raise where a guarded optimizer can't do what this Trainer needs."""
    kind = type(trainer.strategy).__name__
    if "DeepSpeed" in kind or "XLA" in kind:
        raise NotImplementedError(
            f"NanScanCallback can't guard the optimizers of {kind}, which are stepped inside its own engine; it is for "
            "one device, for DDP, and for strategies that step PyTorch's optimizers"
        )
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None and any(_is_lbfgs(optimizer) for optimizer in trainer.strategy.optimizers):
        raise ValueError(
            "LBFGS needs a closure, which a gradient scaler can't give it: use precision='bf16-mixed' or 32"
        )


def _is_lbfgs(optimizer: Any) -> bool:
    return isinstance(getattr(optimizer, "optimizer", optimizer), torch.optim.LBFGS)


def is_optimizer(optimizer: Any) -> bool:
    """False for the stand-in of a module whose `configure_optimizers` returns None."""
    return type(optimizer).__name__ != "_MockOptimizer"


def hooks_look_at_gradients(trainer: Any, pl_module: Any) -> bool:
    """True if a hook of the module or of a callback runs between backward and the step, and may read gradients."""
    owners = [*trainer.callbacks, pl_module]
    if any(_overrides(owner, "on_before_optimizer_step") for owner in owners):
        return True
    return _overrides(pl_module, "configure_gradient_clipping")


def _overrides(owner: Any, hook: str) -> bool:
    """True if the hook is neither Lightning's own, which does nothing or asks for the guard's clipping, nor ours."""
    found = getattr(owner, hook, None)
    home = str(getattr(found, "__module__", ""))
    return found is not None and not home.startswith(("lightning.pytorch.", "pytorch_lightning.", "nanscan."))


def options_for(trainer: Any, options: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The options of `nanscan.wrap` for the optimizer at `index` of this process.

    Under DDP the default process group, unless another was given. A log that is a path is written by the first rank,
    a file for each optimizer: `run.jsonl`, `run.1.jsonl`, ….
    """
    found = dict(options)
    log = found.get("log")
    if isinstance(log, (list, tuple)):
        found["log"] = [kept for kept in (_log_for(trainer, one, index) for one in log) if kept is not None]
    else:
        found["log"] = _log_for(trainer, log, index)
    if found.get("process_group") is None and _is_ddp(trainer.strategy) and dist.is_initialized():
        found["process_group"] = "default"
    return found


def _log_for(trainer: Any, log: Any, index: int) -> Any:
    if not isinstance(log, (str, PathLike)):
        return log
    path = Path(log)
    named = path.with_suffix(f".{index}{path.suffix}") if index else path
    return named if trainer.is_global_zero else None


def _is_ddp(strategy: Any) -> bool:
    return any(kind.__name__ == "DDPStrategy" for kind in type(strategy).__mro__)
