"""What is to be judged: model, optimizer, batch and the rest, and what several checks ask about them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from nanscan.names import clean, names_of, unwrapped

__all__ = ["LAYERS", "Subject", "plural"]

# the kinds of layers whose weights are matrices
LAYERS = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_NOT_ATTENTION = re.compile(r"norm|drop|pool|gate|proj|linear|conv", re.IGNORECASE)


@dataclass
class Subject:
    """The arguments of `preflight`, as its checks read them.

    Attributes:
        model: without the wrappers of torch.compile and data parallelism.
        guard: the guarded optimizer, if it is one.
        optimizer: the inner one.
        called: the model as it was given, unless compiled.
    """

    model: nn.Module
    called: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    guard: Any = None
    batch: Any = None
    loss_fn: Callable[..., Any] | None = None
    forward: Callable[..., Any] | None = None
    scheduler: Any = None
    scaler: Any = None
    autocast_dtype: torch.dtype | None = None
    has_attention_op: bool = field(default=False)

    @cached_property
    def named(self) -> dict[str, nn.Parameter]:
        """Each parameter once, under its first name."""
        return {clean(name): param for name, param in self.model.named_parameters()}

    @cached_property
    def ready(self) -> dict[str, nn.Parameter]:
        """Those that have a shape and memory."""
        return {name: p for name, p in self.named.items() if not is_lazy(p) and not p.is_meta}

    @cached_property
    def names(self) -> dict[int, tuple[str, ...]]:
        """`id(parameter)` -> all its names."""
        return names_of(self.model)

    @cached_property
    def matrices(self) -> dict[str, nn.Parameter]:
        """The weights of two and more dimensions of the layers that multiply by them, without embeddings."""
        own = {id(p) for m in self.model.modules() if isinstance(m, LAYERS) for p in m.parameters(recurse=False)}
        own |= {id(p) for path, p in self.ready.items() if ".parametrizations." in f".{path}"}
        return {name: p for name, p in self.ready.items() if p.dim() >= 2 and id(p) in own}

    def name_of(self, param: Tensor, other: str = "a parameter") -> str:
        """The first name of a parameter."""
        return self.names.get(id(param), (other,))[0]

    def groups(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The optimizer's groups with the place of each."""
        for number, group in enumerate(self.optimizer.param_groups if self.optimizer is not None else ()):
            yield f"optimizer.param_groups[{number}]", group

    @cached_property
    def recurrent(self) -> bool:
        """True if it has a recurrent layer."""
        return any(isinstance(m, (nn.RNNBase, nn.RNNCellBase)) for m in self.model.modules())

    @cached_property
    def attention_layers(self) -> int:
        """How many modules are attention, by type or by class name."""
        count, inside = 0, ""
        for path, module in self.model.named_modules():
            if inside and path.startswith(inside):
                continue
            if _is_attention(module):
                count, inside = count + 1, f"{path}."
        return count

    @cached_property
    def scaler_on(self) -> bool:
        """True if there is a gradient scaler that is not disabled; one for CUDA counts where there is no CUDA."""
        if self.scaler is None:
            return False
        elsewhere = getattr(self.scaler, "_device", "cuda") == "cuda" and not torch.cuda.is_available()
        return elsewhere or bool(getattr(self.scaler, "is_enabled", lambda: True)())


def _is_attention(module: nn.Module) -> bool:
    name = type(module).__name__
    if isinstance(module, nn.MultiheadAttention):
        return True
    return bool(_ATTENTION.search(name)) and not _NOT_ATTENTION.search(name) and any(True for _ in module.parameters())


def plural(count: int, noun: str) -> str:
    """A count and its noun.

    >>> plural(1, "row"), plural(2, "row")
    ('1 row', '2 rows')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def without_wrappers(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """(the model as it is to be called: not compiled; the module itself, also without data parallelism)."""
    called = model
    while isinstance(getattr(called, "_orig_mod", None), nn.Module):
        called = called._orig_mod  # type: ignore[assignment]
    inner = unwrapped(called)
    while isinstance(getattr(inner, "_orig_mod", None), nn.Module):
        inner = unwrapped(inner._orig_mod)  # type: ignore[arg-type]
    return called, inner
