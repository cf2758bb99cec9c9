"""`wrap` and the guarded optimizer: what a training loop sees."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from nanscan import messages, wrappers
from nanscan.checks import lost_eps
from nanscan.clipping import AdaptiveClip
from nanscan.clipping.state import guard_state, load_guard_state
from nanscan.copies import Copies
from nanscan.distributed import agreement_over, numbered
from nanscan.distributed.refusals import refuse_sharded
from nanscan.engine.shards import is_dtensor
from nanscan.engine.tensors import flat_params
from nanscan.health import health
from nanscan.history import Healthy, History, Record
from nanscan.log import Log, describe_run, open_log
from nanscan.names import Names
from nanscan.paddle_objects import is_optimizer
from nanscan.policy import OnNonfinite, OnSpike, Policy
from nanscan.report import StepReport
from nanscan.reporting.settings import settings

__all__ = ["GuardedOptimizer", "wrap"]

_NOT_FORWARDED = frozenset({"optimizer", "grad_scale", "found_inf"})


class GuardedOptimizer(Copies):
    """An optimizer that looks before it steps; made by `nanscan.wrap`, which documents it.

    It holds the inner one as `.optimizer` and shows its live `param_groups`, `state` and `defaults`; attributes it
    does not know come from there too. Hooks are the inner one's: a step hook runs once for each real step, never for
    a skipped one, and is handed the inner optimizer. `state_dict()` is the inner one's, unchanged.

    It can be pickled and deep-copied: counters, options, the history without its per-tensor tables, the parameters'
    names and the inner optimizer's own attributes go along, as far as they can be pickled; the model does not (unless
    `copy.deepcopy` copies it in the same call) and a log given as a path is opened again. `nanscan.wrap(copy, model)`
    gives it a model once more.

    >>> import torch, nanscan
    >>> optimizer = nanscan.wrap(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1))
    >>> optimizer.skipped_steps, optimizer.param_groups is optimizer.optimizer.param_groups
    (0, True)
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module | None = None,
        policy: Policy | None = None,
        log: Log | None = None,
        process_group: Any = None,
        find_origin: bool = False,
    ) -> None:
        super().__init__(optimizer, Names(model), Record(), policy or Policy())
        self._record_forwards(find_origin)
        self._agree_over(process_group)
        self._listen(log)
        self._warn_about_eps()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        wrappers.show_the_guard(cls)

    def _listen(self, log: Log | None = None) -> None:
        if log is not None:
            self._record.listener = open_log(log)
            self._replan()
        about = settings(self.optimizer, self.policy, find_origin=self._recorder is not None)
        describe_run(self._record.listener, about)

    def _agree_over(self, process_group: Any) -> None:
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._sharded = any(is_dtensor(p) for p in params)
        found = agreement_over(process_group, self.optimizer, params, self.model)
        self._agreement = numbered(found, self._agreement)
        self._group_given = process_group
        self._replan()

    def _record_forwards(self, wanted: bool) -> None:
        """Follow the model's forward from now on, so that a failing one can be run again."""
        if not wanted:
            return
        if self.model is None:
            raise ValueError(
                "find_origin=True needs the model, whose forward it runs again: "
                "nanscan.wrap(optimizer, model, find_origin=True)"
            )
        instead = "leave find_origin out, and put nanscan.trace() around the failing forward and backward"
        refuse_sharded(flat_params(self.optimizer.param_groups), "find_origin=True", instead)
        from nanscan.origin.recorder import Recorder

        if self._recorder is not None:
            self._recorder.close()
        self._recorder = Recorder(self.model, self)
        self._replan()

    def _warn_about_eps(self) -> None:
        for name, eps in lost_eps(self.optimizer, self._names):
            messages.warn(messages.lost_eps(name, eps))

    def _update(
        self,
        model: nn.Module | None,
        log: Log | None,
        process_group: Any,
        find_origin: bool,
        options: dict[str, Any],
    ) -> None:
        """What a second `wrap` changes."""
        self._settle(wait=True)
        policy, log = self.policy.updated(**options), open_log(log)  # what they refuse changes nothing
        former = self._names
        if model is not None:
            self._names = Names(model)
        try:
            self._set_policy(policy)
        except ValueError:
            self._names = former
            raise
        self._record_forwards(find_origin or (model is not None and self._recorder is not None))
        if process_group is not None or (model is not None and self._group_given is None):
            self._agree_over(process_group)
        self._listen(log)
        self._warn_about_eps()

    def observe(self, loss: Tensor | float) -> None:
        """Let the loss join the next scan: a NaN or Inf in it counts like one in a gradient, under the name "loss".

        Gradients don't show every bad loss: where all targets are ignored the loss is NaN and the gradients are 0.

        Args:
            loss: a tensor of any shape and floating dtype (unscaled), or a number. Called more than once before a step
                (gradient accumulation), all of them join, as "loss[0]", "loss[1]", ….

        Raises:
            TypeError: if it is neither.

        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = wrap(torch.optim.SGD([weight], lr=1.0), on_nonfinite="raise")
        >>> weight.grad = torch.zeros(2)
        >>> optimizer.observe(float("nan"))
        >>> optimizer.step()
        Traceback (most recent call last):
        ...
        nanscan.errors.NonFiniteError: nanscan: step 0 not taken: loss has 1 NaN, 0 Inf of 1 (first at []). Weights ...
        """
        super().observe(loss)

    @property
    def step_was_skipped(self) -> bool:
        """True if the last `step()` left weights and optimizer state alone (False before the first)."""
        self._settle(wait=True)
        return self._record.skipped_last

    @property
    def last_report(self) -> StepReport | None:
        """The `StepReport` of the last `step()`, None before the first. On CUDA its fields are waited for when read."""
        last = self._last
        if not isinstance(last, Healthy):
            return last
        history = self._record.history  # nothing is set here: `self` may be Lightning's wrapper, which borrows methods
        return history[-1] if len(history) and history[-1].step == last.step else last.report()

    @property
    def history(self) -> History:
        """The reports of the last steps, oldest first: a read-only sequence of at most `history` of them."""
        self._settle(wait=True)
        return self._record.history

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped so far."""
        self._settle(wait=True)
        return self._record.skipped

    @property
    def consecutive_skips(self) -> int:
        """How many steps in a row were skipped up to now; a real step sets it to 0."""
        self._settle(wait=True)
        return self._record.consecutive

    @property
    def first_skipped_step(self) -> int | None:
        """Index of the first skipped step (steps count from 0), None if there is none."""
        self._settle(wait=True)
        return self._record.first_skipped

    @property
    def bad_parameter_steps(self) -> int:
        """After how many steps `check_params_every` found a NaN or Inf in the parameters."""
        self._settle(wait=True)
        return self._record.bad_parameter_steps

    @property
    def spikes(self) -> int:
        """How many steps were a spike so far, of the norm or the loss; looked for where `on_spike` is given."""
        self._settle(wait=True)
        return self._record.spikes

    def health(self) -> str:
        """The last step and the run so far in one line of ASCII, for a progress bar; on CUDA it waits for the step.

        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = wrap(torch.optim.SGD([{"params": [weight], "param_names": ["weight"]}]), clip_norm=1.0)
        >>> optimizer.observe(2.5)
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> optimizer.step()
        >>> optimizer.health()
        'step 0  norm 5  loss 2.5  clipped x0.2  none skipped'
        """
        self._settle(wait=True)
        return health(self.last_report, self._record.skipped, self._record.last_bad, self._record.dropped)

    @property
    def model(self) -> nn.Module | None:
        """The model that gives the names and whose buffers are looked at; None if none was given."""
        return self._names.model

    # ---- the inner optimizer shows through ---------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The inner optimizer's `zero_grad`. Micro-batches that were checked and not stepped with are forgotten."""
        if self._window is not None:
            self._end_window()
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer; its parameters are scanned and named from the next step on."""
        self.optimizer.add_param_group(param_group)
        if self._group_given is None or any(is_dtensor(p) for p in self.param_groups[-1]["params"]):
            self._agree_over(self._group_given)

    def guard_state_dict(self) -> dict[str, Any]:
        """What the guard itself remembers, as plain data and tensors that `torch.load(weights_only=True)` opens.

        That is the counters, the history of an `AdaptiveClip` and that of `on_spike`: with it a resumed run goes on
        with the same limits, bit for bit. `CheckpointManager` saves and restores it by itself.

        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = wrap(torch.optim.SGD([weight]), clip_norm=AdaptiveClip("autoclip"))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> optimizer.step()
        >>> optimizer.guard_state_dict()["clip"]["norms"]
        tensor([5.], dtype=torch.float64)
        """
        return guard_state(self)

    def load_guard_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another guard has remembered; all of it or, after an exception, nothing.

        Args:
            state: from `guard_state_dict()`. What this optimizer does not use is left out, with a warning; what it
                uses and the state lacks stays as it is.

        Raises:
            TypeError: if `state` is no dict.
            ValueError: if it is not from `guard_state_dict()`, of a newer nanscan, or of another rule's `AdaptiveClip`.
        """
        load_guard_state(self, state)

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_FORWARDED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        wrappers.notice_question(self.optimizer, name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"GuardedOptimizer({self.optimizer!r}, {self.policy!r})"


def wrap(
    optimizer: torch.optim.Optimizer,
    model: nn.Module | None = None,
    *,
    clip_norm: float | AdaptiveClip | None = None,
    clip_value: float | None = None,
    on_nonfinite: OnNonfinite = "skip",
    max_consecutive_skips: int | None = 20,
    check_params_every: int = 0,
    find_origin: bool = False,
    history: int = 1024,
    log: Log | None = None,
    process_group: Any = None,
    on_spike: OnSpike | None = None,
    spike_sigma: float = 6.0,
) -> GuardedOptimizer:
    """Guard an optimizer: scan the gradients once before each step, and skip, clip and report by what was found.

    Use what it returns in place of the optimizer, also for schedulers and `torch.amp.GradScaler`. A healthy step costs
    one read of the gradients. A skipped one leaves parameters, optimizer state and step counts bit-identical, clears
    the gradients as `zero_grad(set_to_none=True)` would, is counted, named and, once per run of skips, warned about.

    Args:
        optimizer: any `torch.optim.Optimizer`. One that is guarded already is returned itself, not wrapped again:
            options of this call that are not at their default replace the present ones, `model` and `log` likewise.
        model: gives the parameters their names; its floating-point buffers are looked at when a step is skipped (the
            forward pass may have poisoned BatchNorm's running statistics). Without it names come from the optimizer's
            named groups, else from the position: `"group0.param3"`.
        clip_norm: the largest 2-norm that all gradients together may have, > 0; larger ones are multiplied by
            `clip_norm / (norm + 1e-6)` (as in `torch.nn.utils.clip_grad_norm_`). None or inf: no clipping. Or an
            `AdaptiveClip`, whose limit follows the run.
        clip_value: elements are clamped to [-clip_value, clip_value] first, > 0; None or inf: not at all.
        on_nonfinite: what to do about a NaN or Inf: `"skip"` the step, `"raise"` a `NonFiniteError` (the gradients are
            left for inspection), `"zero"` the bad elements and step, `"warn"` and step anyway, or a function that gets
            the `StepReport` and returns one of these.
        max_consecutive_skips: so many skipped steps in a row raise `TrainingDiverged`; None: never.
        check_params_every: also scan parameters and optimizer state after every so many steps: finite gradients can put
            a NaN or Inf there (float16 Adam whose eps is 0, a huge gradient's square). The step can't be undone: what
            is bad is named, counted in `bad_parameter_steps`, and warned about or raised. 0: never.
        find_origin: on the first bad step of a run, run the model's forward and backward again under
            `nanscan.trace` and say in the report, the log and the warning which op made the NaN or Inf, and on which
            line. Needs `model`. While all is well it keeps references to the inputs of the last forwards (up to 8 since
            the last step) and the generator's state: some microseconds a step. The loss function can't be run again;
            where it is at fault, the origin says so, `observe(loss)` adds what its graph is made of, and what runs
            after the forward is traced until the next bad step has named the op (200 forwards at most). On CUDA the
            host then decides each step.
        history: how many step reports are kept in `optimizer.history`.
        log: a path, to which one line of JSON is appended for each step, a function that gets each `StepReport` (such
            as `nanscan.integrations.tensorboard.TensorBoardLog`), or a list of these. What a function raises, `step`
            raises, after all else is done.
        on_spike: what to do about a spike, which comes before most NaNs: a norm, or a loss given to `observe`, more
            than `spike_sigma` standard deviations above its recent history (an exponential mean over about 50 steps;
            of the logarithm, where values are positive; the first 30 steps are not judged). `"warn"` once per run of
            spikes, `"clip"` (the norm is held to that limit), `"skip"` the step, which counts for
            `max_consecutive_skips` too. Ten spikes in a row are a new level: the history begins again. None: spikes
            are not looked for. With it the host decides each step.
        spike_sigma: in standard deviations, > 0.
        process_group: whose ranks share what they found before any of them acts, so that all skip, raise or step
            together and clip by the same factor. None: set up by itself for DTensors (FSDP2, tensor parallel),
            `ZeroRedundancyOptimizer`, and a `model` in DistributedDataParallel. A `torch.distributed.ProcessGroup`, or
            True or "default" for the default group: also for other layouts (a pipeline). False: each decides alone.

    Returns:
        The guarded optimizer. `step_was_skipped`, `last_report`, `history`, `skipped_steps`, `consecutive_skips` and
        `first_skipped_step` say what happened.

    Raises:
        ValueError: if an option has an invalid value (`clip_norm` or `clip_value` 0, negative or NaN among them).
        TypeError: if `optimizer` is no optimizer, `model` no module, or an option has the wrong type.
        NotImplementedError: for FSDP1 without `process_group=False`; for DTensors with `find_origin`.
        OSError: if `log` is a path that can't be written.

    With a fused optimizer whose parameters are on one CUDA device and `on_nonfinite="skip"`, the device decides and
    the host never waits for it: counters, warnings and the log follow when the answer arrives, at the latest when they
    are read, `TrainingDiverged` is raised by the next `step()`, and a skip sets the gradients to 0 instead of None.
    Step hooks, a `clip_value`, a closure that may run several times or a `process_group` bring the decision back to the
    host.

    With several ranks a step makes one small collective (an all_reduce of 5 numbers and 2 for each rank), also a good
    one; after the first, none where DDP has made the gradients equal (unless a loss was observed). Every rank must call
    `step()` equally often. The norm counts each logical element once; bad rows, the same on every rank, say their
    `rank` (None: all that hold it) and the index in the whole tensor. docs/distributed.md says what else is shared, on
    bad steps and at the first.
    Copies and pickles leave the group out, with a warning.

    >>> import torch, nanscan
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = nanscan.wrap(torch.optim.AdamW(model.parameters()), model, clip_norm=1.0)
    >>> model(torch.ones(3, 2)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.step_was_skipped, optimizer.last_report.finite, optimizer.last_report.clip_factor < 1
    (False, True, True)
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
            + (" of Paddle: nanscan.integrations.paddle.wrap guards it" if is_optimizer(optimizer) else "")
        )
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module or None, got {type(model).__name__}")
    model = wrappers.forward_module(model)
    options: dict[str, Any] = {
        "clip_norm": clip_norm,
        "clip_value": clip_value,
        "on_nonfinite": on_nonfinite,
        "max_consecutive_skips": max_consecutive_skips,
        "check_params_every": check_params_every,
        "history": history,
        "on_spike": on_spike,
        "spike_sigma": spike_sigma,
    }
    if isinstance(optimizer, GuardedOptimizer):
        optimizer._update(model, log, process_group, find_origin, options)
        return optimizer
    accelerated = type(optimizer).__module__.startswith("accelerate.")
    if not accelerated and wrappers.derived_kind(type(optimizer)) is None:
        return GuardedOptimizer(optimizer, model, Policy(**options), log, process_group, find_origin)
    inside = importlib.import_module("nanscan.integrations.accelerate" if accelerated else "nanscan.wrappers")
    inner: Any = optimizer.optimizer  # type: ignore[attr-defined]
    guard = GuardedOptimizer(inner, model, Policy(**options), log, process_group, find_origin)
    return inside.guard_inside(optimizer, guard)  # type: ignore[no-any-return]
