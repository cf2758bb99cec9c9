"""`wrap(find_origin=True)`: what is needed to run a failing step again, kept as references while all is well.

A hook before the forward of the model notes its inputs, the generators and autocast; a hook after it keeps the output
and has it retain its gradient. Nothing is copied but 5 kB of generator state, and all is let go of at the next forward.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from nanscan import messages
from nanscan.names import unwrapped
from nanscan.origin.between import LossTrace
from nanscan.origin.dispatch import unseen
from nanscan.origin.frames import Place, place_of, source_of
from nanscan.origin.loss import beside_origin, loss_nodes, loss_origin
from nanscan.origin.ops import tensors_in
from nanscan.origin.ranges import bad_counts
from nanscan.origin.record import Origin
from nanscan.origin.replay import find_origin

__all__ = ["Recorder"]

MAX_CALLS = 8  # forwards between two steps (micro-batches) whose inputs are kept

_any_autocast: Any = torch._C._is_any_autocast_enabled


@dataclass(slots=True)
class Recorded:
    """One call of the model's forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rng: list[Any]
    autocast: tuple[Any, ...]
    grad_enabled: bool
    versions: list[int]
    place: Place  # where the user called it
    outputs: list[Tensor] = field(default_factory=list)

    @property
    def gradients(self) -> dict[int, Tensor]:
        """What backward brought for each output."""
        return {i: t.grad for i, t in enumerate(self.outputs) if t.requires_grad and t.grad is not None}


class Recorder:
    """Follows the calls of a model's forward, and replays them when a step went wrong.

    Args:
        model: its forward is followed from now on, until `close` or until the guard is gone. None: it does nothing, as
            in copies and pickles of the model.
        guard: its step count tells the calls of one step from those of the next.
    """

    def __init__(self, model: nn.Module | None = None, guard: Any = None) -> None:
        self.model = model
        self._guard: Any = None if guard is None else weakref.ref(guard)
        self._step = -1  # that the kept calls belong to
        self._calls: deque[Recorded] = deque(maxlen=MAX_CALLS)
        self._dropped = False  # there were more
        self._told = False  # that the model is not the one that is called
        self._replaying = False
        self._losses: list[Tensor] = []
        self.loss_trace = LossTrace()
        self._handles: list[Any] = []
        if model is not None:
            self._handles = [
                model.register_forward_pre_hook(self._before, with_kwargs=True),
                model.register_forward_hook(self._after),
            ]

    def __reduce__(self) -> tuple[Any, ...]:
        return Recorder, ()

    def close(self) -> None:
        """Stop following."""
        for handle in self._handles:
            handle.remove()
        self._calls.clear()
        self._losses.clear()
        self.loss_trace.end()
        self._guard = None

    def observe(self, loss: Tensor) -> None:
        """A loss of this step, with its graph; let go of at the next forward."""
        self._losses.append(loss)

    # ---- while all is well -------------------------------------------------------------------------------------------

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._replaying or self._guard is None or torch.compiler.is_compiling():
            return
        guard = self._guard()
        if guard is None:
            return self.close()
        if self.loss_trace.active:
            self.loss_trace.end()
        if guard._steps != self._step:
            self._step = guard._steps
            self._forget()
        rng = [torch.default_generator.get_state()]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            rng += [generator.get_state() for generator in torch.cuda.default_generators]
        autocast = _autocast() if _any_autocast() else ()
        versions = [t._version for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and not t.is_inference()]
        place = place_of(sys._getframe(1))
        self._dropped = len(self._calls) == MAX_CALLS
        self._calls.append(Recorded(args, kwargs, rng, autocast, torch.is_grad_enabled(), versions, place))

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._replaying or torch.compiler.is_compiling() or not self._calls:
            return
        call = self._calls[-1]
        call.outputs = [output] if type(output) is Tensor else list(_outputs(output))
        for tensor in call.outputs:
            if tensor.requires_grad:
                tensor.retain_grad()  # half the price of a hook in Python
        if self.loss_trace.armed:
            self.loss_trace.begin(model)

    # ---- when a step went wrong --------------------------------------------------------------------------------------

    def look(self) -> Origin | None:
        """Replay the calls since the last step, oldest first, until one of them makes a NaN or Inf."""
        traced = self.loss_trace.take()
        if traced is not None:
            return traced
        self._replaying = True
        try:
            if not self._called():
                return None
            for call in self._calls:
                origin = self._replay(call)
                if origin is not None:
                    return origin
            return self._of_the_loss()
        finally:
            self._replaying = False

    def _called(self) -> bool:
        """Whether the model was called since the last step: else there is nothing to run again, which is said once."""
        guard = None if self._guard is None else self._guard()
        if guard is not None and guard._steps > self._step + 1:  # the step at hand is counted already
            self._forget()
        if self._calls or self._told:
            return bool(self._calls)
        self._told = True
        messages.warn(
            "nanscan: find_origin=True runs the forward of the model that wrap was given once more, and since the last "
            "step it was not called (a part of it was, or a compiled region). Give wrap the module that you call, or "
            "put `with nanscan.trace(model):` around a step. (This is said once.)"
        )
        return False

    def _forget(self) -> None:
        self._calls.clear()
        self._losses.clear()
        self._dropped = False

    def _replay(self, call: Recorded) -> Origin | None:
        assert self.model is not None
        model = unwrapped(self.model)

        def run() -> None:
            torch.default_generator.set_state(call.rng[0])
            for generator, state in zip(torch.cuda.default_generators, call.rng[1:], strict=False):
                generator.set_state(state)
            with torch.set_grad_enabled(call.grad_enabled), _autocast_as(call.autocast):
                outputs = list(_outputs(model(*call.args, **call.kwargs)))
                _read_nan(outputs)
            pairs = [(outputs[i], g) for i, g in call.gradients.items() if i < len(outputs) and _finite(g)]
            if pairs:
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])

        try:
            origin = find_origin(run, model)
        except NotImplementedError:  # shards are alive somewhere in the program: the step is judged without an origin
            return None
        if origin is not None and _versions(call) != call.versions:
            note = "an input was changed in place after the forward pass: the replay may differ from it"
            origin = replace(origin, note=note if origin.note is None else f"{origin.note}; {note}")
        return None if origin is None else _placed(origin, call.place, place_of(sys._getframe()))

    def _of_the_loss(self) -> Origin | None:
        """The model is fine: then what came between its output and the gradient of it."""
        bad = next((g for call in self._calls for g in call.gradients.values() if not _finite(g)), None)
        loss = next((t for t in self._losses if not _finite(t)), None)
        self.loss_trace.arm()  # also where it asks for gradients of its own: a gradient penalty
        if bad is None and loss is None:
            return beside_origin(self.model, MAX_CALLS if self._dropped else 0)
        masked = next((t for call in self._calls for t in call.outputs if not _finite(t)), None)
        return loss_origin(loss, bad, loss_nodes(loss) if loss is not None else [], masked)


