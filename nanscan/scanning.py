"""`nanscan.scan`: one pass over tensors that says which hold a NaN or Inf, how many, where, and how big they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanscan import engine, paddle_objects
from nanscan.checks import full_places
from nanscan.engine.result import BadInput, EngineScan
from nanscan.names import label_of
from nanscan.report import Label, Report
from nanscan.wrappers import forward_module

__all__ = ["scan"]


class _Item(NamedTuple):
    """One thing to scan; ``position`` is where the caller put it."""

    name: str
    position: int
    value: Any
    kind: str = "tensor"


def scan(tensors: Any, *, grads: bool = False) -> Report:
    """Scan tensors for NaN and Inf, and take their norms, in one pass.

    A tensor that occurs twice (tied weights) counts once, under all its names. Sparse tensors are scanned as their
    coalesced values, complex elements count once, and norms are right for finite elements of any magnitude.

    Args:
        tensors: what to scan, of any shape and layout, on any devices; float32, float16, bfloat16, float64, complex or
            float8, also mixed:

            - a list, tuple or other iterable of tensors: rows are named ``[0]``, ``[1]``, …; None is skipped;
            - a dict of name -> tensor; None is skipped. A module's ``state_dict()`` may hold integer tensors and
              extra state; they are skipped;
            - an ``nn.Module``: its parameters and its floating-point buffers;
            - one tensor: its row is named ``tensor``;
            - the same of PaddlePaddle: its tensors, also among PyTorch's, and a ``paddle.nn.Layer``.
        grads: scan the gradient of each tensor (of a module: of each parameter) instead; one without is skipped.

    Returns:
        A `Report`: totals in ``norm``, ``finite_norm``, ``inf_norm``, ``nan_count``, ``inf_count``; one row for each
        tensor in ``tensors``, and in ``bad`` those that hold a NaN or Inf.

    Raises:
        TypeError: for anything that isn't a floating-point or complex tensor, with its position and name.
        ValueError: for a tensor without numbers (meta, fake, freed), with its position and name.

    The norm is `torch.linalg.vector_norm` over all elements, accumulated in float64.

    >>> import torch, nanscan
    >>> report = nanscan.scan({"w": torch.ones(3, 3), "b": torch.tensor([1.0, float("nan")])})
    >>> report.finite, report.nan_count, report.bad[0].name, report.bad[0].first_bad
    (False, 1, 'b', (1,))
    """
    items = [item for item in _items(tensors, grads) if item.value is not None]
    values = [item.value for item in items]
    try:
        found, places = _scanned(values)
    except BadInput as bad:
        item = items[bad.position]
        raise bad.kind(f"cannot scan {_owner(item)} (position {item.position}): it {bad.reason}") from None
    return Report.from_scan(found, [_label(item) for item in items], places)


def _scanned(values: list[Any]) -> tuple[EngineScan, dict[int, tuple[int, ...]]]:
    """The engine's answer, and where the first bad element of a sparse or sharded tensor stands in the whole."""
    if paddle_objects.imported():
        theirs = [paddle_objects.is_tensor(value) for value in values]
        if values and all(theirs) and not any(value.is_sparse_csr() for value in values):
            from nanscan.integrations.paddle import engine as paddle_engine  # it imports Paddle
            from nanscan.integrations.paddle.tensors import sparse_places

            scan = paddle_engine.scan_tensors(values)
            return scan, sparse_places(scan, values)
        values = [
            paddle_objects.as_torch_at(i, v) if paddle else v
            for i, (v, paddle) in enumerate(zip(values, theirs, strict=True))
        ]
    found = engine.scan(values)
    return found, {} if found.finite else full_places(found, values)


def _label(item: _Item) -> Label:
    named = paddle_objects.label_of if paddle_objects.is_tensor(item.value) else label_of
    return named(item.value, (item.name,), item.kind)


def _owner(item: _Item) -> str:
    return f"the gradient of '{item.name}'" if item.kind == "grad" else f"'{item.name}'"


def _items(tensors: Any, grads: bool) -> Iterator[_Item]:
    if not grads:
        return _values(tensors)
    return (_gradient(item) for item in _values(tensors) if item.kind != "buffer" and item.value is not None)


def _gradient(item: _Item) -> _Item:
    if not isinstance(item.value, Tensor) and not paddle_objects.is_tensor(item.value):  # the engine says what is wrong
        return item
    return item._replace(value=item.value.grad, kind="grad")


def _values(tensors: Any) -> Iterator[_Item]:
    if isinstance(tensors, nn.Module):
        return _of_module(tensors)
    if isinstance(tensors, Mapping):
        return _of_mapping(tensors)
    if paddle_objects.is_layer(tensors):
        return _of_layer(tensors)
    if isinstance(tensors, torch.optim.Optimizer) or paddle_objects.is_optimizer(tensors):
        raise TypeError(
            f"cannot scan an optimizer ({type(tensors).__name__}): scan what it trains, nanscan.scan(model) or "
            "nanscan.scan(model, grads=True); its state is a dict of tensors "
            + (
                "optimizer.state_dict()"
                if paddle_objects.is_optimizer(tensors)
                else "for each parameter in optimizer.state"
            )
        )
    if (
        isinstance(tensors, Iterable) and not isinstance(tensors, (str, bytes)) and not hasattr(tensors, "dtype")
    ):  # an array
        return (_Item(f"[{i}]", i, value) for i, value in enumerate(tensors))
    if tensors is None:
        raise TypeError("nothing to scan: got None instead of tensors, a dict of them, or an nn.Module")
    return iter([_Item("tensor", 0, tensors)])  # the engine says what it is


def _of_module(module: nn.Module) -> Iterator[_Item]:
    """Parameters and buffers that can hold a NaN, under every name they have; quantized weights are integers."""
    module = forward_module(module)
    named: list[tuple[str, str, Tensor]] = [
        ("parameter", *pair) for pair in module.named_parameters(remove_duplicate=False)
    ]
    named += [("buffer", *pair) for pair in module.named_buffers(remove_duplicate=False)]
    for position, (kind, name, value) in enumerate(named):
        if value.is_floating_point() or value.is_complex():
            yield _Item(name, position, value, kind)


def _of_layer(layer: Any) -> Iterator[_Item]:
    for position, (kind, name, value) in enumerate(paddle_objects.named_values(layer)):
        if paddle_objects.holds_floats(value):
            yield _Item(name, position, value, kind)


def _of_mapping(tensors: Mapping[Any, Any]) -> Iterator[_Item]:
    if paddle_objects.imported() and any(paddle_objects.is_tensor(value) for value in tensors.values()):
        yield from (_Item(name, i, v) for i, (name, v) in enumerate(paddle_objects.of_state_dict(tensors)))
        return
    is_state_dict = hasattr(tensors, "_metadata")
    for position, (name, value) in enumerate(tensors.items()):
        if not (is_state_dict and _holds_no_floats(str(name), value)):
            yield _Item(str(name), position, value)


def _holds_no_floats(name: str, value: Any) -> bool:
    if name.endswith("_extra_state"):
        return True
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
