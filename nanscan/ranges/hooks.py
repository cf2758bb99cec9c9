"""The objects that hang on modules and tensors while they are watched. A copy or pickle of one does nothing."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.compiler import is_compiling

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
    """Forward hook of each module."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not is_compiling() and not self.take(output) and self.recorder is not None:
            self.recorder.take(self.name, output)


class ModuleHooks:
    """The hooks of all modules. They hang there only while they are needed: a module with a hook is slower to call."""

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self._modules = modules
        self._handles: list[Any] = []

    def hang(self, recorder: Recorder) -> None:
        """Put them on, if they aren't."""
        if not self._handles:
            self._handles = [m.register_forward_hook(ModuleHook(recorder, name)) for name, m in self._modules]

    def remove(self) -> None:
        """Take them off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


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