def _placed(origin: Origin, forward: Place, replay: Place) -> Origin:
    """The origin at the user's call of the model, where no frame of the user's lay between the replay and the op."""
    here = source_of(replay.code, replay.offset)
    if (origin.file, origin.line) != (here.file, here.line):
        return origin
    there = source_of(forward.code, forward.offset)
    return replace(origin, file=there.file, line=there.line, code=there.code)


def _outputs(output: Any) -> Iterator[Tensor]:
    """The tensors in what a forward returned, also in the dict-like outputs of model libraries."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        yield from tensors_in(list(output.values()))
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _outputs(item)
    elif hasattr(output, "__dataclass_fields__"):
        yield from tensors_in([getattr(output, name) for name in output.__dataclass_fields__])


def _read_nan(outputs: list[Tensor]) -> None:
    """Have an op read what is NaN: where no traced op made it (numpy, a kernel of its own), only a reader tells."""
    for output in outputs:
        with unseen():
            nan = bad_counts(output)[0] > 0
        if nan:
            output.clone()


def _versions(call: Recorded) -> list[int]:
    values = (*call.args, *call.kwargs.values())
    return [t._version for t in values if isinstance(t, Tensor) and not t.is_inference()]


def _finite(tensor: Tensor) -> bool:
    return bad_counts(tensor.detach()) == (0, 0)


def _autocast() -> tuple[Any, ...]:
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return tuple(
        (device, torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled())
        for device in devices
        if torch.is_autocast_enabled(device)
    )


@contextlib.contextmanager
def _autocast_as(states: tuple[Any, ...]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device, dtype, cache in states:
            stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=cache))
        yield
