"""What the hooks call: when a step begins, what is measured in it, and what belongs to no step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nanscan import engine
from nanscan.engine.meter import RangeMeter
from nanscan.engine.result import BadInput
from nanscan.ranges import on_cpu, on_device
from nanscan.ranges.hooks import GradientHook, ModuleHooks
from nanscan.ranges.outputs import Seen, elements_of, tensors_in
from nanscan.ranges.record import Key, Ring, StepRecord
from nanscan.reruns import running

__all__ = ["Recorder"]


class Recorder:
    """Measures the steps that are due.

    Args:
        every: which steps are due: those whose number it divides.
        ring: where their records go.
        sample: see `nanscan.watch`.
        hooks: of the modules, which call `take`.
        on_begin, on_end: called before and after the forward of a step that is due.
    """

    def __init__(
        self,
        every: int,
        ring: Ring,
        sample: int | None,
        hooks: ModuleHooks,
        on_begin: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self.steps = 0
        self.closed = False
        self._every = every
        self._ring = ring
        self._sample = sample
        self._hooks = hooks
        self._on_begin = on_begin
        self._on_end = on_end
        self._current: StepRecord | None = None  # the step whose forward was the last one
        self._measuring = False  # its forward is running
        self._depth = 0
        self._without_grad = False  # the last forward in training mode had no gradients: a checkpoint may repeat it
        self._meter = _meter_for(self)
        self._seen: Any = self._meter or Seen()  # which tensors of this step were measured already
        self.keys: list[Key] = []  # of the meter's rows
        self._rows: dict[str, int] = {}  # the first of each module's two
        self._later: set[str] = set()  # modules that ran without gradients inside of a step
        self._handles: list[tuple[bool, Any]] = []

    def begin(self, root: nn.Module) -> None:
        """The watched model is called."""
        self._depth += 1
        if self._depth > 1 or self.closed or not root.training or running():
            return
        if not torch.is_grad_enabled():
            self._without_grad = True
            return
        if _in_backward() and not self._without_grad:  # a checkpoint runs again what was measured already
            return
        self._without_grad = False
        if self._handles or self._later:
            self._forget_tensors(leaves_only=True)
        step, self.steps = self.steps, self.steps + 1
        self._current = None
        if step % self._every:
            self._hooks.remove()
        else:
            self._on_begin()
            self._current = self._begin_record(step)
            self._hooks.hang(self)
            self._measuring = True

    def _begin_record(self, step: int) -> StepRecord:
        if self._meter is None:
            return self._ring.begin(step)
        entries = self._meter.entries()
        record = self._ring.begin(step, self.keys, entries)
        self._meter.begin(record, entries)
        return record

    def end(self) -> None:
        """Its forward is over, well or not."""
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and self._measuring:
            self._measuring = False
            self._hooks.rest(self._later)
            self._end_measuring()
            self._on_end()

    def _end_measuring(self) -> None:
        self._seen.clear()
        if self._meter is not None:
            self._meter.end()

    def hook(self, name: str) -> Callable[[Any], bool]:
        """What takes the outputs of a module first; where it returns False, `take` must.

        It serves plain CPU tensors that are part of a graph; most models have nothing else.
        """
        if self._meter is None or not name:
            return _take_nothing
        return self._meter.hook(self._row(name))

    def watched_call(
        self, name: str, call: Callable[..., Any], other: Callable[[Any], None]
    ) -> Callable[..., Any] | None:
        """A module's call with such a hook in it, and `other` for what it doesn't serve; None: the engine has none."""
        return None if self._meter is None else self._meter.watched_call(self._row(name), call, other)

    def _row(self, name: str) -> int:
        if name not in self._rows:
            self._rows[name] = len(self.keys)
            self.keys += [(name, "activation"), (name, "gradient")]
        return self._rows[name]

    def take(self, name: str, output: Any) -> None:
        """A module returned something."""
        record = self._current
        if record is None:
            return
        if self._measuring:
            for tensor in tensors_in(output):
                if self._seen.is_new(tensor):
                    self._take_activation(record, name, tensor)
        elif name in self._later and _in_backward() and torch.is_grad_enabled():
            for tensor in tensors_in(output):  # the activation was measured; only now there is a graph
                self._hang_on(record, name, tensor)

    def _take_activation(self, record: StepRecord, name: str, tensor: Tensor) -> None:
        values = elements_of(tensor)
        if values is None:
            return
        self._measure(record, name, "activation", values)
        if torch.is_grad_enabled():
            self._hang_on(record, name, tensor)
        else:
            self._later.add(name)

    def _hang_on(self, record: StepRecord, name: str, tensor: Tensor) -> None:
        if tensor.requires_grad:
            handle = tensor.register_hook(GradientHook(self, record, name))  # type: ignore[no-untyped-call]
            self._handles.append((tensor.is_leaf, handle))

    def take_gradient(self, record: StepRecord, name: str, grad: Tensor) -> None:
        """The gradient with respect to what a module returned."""
        if self.closed:
            return
        values = elements_of(grad)
        if values is not None:
            self._measure(record, name, "gradient", values)

    def _measure(self, record: StepRecord, name: str, kind: str, values: Tensor) -> None:
        if values.is_cpu:
            try:
                found = on_cpu.measure(values, self._sample)
            except BadInput:  # memory that was freed or resized
                return
            record.add((name, kind), found)
        elif values.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            record.add((name, kind), on_device.launch(values))

    def close(self) -> None:
        """Measure nothing from now on."""
        self.closed = True
        self._measuring = False
        self._current = None
        self._end_measuring()
        if self._meter is not None:
            self._meter.close()
        self._hooks.remove()
        self._forget_tensors(leaves_only=False)

    def _forget_tensors(self, leaves_only: bool) -> None:
        """Take hooks off tensors. Those of others go with their graph, which may still await its backward."""
        for is_leaf, handle in self._handles:
            if is_leaf or not leaves_only:
                handle.remove()
        self._handles.clear()
        self._later.clear()


def _meter_for(recorder: Recorder) -> RangeMeter | None:
    """The engine's hooks, which do not keep the recorder alive."""
    reference = weakref.ref(recorder)

    def take_other(record: StepRecord, row: int, grad: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive.take_gradient(record, alive.keys[row][0], grad)

    return engine.range_meter(take_other)


def _take_nothing(_: Any) -> bool:
    return False


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
