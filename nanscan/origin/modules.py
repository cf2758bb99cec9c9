"""Which module is running: a stack kept by hooks that are global, so that no module looks any different."""

from __future__ import annotations

import inspect
import threading
import weakref
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from nanscan.names import clean, unwrapped
from nanscan.origin.torch_private import plain

__all__ = ["ModuleStack", "is_compiled", "storage_key"]


class Owned(NamedTuple):
    """A parameter or buffer of a model: `"parameter"` or `"buffer"`, its name, itself."""

    kind: str
    name: str
    tensor: Tensor


class ModuleStack:
    """The modules whose forward is running, outermost first, and what they and their parameters are called.

    Args:
        model: paths are relative to it; without one to the outermost module called, under its class name.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.stack: list[nn.Module] = []
        self.compiled = False  # a torch.compile'd module was called
        self._model = None if model is None else unwrapped(model)
        self._roots: dict[int, nn.Module] = {}
        self._paths: dict[int, str] | None = None
        self._tensors: dict[int, list[Owned]] | None = None
        self._given: list[tuple[weakref.ref[Tensor], nn.Module, int]] = []  # the outermost module's arguments
        self._thread = threading.get_ident()
        self._handles: list[Any] = []

    def enter(self) -> None:
        """Start to follow the calls of this thread."""
        self._handles = [
            register_module_forward_pre_hook(self._push),
            register_module_forward_hook(self._pop, always_call=True),
        ]

    def exit(self) -> None:
        """Stop, and let go of all modules."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.stack.clear()
        self._roots.clear()
        self._given.clear()
        self._model = self._paths = self._tensors = None

    def _push(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:
            if not self.stack:
                self._begin(module, args)
            self.stack.append(module)

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module is called that no other module called."""
        self._given = [(weakref.ref(a), module, i) for i, a in enumerate(args) if isinstance(a, Tensor)]
        if id(module) not in self._roots:
            self._roots[id(module)] = module
            self.compiled = self.compiled or is_compiled(module)
            self._paths = self._tensors = None

    def _pop(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread:
            while self.stack and self.stack.pop() is not module:
                pass

    def path(self, module: nn.Module | None) -> str | None:
        """The dotted path of a module; its class name if it belongs to none that was called."""
        if module is None:
            return None
        if self._paths is None:
            self._paths = self._all_paths()
        return self._paths.get(id(module), type(module).__name__)

    def _all_paths(self) -> dict[int, str]:
        paths: dict[int, str] = {}
        for prefix, root in self._named_roots():
            for name, module in root.named_modules():
                paths.setdefault(id(module), _joined(prefix, clean(name)))
        return paths

    def _named_roots(self) -> list[tuple[str, nn.Module]]:
        roots = [] if self._model is None else [("", self._model)]
        return roots + [(type(root).__name__, root) for root in self._roots.values()]

    def argument(self, tensor: Tensor) -> tuple[str, Tensor] | None:
        """Name and value of the argument of the outermost module's forward that shares memory with `tensor`."""
        key = storage_key(tensor)
        for reference, module, position in self._given:
            given = reference()
            if given is not None and key is not None and storage_key(given) == key:
                return _argument_name(module, position), given
        return None

    def owner(self, tensor: Tensor) -> Owned | None:
        """The parameter or buffer whose memory a tensor is in, else None; one piece of memory may hold several."""
        if self._tensors is None:
            self._tensors = self._all_tensors()
        key = storage_key(tensor)
        found = [] if key is None else self._tensors.get(key, [])
        if len(found) < 2:
            return found[0] if found else None
        start = plain(tensor).data_ptr()
        return next((o for o in found if 0 <= start - o.tensor.data_ptr() < max(o.tensor.nbytes, 1)), found[0])

    def _all_tensors(self) -> dict[int, list[Owned]]:
        tensors: dict[int, list[Owned]] = {}
        for prefix, root in self._named_roots():
            for kind, named in (("parameter", root.named_parameters()), ("buffer", root.named_buffers())):
                for name, value in named:
                    key = storage_key(value)
                    if key is not None:
                        tensors.setdefault(key, []).append(Owned(kind, _joined(prefix, clean(name)), plain(value)))
        return tensors

    def tensor_name(self, tensor: Tensor) -> tuple[str, str] | None:
        """("parameter" or "buffer", its name) for a tensor that shares a parameter's or buffer's memory, else None."""
        found = self.owner(tensor)
        return None if found is None else (found.kind, found.name)


def _argument_name(module: nn.Module, position: int) -> str:
    """What the forward of the user's own module calls an argument; those of `*inputs` are `inputs[0]`, …."""
    own = getattr(unwrapped(module), "_orig_mod", unwrapped(module))
    parameters = list(inspect.signature(own.forward).parameters.values())
    single = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if position < len(single):
        return single[position]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "input")
    return f"{rest}[{position - len(single)}]"


def is_compiled(module: nn.Module | None) -> bool:
    """True for what `torch.compile(model)` returns."""
    return type(module).__name__ == "OptimizedModule"


def storage_key(tensor: Tensor) -> int | None:
    """Equal for two tensors that share memory, while one of them lives; None where there is no memory of its own."""
    try:
        return int(plain(tensor).untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, AttributeError):
        return None


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
