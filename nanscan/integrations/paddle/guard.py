"""`wrap` and the guarded optimizer of Paddle: what a dygraph training loop sees."""

from __future__ import annotations

from typing import Any

import paddle

from nanscan import messages
from nanscan.health import health
from nanscan.history import Healthy, History
from nanscan.integrations.paddle import engine
from nanscan.integrations.paddle.names import Names
from nanscan.integrations.paddle.steps import Steps
from nanscan.log import Log, describe_run, open_log
from nanscan.policy import OnNonfinite, Policy
from nanscan.report import StepReport
from nanscan.reporting.settings import settings

__all__ = ["GuardedOptimizer", "wrap"]

_OWN = frozenset({"optimizer", "_guard"})
messages.point_past(paddle)


class GuardedOptimizer(paddle.optimizer.Optimizer):  # type: ignore[misc]
    """A Paddle optimizer that looks before it steps; made by `nanscan.integrations.paddle.wrap`, which documents it.

    It holds the inner one as `.optimizer` and is it in every other respect: methods, attributes and `state_dict()` are
    the inner one's, and what is set on the one is set on the other.
    """

    optimizer: Any
    _guard: Steps

    def __init__(self, optimizer: Any, layer: Any, policy: Policy, log: Log | None) -> None:
        # Not Optimizer.__init__: it would make a second set of parameters and accumulators.
        object.__setattr__(self, "optimizer", optimizer)
        object.__setattr__(self, "_guard", Steps(optimizer, Names(layer), policy))
        self._guard.record.listener = open_log(log)
        self._describe()

    def _describe(self) -> None:
        """For the first line of the log."""
        about = settings(self.optimizer, self._guard.policy)
        clip = getattr(self.optimizer, "_grad_clip", None)
        about["groups"] = [{"lr": self.optimizer.get_lr(), "grad_clip": None if clip is None else str(clip)}]
        describe_run(self._guard.record.listener, {**about, "engine": {"engine": engine.name()}})

    def _update(self, layer: Any, log: Log | None, options: dict[str, Any]) -> None:
        """What a second `wrap` changes."""
        guard = self._guard
        guard.policy = guard.policy.updated(**options)
        if guard.record.history.size != guard.policy.history:
            guard.record.history = guard.record.history.resized(guard.policy.history)
        if layer is not None:
            guard.names = Names(layer)
        if log is not None:
            guard.record.listener = open_log(log)
        self._describe()

    def step(self, closure: Any = None) -> Any:
        """Scan the gradients, then step, clip and step, or not step.

        Raises:
            NonFiniteError: there is a NaN or Inf and `on_nonfinite` says "raise".
            TrainingDiverged: this skip is the `max_consecutive_skips`-th in a row.
        """
        if closure is not None:
            raise NotImplementedError("closures are not guarded with Paddle: call backward(), then step()")
        return self._guard.step(self.optimizer.step)

    def minimize(
        self, loss: Any, startup_program: Any = None, parameters: Any = None, no_grad_set: Any = None
    ) -> tuple[Any, Any]:
        """As `step`, through the inner optimizer's `minimize`; the loss joins the scan. (None, None) when skipped."""
        self._guard.observe(loss)
        result = self._guard.step(
            lambda: self.optimizer.minimize(loss, startup_program, parameters, no_grad_set), parameters
        )
        return (None, None) if result is None else result

    def apply_gradients(self, params_grads: Any) -> Any:
        """As `step`, with these gradients, through the inner optimizer's `apply_gradients`. None where it was skipped.

        Args:
            params_grads: pairs of a parameter and its gradient, such as `backward` returns; they become its `.grad`.
        """
        pairs = [(param, grad) for param, grad in params_grads if grad is not None]
        for param, grad in pairs:
            param.grad = grad
        params = [param for param, _ in pairs]
        return self._guard.step(lambda: self.optimizer.apply_gradients([(p, p.grad) for p in params]), params)

    def observe(self, loss: Any) -> None:
        """Let the loss join the next scan: a NaN or Inf in it counts like one in a gradient, under the name "loss".

        Args:
            loss: a tensor of any shape and floating dtype (unscaled), or a number.

        Raises:
            TypeError: if it is neither.
        """
        self._guard.observe(loss)

    def _set_auxiliary_var(self, key: str, val: Any) -> None:
        # paddle.amp.GradScaler hands its verdict over here, on bad steps too, then calls step() or minimize().
        if key == "found_inf":
            self._guard.found_inf = val
        self.optimizer._set_auxiliary_var(key, val)

    @property
    def step_was_skipped(self) -> bool:
        """True if the last `step()` left weights and accumulators alone (False before the first)."""
        return self._guard.record.skipped_last

    @property
    def last_report(self) -> StepReport | None:
        """The `nanscan.StepReport` of the last `step()`, None before the first."""
        last = self._guard.last
        return last.report() if isinstance(last, Healthy) else last

    @property
    def history(self) -> History:
        """The reports of the last steps, oldest first: a read-only sequence of at most `history` of them."""
        return self._guard.record.history

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped so far."""
        return self._guard.record.skipped

    @property
    def consecutive_skips(self) -> int:
        """How many steps in a row were skipped up to now; a real step sets it to 0."""
        return self._guard.record.consecutive

    @property
    def first_skipped_step(self) -> int | None:
        """Index of the first skipped step (steps count from 0), None if there is none."""
        return self._guard.record.first_skipped

    @property
    def bad_parameter_steps(self) -> int:
        """After how many steps `check_params_every` found a NaN or Inf in the parameters."""
        return self._guard.record.bad_parameter_steps

    def health(self) -> str:
        """The last step and the run so far in one line of ASCII, for a progress bar."""
        return health(self.last_report, self._guard.record.skipped, self._guard.record.last_bad)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # while a copy is being made there is no inner one yet
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.optimizer, name, value)

    def __repr__(self) -> str:
        return f"GuardedOptimizer({self.optimizer!r}, {self._guard.policy!r})"


class _Inner:
    """An attribute of the base class that is the inner optimizer's: it may have its own way of it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, guarded: Any, owner: Any) -> Any:
        return getattr(paddle.optimizer.Optimizer if guarded is None else guarded.optimizer, self.name)


