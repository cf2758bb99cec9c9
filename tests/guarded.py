"""What the tests of the guard share: every optimizer in every variant that runs here, and comparisons bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim

import nanscan

NAN, INF = float("nan"), float("inf")
SHAPES = ((4, 3), (3, 5), (2, 2))


@dataclass(frozen=True)
class Variant:
    """One way to make an optimizer of torch.optim."""

    name: str
    make: Callable[[list[Tensor]], optim.Optimizer]
    leaf: bool = True
    sparse: bool = False
    closure: bool = False

    def __str__(self) -> str:
        return self.name


def _variants() -> Iterator[Variant]:
    options: dict[str, tuple[dict[str, Any], ...]] = {
        "Adadelta": ({},),
        "Adafactor": ({},),
        "Adagrad": ({"lr": 0.1}, {"lr": 0.1, "weight_decay": 0.1, "lr_decay": 0.1}),
        "Adam": ({"lr": 0.1}, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1}),
        "AdamW": ({"lr": 0.1}, {"lr": 0.1, "amsgrad": True}),
        "Adamax": ({"lr": 0.1},),
        "ASGD": ({"lr": 0.1, "t0": 2},),
        "NAdam": ({"lr": 0.1},),
        "RAdam": ({"lr": 0.1},),
        "RMSprop": ({"lr": 0.1, "momentum": 0.9, "centered": True},),
        "Rprop": ({"lr": 0.1},),
        "SGD": (
            {"lr": 0.1},
            {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
            {"lr": 0.1, "momentum": 0.9, "nesterov": True},
            {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
        ),
    }
    for name, several in options.items():
        kind = getattr(optim, name)
        flags = [{"foreach": True}, {"foreach": False}]
        flags += [{"fused": True}] if name in ("Adagrad", "Adam", "AdamW", "SGD") else []
        flags += [{"differentiable": True}] if name != "Adafactor" else []
        for given in several:
            for flag in flags:
                every = {**given, **flag}
                title = f"{name}({', '.join(f'{k}={v}' for k, v in every.items())})"
                yield Variant(
                    title, lambda ps, kind=kind, every=every: kind(ps, **every), leaf="differentiable" not in flag
                )
    yield Variant("Muon", lambda ps: optim.Muon(ps, lr=0.1))
    yield Variant("SparseAdam", lambda ps: optim.SparseAdam(ps, lr=0.1), sparse=True)
    yield Variant("LBFGS", lambda ps: optim.LBFGS(ps, lr=0.1, max_iter=4), closure=True)
    yield Variant(
        "LBFGS(strong_wolfe)",
        lambda ps: optim.LBFGS(ps, max_iter=4, line_search_fn="strong_wolfe"),
        closure=True,
    )


VARIANTS = list(_variants())
STEPPING = [v for v in VARIANTS if not v.closure]
FUSED = [v for v in VARIANTS if "fused" in v.name]


def make_params(leaf: bool = True, seed: int = 0, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[Tensor]:
    """The same parameters for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    params = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    if leaf:
        return params
    clones = [p.clone() for p in params]
    for clone in clones:
        clone.retain_grad()
    return clones


def set_grads(params: list[Tensor], step: int, sparse: bool = False, bad: float | None = None) -> None:
    """Gradients that depend on `step` alone; `bad` is planted at [1, 0] (or [1]) of the second parameter."""
    generator = torch.Generator().manual_seed(1000 + step)
    for i, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator)
        if bad is not None and i == 1:
            grad[(1,) + (0,) * (grad.dim() - 1)] = bad
        param.grad = grad.to_sparse(1) if sparse else grad


def bits(value: Any) -> Any:
    """`value` with every tensor as raw bytes, so that `==` compares bit for bit (NaN, and -0.0 against 0.0)."""
    if isinstance(value, Tensor):
        dense = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
        data = dense.contiguous().flatten().view(torch.uint8) if dense.numel() else dense
        return (str(value.dtype), tuple(value.shape), bytes(data.tolist()))
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, (list, tuple)) else value


def whole_state(params: list[Tensor], optimizer: optim.Optimizer) -> Any:
    """Weights, optimizer state, step counters and group options, ready to be compared bit for bit."""
    return bits(params), bits(optimizer.state_dict())


def one(value=1.0, make=torch.optim.SGD, lr=1.0, model=None, inner=None, **options):
    """A parameter and a guarded optimizer over it."""
    weight = nn.Parameter(torch.tensor(value))
    return weight, nanscan.wrap(make([weight], lr=lr, **(inner or {})), model, **options)


def step(optimizer, weight, grad):
    weight.grad = torch.tensor(grad)
    return optimizer.step()
