"""What the modules of a watched model are called."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.jit._script import RecursiveScriptModule

from nanscan.names import clean, unwrapped

__all__ = ["innermost", "is_compiled_in_place", "is_scripted", "is_wrapped_compiled", "module_names"]


def module_names(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each module that takes hooks once, with its dotted path; the model itself under its class name.

    >>> model = nn.Sequential(nn.Linear(1, 1))
    >>> [name for name, _ in module_names(nn.DataParallel(model))]
    ['Sequential', '0']
    """
    root = innermost(model)
    for name, module in root.named_modules():
        if not is_scripted(module):
            yield clean(name) or type(root).__name__, module


def innermost(model: nn.Module) -> nn.Module:
    """The model without what torch.compile and data parallelism put around it."""
    while True:
        inner = unwrapped(model)
        if _is_compiled(inner):
            inner = inner.get_submodule("_orig_mod")
        if inner is model:
            return model
        model = inner


def is_scripted(module: nn.Module) -> bool:
    """Whether it comes from torch.jit.script, and takes no hooks."""
    return isinstance(module, RecursiveScriptModule)


def is_wrapped_compiled(model: nn.Module) -> bool:
    """Whether what torch.compile returns is one of the layers around the model."""
    return _is_compiled(unwrapped(model))


def is_compiled_in_place(model: nn.Module) -> bool:
    """Whether the model's own `compile()` was called."""
    return getattr(innermost(model), "_compiled_call_impl", None) is not None


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule"
