"""transformers: a callback that guards the optimizer of a `Trainer`, and one line that adds it."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

import nanscan
from nanscan import messages
from nanscan.guard import GuardedOptimizer
from nanscan.integrations.accelerate import PreparedOptimizer, group_of
from nanscan.integrations.versions import require

messages.point_past(require("transformers", "4.46", "6", extra="transformers"))

from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from transformers import Trainer, TrainerCallback  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402

__all__ = ["NanScanCallback", "wrap_trainer"]


def wrap_trainer(trainer: Trainer, **options: Any) -> Trainer:
    """Guard the optimizer of a `transformers.Trainer` from its next `train()` on.

    Args:
        trainer: the trainer; it gets a `NanScanCallback` in front of its other callbacks, so that what reports to
            TensorBoard or Weights & Biases sees its entries too.
        options: as of `NanScanCallback`.

    Returns:
        The same trainer.

    Raises:
        TypeError: it is no trainer, or `nanscan.wrap` knows no such option.
        ValueError: it has a `NanScanCallback` already.

    `trainer.optimizer` is guarded once training has begun: `trainer.optimizer.skipped_steps`, `.last_report`, ….
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"trainer must be a transformers.Trainer, got {type(trainer).__name__}")
    callbacks = trainer.callback_handler.callbacks
    if any(isinstance(item, NanScanCallback) for item in callbacks):
        raise ValueError("this trainer has a NanScanCallback already: give its options there, or remove it first")
    trainer.add_callback(NanScanCallback(**options))
    callbacks.insert(0, callbacks.pop())
    return trainer


