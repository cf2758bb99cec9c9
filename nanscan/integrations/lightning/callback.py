"""`NanScanCallback`: every optimizer of a Lightning `Trainer` guarded, from the start of `fit` to its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import nanscan
from nanscan.guard import GuardedOptimizer
from nanscan.integrations.lightning.around import AroundSteps
from nanscan.integrations.lightning.clipping import ClipRequests, refuse_two_limits
from nanscan.integrations.lightning.optimizer import lightning_optimizer
from nanscan.integrations.lightning.origin import StepRecorder
from nanscan.integrations.lightning.package import callback_bases
from nanscan.integrations.lightning.setup import check_alone, check_options, check_trainer, is_optimizer, options_for
from nanscan.rng import rng_state, set_rng_state

__all__ = ["NanScanCallback"]


class NanScanCallback(*callback_bases()):  # type: ignore[misc]
    """Guards the optimizers of a `Trainer`, in automatic and in manual optimization.

    Each step looks at the gradients first; see `nanscan.wrap` for what then happens. Where there is one optimizer, the
    losses that backward starts from join the scan (else call `observe(loss)` of what `self.optimizers()` returns).
    Parameters are called as in the `LightningModule`. Clipping that
    Lightning is asked for (`gradient_clip_val`, `self.clip_gradients`) is done by the guard in the same pass, also for
    fused optimizers with a gradient scaler. Under DDP all ranks decide together. Validation, test and prediction are
    not touched.

    Checkpoints hold the optimizers' own states, which load with and without this callback, and beside them the guard's
    state and that of the random numbers, so that a run that is resumed at the end of an epoch
    (`trainer.fit(ckpt_path=...)`) ends with the weights of one that was not interrupted.

    Args:
        log_metrics: log `nanscan/norm`, `nanscan/clip_factor` and `nanscan/skipped_steps` with the Trainer's loggers,
            every `log_every_n_steps`; with several optimizers `nanscan/0/norm` and so on. Default: False.
        hold_schedulers: a scheduler with `interval: "step"` does not advance after a skipped step (in automatic
            optimization). Reading that waits for a GPU. Default: True.
        save_rng: keep the state of the random numbers in the checkpoints of a run with one process. Default: True.
        recovery: go back to the last good state when the run diverges: True, or a dict of options of
            `nanscan.Recovery` such as `{"patience": 3, "snapshot_every": 50}`. For one optimizer; not with
            `on_nonfinite="raise"`, and `max_consecutive_skips` has to be larger than the patience. Default: False.
        options: those of `nanscan.wrap`. A `log` that is a path is written by the first rank, for the second optimizer
            to `run.1.jsonl`. With `find_origin=True` and automatic optimization the whole `training_step` is run
            again on the batch that failed.

    Raises:
        TypeError, ValueError: an option that `nanscan.wrap` does not take, or one that leaves Recovery no turn.

    >>> callback = NanScanCallback(clip_norm=1.0, on_nonfinite="raise")
    >>> callback.optimizers  # of the present `fit`, or of the last one
    []
    """

    def __init__(
        self,
        *,
        log_metrics: bool = False,
        hold_schedulers: bool = True,
        save_rng: bool = True,
        recovery: bool | Mapping[str, Any] = False,
        **options: Any,
    ) -> None:
        self._recovery_options = _options_of(recovery)
        check_options(options, self._recovery_options)
        NanScanCallback.__bases__ = callback_bases()  # the other package may have been imported since
        self.options = options
        self.log_metrics = log_metrics
        self.hold_schedulers = hold_schedulers
        self.save_rng = save_rng
        self.recovery: nanscan.Recovery | None = None
        self._guards: list[GuardedOptimizer] = []
        self._made: list[Any] = []  # Lightning's optimizers around them
        self._clips: ClipRequests | None = None
        self._around: AroundSteps | None = None
        self._recorder: StepRecorder | None = None
        self._loaded: dict[str, Any] = {}
        self._steps = 0  # of the optimizers when Recovery was last told
        self._one_process = True

    @property
    def optimizers(self) -> list[GuardedOptimizer]:
        """The guarded optimizers of the present `fit`, or of the last one, in the order of `configure_optimizers`."""
        return list(self._guards)

    @property
    def optimizer(self) -> GuardedOptimizer:
        """The guarded optimizer of a module that has one.

        Raises:
            RuntimeError: there is none yet, or there are several.
        """
        if len(self._guards) != 1:
            what = (
                "several optimizers: use callback.optimizers" if self._guards else "no optimizer before trainer.fit()"
            )
            raise RuntimeError(f"NanScanCallback has {what}")
        return self._guards[0]

    # ---- from the start of a fit to its end --------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget the state that an earlier `validate` or `fit` has loaded and not used; this one's comes next."""
        self._loaded = {}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Guard the optimizers; Lightning loads a checkpoint's optimizer states after this."""
        check_alone(trainer, NanScanCallback)
        self._close(pl_module)
        self._guards, self._made, self.recovery = [], [], None
        self._one_process = trainer.world_size == 1
        self._install(trainer, pl_module)
        if self.save_rng and self._one_process and "rng" in self._loaded:
            set_rng_state(self._loaded.pop("rng"))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Guard them again if another callback has had new ones made, and begin to look after the run."""
        self._install(trainer, pl_module)
        self._begin_recovery(trainer, pl_module)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave Trainer and module as they were."""
        if stage == "fit":
            self._close(pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave Trainer and module as they were: there is no teardown after an error."""
        self._close(pl_module)

    def _install(self, trainer: Any, pl_module: Any) -> bool:
        """Guard the optimizers that the strategy has at present; False if they are guarded already."""
        strategy = trainer.strategy
        present = [made for made in strategy._lightning_optimizers if is_optimizer(made.optimizer)]
        if len(present) == len(self._made) and all(map(_is, present, self._made)):
            return False
        self._close(pl_module)
        check_trainer(trainer)
        recorded = self.options.get("find_origin") and pl_module.automatic_optimization
        self._guards = []
        for index, optimizer in enumerate(filter(is_optimizer, strategy.optimizers)):
            options = options_for(trainer, self.options, index)
            if recorded:
                options["find_origin"] = False
            self._guards.append(nanscan.wrap(optimizer, pl_module, **options))
        self._load_guards()
        self._take_over_clipping(trainer, pl_module)
        if recorded:
            self._recorder = StepRecorder(trainer, pl_module)
        for guard in self._guards:
            guard._hinted = True  # a training_step that returns None is a step without gradients, and Lightning says so
            if self._recorder is not None:
                guard._recorder = self._recorder
                guard._listen()
                guard._replan()
        assert self._around is not None
        self._made = [
            lightning_optimizer(made, guard, self._around) for made, guard in zip(present, self._guards, strict=True)
        ]
        strategy._lightning_optimizers = list(self._made)
        if self.hold_schedulers:
            self._hold_schedulers(trainer, pl_module)
        return True

    def _take_over_clipping(self, trainer: Any, pl_module: Any) -> None:
        if trainer.gradient_clip_val:
            refuse_two_limits(self._guards[0], f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) is set")
        self._clips = ClipRequests(trainer.precision_plugin, self._guards)
        self._around = AroundSteps(trainer, pl_module, self._guards, self._clips)

    def _close(self, pl_module: Any) -> None:
        if self._clips is not None:
            self._clips.close()
            self._clips = self._around = None
        for guard in self._guards:
            if guard._recorder is not None:
                guard._recorder.close()
                guard._recorder = None
                guard._replan()
        self._recorder = None
        held = vars(pl_module).get("lr_scheduler_step")
        if isinstance(held, _HeldSchedulers):
            del pl_module.lr_scheduler_step

    def _hold_schedulers(self, trainer: Any, pl_module: Any) -> None:
        stepwise = [config.scheduler for config in trainer.lr_scheduler_configs if config.interval == "step"]
        if stepwise and pl_module.automatic_optimization:
            pl_module.lr_scheduler_step = _HeldSchedulers(pl_module.lr_scheduler_step, stepwise, self._guards[0])

    # ---- each batch --------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Guard the optimizers again if a hook has had new ones made, and note the batch for `find_origin`."""
        if self._install(trainer, pl_module):
            self._begin_recovery(trainer, pl_module)
        if self._recorder is not None:
            self._recorder.note(batch, batch_idx)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Let the losses join the scan that the guard does not get from the closure of its step."""
        if self._around is not None:
            self._around.backward(loss)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the metrics and tell Recovery, where that is wished for."""
        if self.log_metrics and not trainer.barebones and trainer._logger_connector.should_update_logs:
            pl_module.log_dict(self._metrics(), on_step=True, on_epoch=False, batch_size=1)
        if self.recovery is not None and trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self.recovery.step(loss=outputs.get("loss") if isinstance(outputs, Mapping) else None)

    def _metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for index, guard in enumerate(self._guards):
            report = guard.last_report
            if report is None:
                continue
            prefix = "nanscan" if len(self._guards) == 1 else f"nanscan/{index}"
            found[f"{prefix}/norm"] = report.norm
            found[f"{prefix}/clip_factor"] = report.clip_factor
            found[f"{prefix}/skipped_steps"] = float(guard.skipped_steps)
        return found

    # ---- checkpoints and recovery ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The guards' state, the random numbers', and Recovery's; tensors, numbers and strings only."""
        if not self._guards:
            return {}
        state: dict[str, Any] = {}
        if hasattr(GuardedOptimizer, "guard_state_dict"):
            state["guards"] = [guard.guard_state_dict() for guard in self._guards]
        if self.save_rng and self._one_process:
            state["rng"] = rng_state()
        if self.recovery is not None:
            state["recovery"] = self.recovery.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until the optimizers are there."""
        self._loaded = dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the options; the run, with its optimizers, stays with this one."""
        run: dict[str, Any] = {"_guards": [], "_made": [], "_clips": None, "_around": None, "_recorder": None}
        attached = ("log", "log_dict")  # methods of the module, by Lightning
        return {name: value for name, value in vars(self).items() if name not in attached} | run | {"recovery": None}

    def _load_guards(self) -> None:
        states = self._loaded.pop("guards", None)
        if states is not None and hasattr(GuardedOptimizer, "load_guard_state_dict"):
            for guard, state in zip(self._guards, states, strict=False):
                guard.load_guard_state_dict(state)

    def _begin_recovery(self, trainer: Any, pl_module: Any) -> None:
        options = self._recovery_options
        if options is None or not self._guards:
            return
        if len(self._guards) != 1:
            raise ValueError(f"NanScanCallback(recovery=...) is for one optimizer, this module has {len(self._guards)}")
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.recovery = nanscan.Recovery(pl_module, self._guards[0], scheduler=schedulers, scaler=scaler, **options)
        self._steps = trainer.global_step
        if "recovery" in self._loaded:
            self.recovery.load_state_dict(self._loaded.pop("recovery"))


class _HeldSchedulers:
    """Stands for the module's `lr_scheduler_step`: leaves it out after a skipped step.

    Args:
        step: the module's own.
        stepwise: the schedulers that advance with the steps.
        guard: the one optimizer of automatic optimization.
    """

    def __init__(self, step: Any, stepwise: list[Any], guard: GuardedOptimizer) -> None:
        self._step = step
        self._stepwise = stepwise
        self._guard = guard

    def __call__(self, scheduler: Any, metric: Any) -> None:
        if metric is None and any(scheduler is one for one in self._stepwise) and self._guard.step_was_skipped:
            return
        self._step(scheduler, metric)


def _options_of(recovery: bool | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The options of Recovery, None where there is to be none."""
    if isinstance(recovery, Mapping):
        return recovery
    return {} if recovery else None


def _is(first: Any, second: Any) -> bool:
    return first is second
