"""Sees every op of the one forward and backward pass, and hands it to those who judge."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

from nanscan.origin.frames import place_of, source_of
from nanscan.origin.modules import ModuleStack, storage_key
from nanscan.origin.ops import Kind, kind_of, tensors_in
from nanscan.origin.torch_private import enter, leave
from nanscan.preflight_checks.activations import Activations
from nanscan.preflight_checks.codes import found
from nanscan.preflight_checks.finding import Finding
from nanscan.preflight_checks.indices import LOOKUPS, OutOfRange, out_of_range
from nanscan.preflight_checks.keeping import Kept
from nanscan.preflight_checks.losses import LossOps
from nanscan.preflight_checks.prone import JUDGES, MAKERS, Makers

__all__ = ["Watch"]

_ATTENTION = "_scaled_dot_product"
_TORCH_NN = str(Path(nn.__file__).parent) + os.sep  # PyTorch's own layers and losses know what they divide by
_kinds: dict[Any, Kind] = {}


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The ops of a pass.

    Args:
        model: gives module paths.
        kept: is told of memory before it is overwritten.
    """

    def __init__(self, model: nn.Module, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept
        self.losses = LossOps()
        self.activations = Activations()
        self.judging = True  # in forward
        self.attention = False
        self._modules = ModuleStack(model)
        self._own = {id(module) for module in model.modules()}
        self._makers = Makers()
        self._prone: dict[tuple[str, str | None, int | None, str], Finding] = {}
        self._hook: Any = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def start(self) -> None:
        """Follow modules and ops."""
        self._hook = register_module_forward_hook(self._returned)
        self._modules.enter()
        enter(self)

    def stop(self) -> None:
        """Follow them no more."""
        leave(self)
        self._modules.exit()
        self._hook.remove()

    def findings(self) -> list[Finding]:
        """What the ops told."""
        return [*self.losses.findings(), *self.activations.findings(), *self._prone.values()]

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.judging and id(module) in self._own:
            self.activations.layer(self._modules.path(module) or "model", module, output)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = _kinds.get(func)
        if kind is None:
            kind = _kinds[func] = kind_of(func)
        if kind.writes or kind.writes_named or kind.statistics:
            statistics = [args[i] for i in kind.statistics if i < len(args) and isinstance(args[i], Tensor)]
            self.kept.before_write([*kind.written(args, kwargs), *statistics])
        name = str(func._schema.name).rpartition("::")[2]
        frame = sys._getframe(1)
        if self.judging and name in JUDGES and not frame.f_code.co_filename.startswith(_TORCH_NN):
            self._judge(name, args, frame)
        if name in LOOKUPS:
            self._look_up(name, args)
        out = func(*args, **kwargs)
        self._made(args, kwargs, out)
        if self.judging:
            self._after(name, args, out)
        return out

    def _look_up(self, name: str, args: Sequence[Any]) -> None:
        finding = out_of_range(name, args, self._path() or "loss")
        if finding is not None:
            raise OutOfRange(finding)

    def _made(self, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        given = {storage_key(t) for t in tensors_in([*args, *kwargs.values()])}
        self.kept.made([t for t in tensors_in([out]) if storage_key(t) not in given])

    def _after(self, name: str, args: Sequence[Any], out: Any) -> None:
        if name in MAKERS and isinstance(out, Tensor) and not any(t.requires_grad for t in tensors_in(args)):
            self._makers.add(out, MAKERS[name])
        self.attention = self.attention or name.startswith(_ATTENTION)
        path = self._path()
        self.activations.op(name, path or "model", out)
        self.losses.see(name, args, out, path or "loss", self._makers, path is None)

    def _path(self) -> str | None:
        """Of the innermost module of the model that runs; None outside of it."""
        for module in reversed(self._modules.stack):
            if id(module) in self._own:
                return self._modules.path(module) or "model"
        return None

    def _judge(self, name: str, args: Sequence[Any], frame: FrameType) -> None:
        tensors = [a for a in args if isinstance(a, Tensor)]
        if any(not t.is_floating_point() for t in tensors[:1]):
            return
        told = JUDGES[name](args, self._makers)
        if told is None:
            return
        place = place_of(frame)
        source = source_of(place.code or place.installed, place.offset if place.code else place.installed_offset)
        text = f"{told.message}, at {source.file}:{source.line}: {source.code}" if source.file else told.message
        where = self._path() or "loss"
        key = (told.code, source.file, source.line, where if source.file is None else "")
        if key not in self._prone or (told.hit and self._prone[key].severity == "info"):
            severity = "warning" if told.hit else "info"
            self._prone[key] = found(told.code, where, text, severity=severity)  # type: ignore[arg-type]