class NanScanCallback(TrainerCallback, ExportableState):
    """Guards the optimizer that a `Trainer` steps: `Trainer(…, callbacks=[NanScanCallback()])`.

    Clipping is the guard's: `args.max_grad_norm` is its `clip_norm` unless another is given here, and the Trainer's
    own clipping, which comes before the step and would spread one NaN over all gradients, only takes the norm from it.
    `grad_norm` in the logs is still the norm before clipping. A skipped step does not move the learning rate. The
    loss of each micro-batch joins the scan as it is, whatever `logging_nan_inf_filter` makes of it in the logs.

    The guard's counters and statistics are in `trainer_state.json` and go on where a resumed run begins; checkpoints
    load with and without nanscan.

    Args:
        observe_loss: the losses join the scan; without them a step costs some microseconds less.
        options: those of `nanscan.wrap`. `process_group` is the default group where several processes train and
            nothing else is given.

    Raises:
        TypeError: `nanscan.wrap` knows no such option.
        NotImplementedError: at the beginning of a training with DeepSpeed, whose engine steps by itself.

    >>> NanScanCallback(on_nonfinite="raise").optimizer is None  # until training begins
    True
    """

    def __init__(self, observe_loss: bool = True, **options: Any) -> None:
        trial = torch.optim.SGD([torch.zeros(1, device="cpu")])
        nanscan.wrap(trial, **_checked_now(options))  # a wrong option: here, not in train()
        self.observe_loss = observe_loss
        self.options = options
        self.optimizer: PreparedOptimizer | None = None
        self.guard_state: dict[str, Any] | None = None  # of the checkpoint that training resumes from
        self.lost: list[str] = []  # options that the checkpoint this object was made of could not hold

    # ---- events ------------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Guard the optimizer, which is ready and has loaded its state by now."""
        optimizer, model = kwargs["optimizer"], kwargs["model"]
        if not isinstance(optimizer, AcceleratedOptimizer):
            raise TypeError(
                f"the Trainer's optimizer is a {type(optimizer).__name__}, not one that Accelerate has prepared: "
                "nanscan can't guard it"
            )
        whole = _holds_all(optimizer, model)
        guarded = nanscan.wrap(optimizer, model, **self._options(args, optimizer, whole))
        assert isinstance(guarded, PreparedOptimizer)
        limit = args.max_grad_norm
        expected = (limit if limit and limit > 0 else math.inf, sum(1 for _ in model.parameters()))
        guarded.clips_for, guarded.sees_loss = expected if whole else None, self.observe_loss
        guarded.optimizer.zero_grad()  # a training that was interrupted may have left micro-batches and losses behind
        guarded.optimizer._losses.clear()  # type: ignore[attr-defined]
        self.optimizer = guarded
        self._resume(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """From now on whoever clips through the accelerator does it himself, until training begins again."""
        if self.optimizer is not None:
            self.optimizer.clips_for, self.optimizer.sees_loss = None, False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add what the guard has counted to the entries about training."""
        if self.optimizer is None or not logs or not {"loss", "train_loss"} & set(logs):
            return
        found = self._figures()
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)

    def _figures(self) -> dict[str, float]:
        assert self.optimizer is not None
        optimizer, report = self.optimizer, self.optimizer.last_report
        found: dict[str, float] = {
            "nanscan/skipped_steps": optimizer.skipped_steps,
            "nanscan/consecutive_skips": optimizer.consecutive_skips,
            "nanscan/bad_parameter_steps": optimizer.bad_parameter_steps,
        }
        if report is not None:
            found["nanscan/clip_factor"] = report.clip_factor
        return found

    def _options(self, args: Any, optimizer: Any, whole: bool) -> dict[str, Any]:
        """The options of `wrap`, with those that the Trainer's arguments decide; `whole`: the guard can clip for it."""
        options = dict(self.options)
        options.setdefault("process_group", group_of(optimizer.accelerator_state))
        others = isinstance(optimizer, GuardedOptimizer) and optimizer is not self.optimizer
        if not others or optimizer.policy.clip_norm is None:
            limit = args.max_grad_norm if whole else None
            options.setdefault("clip_norm", limit if limit and limit > 0 else math.inf)
        return options

    # ---- what a checkpoint holds -------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """For `trainer_state.json`: the options that JSON can hold, and the state of the guard."""
        options = {"observe_loss": self.observe_loss, **self.options}
        held = {name: value for name, value in options.items() if _is_json(value)}
        guard = self.guard_state if self.optimizer is None else _to_json(self.optimizer.guard_state_dict())
        return {"args": held, "attributes": {"guard_state": guard, "lost": sorted({*options} - {*held})}}

    def _resume(self, state: Any) -> None:
        name = type(self).__name__
        saved = state.stateful_callbacks.setdefault(name, self.state())  # a checkpoint without nanscan has none
        if state.global_step == 0:  # no checkpoint: what is there is of this object's training before, maybe another's
            return
        saved = saved[0] if isinstance(saved, list) else saved
        if self.lost:
            messages.warn(
                f"nanscan: {', '.join(self.lost)} of NanScanCallback can't be restored from a checkpoint: now at the "
                "default. Leave restore_callback_states_from_checkpoint out; the guard's state is restored without it.",
                UserWarning,
            )
        guard = saved.get("attributes", {}).get("guard_state")
        if guard is not None and self.optimizer is not None:
            self.optimizer.load_guard_state_dict(_from_json(guard))


def _holds_all(optimizer: Any, model: torch.nn.Module) -> bool:
    """Whether the optimizer holds every parameter of the model that gets a gradient."""
    ours = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return all(id(param) in ours for param in model.parameters() if param.requires_grad)


def _checked_now(options: dict[str, Any]) -> dict[str, Any]:
    """The options that can be tried without a model, a file or other processes."""
    for name in ("optimizer", "model"):
        if name in options:
            raise TypeError(f"NanScanCallback takes the options of nanscan.wrap, but {name} is the Trainer's own")
    later = ("log", "process_group", "find_origin")
    return {name: value for name, value in options.items() if name not in later}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _to_json(value: Any) -> Any:
    """The value with its tensors as lists, which `_from_json` turns back, bit for bit."""
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "tensor": value.tolist()}
    if isinstance(value, dict):
        return {key: _to_json(item) for key, item in value.items()}
    return [_to_json(item) for item in value] if isinstance(value, (list, tuple)) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"dtype", "tensor"}:
            return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]), device="cpu")
        return {key: _from_json(item) for key, item in value.items()}
    return [_from_json(item) for item in value] if isinstance(value, list) else value