for _name in vars(paddle.optimizer.Optimizer):
    if not _name.startswith("__") and _name not in vars(GuardedOptimizer):
        setattr(GuardedOptimizer, _name, _Inner(_name))


def wrap(
    optimizer: Any,
    layer: Any = None,
    *,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    on_nonfinite: OnNonfinite = "skip",
    max_consecutive_skips: int | None = 20,
    check_params_every: int = 0,
    history: int = 1024,
    log: Log | None = None,
) -> GuardedOptimizer:
    """Guard a Paddle optimizer: scan the gradients once before each step, and skip, clip and report by what was found.

    Use what it returns in place of the optimizer, also for `paddle.amp.GradScaler`. A skipped step leaves parameters
    and accumulators bit-identical, clears the gradients, is counted, named and, once per run of skips, warned about.
    PyTorch is not needed.

    Args:
        optimizer: a `paddle.optimizer.Optimizer`. One that is guarded already is returned itself: options of this call
            that are not at their default replace the present ones, `layer` and `log` likewise.
        layer: gives the parameters their names; its floating-point buffers are looked at when a step is skipped.
            Without it parameters go by Paddle's own `param.name`.
        clip_norm: the largest 2-norm that all gradients together may have, > 0; larger ones are multiplied by
            `clip_norm / (norm + 1e-6)`. None or inf: no clipping. The optimizer's own `ClipGradByGlobalNorm` is
            applied here, in the same pass; where both are given, the smaller limit holds. `ClipGradByNorm` and
            `ClipGradByValue`, and the clips of several parameter groups, stay Paddle's.
        clip_value: elements are clamped to [-clip_value, clip_value] first, > 0; None or inf: not at all.
        on_nonfinite: what to do about a NaN or Inf: `"skip"` the step, `"raise"` a `NonFiniteError` (the gradients are
            left for inspection), `"zero"` the bad elements and step, `"warn"` and step anyway, or a function that gets
            the `StepReport` and returns one of these.
        max_consecutive_skips: so many skipped steps in a row raise `TrainingDiverged`; None: never.
        check_params_every: also scan the parameters after every so many steps; 0: never.
        history: how many step reports are kept in `optimizer.history`.
        log: a path, to which one line of JSON is appended for each step, or a function that gets each `StepReport`.

    Returns:
        The guarded optimizer, a `paddle.optimizer.Optimizer`. Parameters with `need_clip=False` are looked at, but
        neither count for the norm nor are clipped, as in Paddle.

    Raises:
        ValueError: if an option has an invalid value.
        TypeError: if `optimizer` is no optimizer of Paddle, or `layer` no layer.
        NotImplementedError: if the optimizer needs a closure (LBFGS), or Paddle is in static mode.

    >>> layer = paddle.nn.Linear(2, 1)
    >>> optimizer = wrap(paddle.optimizer.AdamW(parameters=layer.parameters()), layer, clip_norm=1.0)
    >>> layer(paddle.ones([3, 2])).sum().backward()
    >>> optimizer.step()
    >>> optimizer.clear_grad()
    >>> optimizer.step_was_skipped, optimizer.last_report.finite, optimizer.last_report.clip_factor < 1
    (False, True, True)
    """
    if not paddle.in_dynamic_mode():
        raise NotImplementedError("a static graph is not guarded, only dygraph is: call paddle.disable_static() first")
    if not isinstance(optimizer, paddle.optimizer.Optimizer):
        kind = type(optimizer)
        hint = " of PyTorch: nanscan.wrap guards it" if kind.__module__.startswith("torch.") else ""
        raise TypeError(f"optimizer must be a paddle.optimizer.Optimizer, got {kind.__name__}{hint}")
    if layer is not None and not isinstance(layer, paddle.nn.Layer):
        raise TypeError(f"layer must be a paddle.nn.Layer or None, got {type(layer).__name__}")
    if isinstance(optimizer, paddle.optimizer.LBFGS):
        raise NotImplementedError("LBFGS evaluates a closure several times in a step, which is not guarded with Paddle")
    options: dict[str, Any] = {
        "clip_norm": clip_norm,
        "clip_value": clip_value,
        "on_nonfinite": on_nonfinite,
        "max_consecutive_skips": max_consecutive_skips,
        "check_params_every": check_params_every,
        "history": history,
    }
    policy = Policy(**options)
    if policy.adaptive is not None:
        raise TypeError("clip_norm must be a number with Paddle: AdaptiveClip works with nanscan.wrap only")
    if isinstance(optimizer, GuardedOptimizer):
        optimizer._update(layer, log, options)
        return optimizer
    return GuardedOptimizer(optimizer, layer, policy, log)
