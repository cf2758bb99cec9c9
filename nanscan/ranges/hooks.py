"""The objects that hang on modules and tensors while they are watched. A copy or pickle of one does nothing."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.compiler import is_compiling

from nanscan.ranges.calls import WatchedCalls, can_be_watched
from nanscan.ranges.compiled import say_that_nothing_is_seen

if TYPE_CHECKING:
    from nanscan.ranges.record import StepRecord
    from nanscan.ranges.recorder import Recorder

__all__ = ["GradientHook", "ModuleHooks", "RootEnd", "RootStart"]


class _Hook:
    """Hangs on a module; a deep-copied or unpickled model is not watched, so its hooks have no recorder."""

    def __init__(self, recorder: Recorder | None = None, name: str = "") -> None:
        self.recorder = recorder
        self.name = name
        self.take = _nothing_to_do if recorder is None else recorder.hook(name)  # the engine's: True if it did all

    def __deepcopy__(self, memo: Any) -> _Hook:
        return type(self)(None, self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None, self.name)


class RootStart(_Hook):
    """Forward pre-hook of the watched model: a step begins."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        if is_compiling():
            if self.recorder is not None:
                say_that_nothing_is_seen()
        elif self.recorder is not None:
            self.recorder.begin(module)


class RootEnd(_Hook):
    """Forward hook of the watched model, also called when it raises; the model's own output comes before the end."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.recorder is not None and not is_compiling():
            if self.name and not self.take(output):
                self.recorder.take(self.name, output)
            self.recorder.end()


class ModuleHook(_Hook):
    """Forward hook of a module; in a watched call, the part that the engine leaves to Python."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not is_compiling() and not self.take(output) and self.recorder is not None:
            self.recorder.take(self.name, output)

    def look_at(self, output: Any) -> None:
        """Take what a watched call's engine left."""
        if not is_compiling() and self.recorder is not None:
            self.recorder.take(self.name, output)


class ModuleHooks:
    """What hangs on all modules, only while it is needed: a module with a hook is slower to call."""

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self._modules = modules
        self._calls: WatchedCalls | None = None
        self._handles: list[Any] = []  # of the modules without a watched call
        self._passing: list[Any] = []  # of hooks that hang until the next forward at most

    def hang(self, recorder: Recorder) -> None:
        """Put them on for a forward."""
        _drop(self._passing)
        if self._calls is None:
            self._calls = self._make(recorder)
        self._passing = self._calls.put_in()

    def _make(self, recorder: Recorder) -> WatchedCalls:
        made = WatchedCalls()
        for name, module in self._modules:
            hook = ModuleHook(recorder, name)
            call = recorder.watched_call(name, module._call_impl, hook.look_at) if can_be_watched(module) else None
            if call is None:
                self._handles.append(module.register_forward_hook(hook))
            else:
                made.add(name, module, call, hook)
        return made

    def rest(self, later: set[str]) -> None:
        """The forward is over: only modules that ran in it without gradients are still looked at."""
        if self._calls is not None:
            self._calls.take_out()
            _drop(self._passing)
            self._passing = list(self._calls.hang_hooks(later)) if later else []

    def remove(self) -> None:
        """Take them off."""
        self.rest(set())
        _drop(self._handles)
        self._calls = None


def _drop(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


class GradientHook:
    """Hook of an output tensor: its gradient belongs to the step in which the tensor was made."""

    __slots__ = ("_name", "_record", "_recorder")

    def __init__(self, recorder: Recorder, record: StepRecord, name: str) -> None:
        self._recorder = weakref.ref(recorder)
        self._record = record
        self._name = name

    def __call__(self, grad: Tensor) -> None:
        recorder = self._recorder()
        if recorder is not None:
            recorder.take_gradient(self._record, self._name, grad)


def _nothing_to_do(_: Any) -> bool:
    return True
