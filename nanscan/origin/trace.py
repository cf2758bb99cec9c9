"""`nanscan.trace`: a piece of a program under which the op that makes the first NaN or Inf is found."""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from nanscan import messages
from nanscan.errors import NonFiniteError
from nanscan.origin.backward import GraphWatch, install, uninstall
from nanscan.origin.dispatch import OpMode
from nanscan.origin.judge import Judge
from nanscan.origin.keep import Keeper
from nanscan.origin.modules import ModuleStack, is_compiled
from nanscan.origin.record import Origin
from nanscan.origin.torch_private import enter, leave

__all__ = ["Trace", "trace"]


class Trace:
    """What `nanscan.trace` returns; made by it, see there.

    Attributes:
        origin: where the first NaN or Inf was made, None if there was none.
        origins: all that were found, first in time first; later ones may be consequences.
    """

    def __init__(
        self, model: nn.Module | None = None, on_origin: str = "record", *, keeper: Keeper | None = None
    ) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module or None, got {type(model).__name__}")
        if on_origin not in ("record", "raise"):
            raise ValueError(f"on_origin must be 'record' or 'raise', got {on_origin!r}")
        self._model = model
        self._raises = on_origin == "raise"
        self._keeper = keeper
        self._used = False
        self._origins: list[Origin] = []
        self._mode: OpMode | None = None
        self._stance: Any = None

    @property
    def origin(self) -> Origin | None:
        """Where the first NaN or Inf was made, None if there was none (so far)."""
        found = self.origins
        return found[0] if found else None

    @property
    def origins(self) -> list[Origin]:
        """Every op that made a NaN or Inf, first in time first."""
        if self._mode is not None:
            self._mode.flush()
            return self._mode.judge.origins()
        return list(self._origins)

    def __enter__(self) -> Trace:
        if self._used:
            raise RuntimeError("a trace runs once: make another one with nanscan.trace()")
        self._used = True
        modules = ModuleStack(self._model)
        self._mode = mode = OpMode(Judge(modules), modules, self._keeper)
        self._watch = GraphWatch(mode.judge, mode)
        if self._raises:
            mode.found = self._raise_found
        self._compiled = is_compiled(self._model)
        self._stance = _force_eager()
        modules.enter()
        install(self._watch)
        enter(mode)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        mode = self._mode
        assert mode is not None
        mode.found = lambda: None
        leave(mode)
        uninstall(self._watch)
        compiled = self._compiled or mode.modules.compiled
        try:
            mode.flush()
            mode.judge.settle()
            self._origins = mode.judge.origins()
        finally:
            self._close(mode)
        if compiled:
            messages.warn(_COMPILED, UserWarning)
        if self._raises and self._origins and error is None:
            raise _error(self._origins)

    def _close(self, mode: OpMode) -> None:
        """Let go of every tensor, module and frame."""
        self._mode = self._model = self._keeper = None
        mode.modules.exit()
        mode.judge.forget()
        mode.calls.clear()
        del self._watch
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None

    def _raise_found(self) -> None:
        assert self._mode is not None
        origins = self._mode.judge.origins()
        if origins:
            raise _error(origins)


def trace(model: nn.Module | None = None, on_origin: Literal["record", "raise"] = "record") -> Trace:
    """Find the op that makes the first NaN or Inf in what runs inside the `with`, in forward and in backward.

    Found is the op that *made* it, as against those that passed it on: its inputs were finite and its output is not.
    A NaN always counts. An Inf counts if an op made it out of finite numbers and it then did harm (became NaN, the
    loss, or a bad gradient) or was left as a result; the -inf of a mask or of padding does not, unless it reaches the
    loss. In backward a node of the autograd graph is judged by its gradients, counts if a bad one reaches a leaf, and
    is named with the forward line that recorded it.

    Nothing that is computed changes, to the last bit, and no random number is drawn. After the `with` no tensor of it
    is kept.

    Args:
        model: gives dotted module paths and parameter names; without it paths start at the outermost module called,
            under its class name.
        on_origin: `"record"`, or `"raise"` a `NonFiniteError` as soon as something is found (ops are scanned in
            batches, so that can be some ops later); its `.origin` says what.

    Returns:
        A context manager with `.origin` (an `Origin` or None) and `.origins`.

    Raises:
        NonFiniteError: with `on_origin="raise"`.
        TypeError: if `model` is no module.
        ValueError: if `on_origin` is none of the two.

    What `torch.compile` made is run eagerly inside the `with`, and a warning says so.

    >>> import torch, nanscan
    >>> with nanscan.trace() as t:
    ...     y = (torch.tensor([0.0, 1.0]).log() * 0).sum()
    >>> t.origin.op, t.origin.kind, t.origin.inputs[0].value_at
    ('aten.log', 'inf', 0.0)
    """
    return Trace(model, on_origin)


_COMPILED = (
    "nanscan.trace: a torch.compile'd model was called; it was run, and traced, as the eager model that it was made "
    "from. A NaN that only the compiled code makes would not be found."
)


def _error(origins: list[Origin]) -> NonFiniteError:
    error = NonFiniteError(f"nanscan: {origins[0].describe()}")
    error.origin = origins[0]
    return error


def _force_eager() -> Any:
    """Have compiled functions run eagerly, where there can be any; None where there can't."""
    if "torch._dynamo" not in sys.modules:
        return None
    with contextlib.suppress(AttributeError, RuntimeError):
        stance = torch.compiler.set_stance("force_eager")
        stance.__enter__()
        return stance
    return None
