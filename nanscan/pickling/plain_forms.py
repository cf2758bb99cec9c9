"""What to store instead of an object, so that a checkpoint holds plain data only: one line for each kind."""

from __future__ import annotations

import array
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import types
import uuid
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["plain_form", "plain_form_of_global"]

# The first that fits counts: numpy's scalars and enum members come before the builtins that they derive from.
_FORMS: tuple[tuple[tuple[type, ...], str], ...] = (
    ((np.bool_,), "store bool(x)"),
    ((np.timedelta64,), 'store x.astype("int64").item() and its unit'),  # an integer by inheritance only
    ((np.integer,), "store int(x)"),
    ((np.floating,), "store float(x)"),
    ((np.complexfloating,), "store complex(x)"),
    ((np.str_, np.datetime64), "store str(x)"),
    ((np.bytes_,), "store bytes(x)"),
    ((np.void,), "store x.item()"),
    ((np.ma.MaskedArray,), "store torch.from_numpy(x.data) and torch.from_numpy(np.ma.getmaskarray(x))"),
    ((np.dtype, torch.memory_format), "store str(x)"),
    (
        (np.random.RandomState,),
        "store its state, as nanscan.CheckpointManager does: x.get_state(), the array by .tolist()",
    ),
    ((np.random.Generator,), "store x.bit_generator.state, with its arrays by .tolist()"),
    ((np.random.BitGenerator,), "store x.state, with its arrays by .tolist()"),
    ((Namespace, types.SimpleNamespace), "store vars(x)"),
    ((pathlib.PurePath,), "store str(x)"),
    ((enum.Enum,), "store x.value (or x.name)"),
    ((datetime.datetime, datetime.date, datetime.time), "store x.isoformat()"),
    ((datetime.timedelta,), "store x.total_seconds()"),
    ((datetime.tzinfo, decimal.Decimal, fractions.Fraction, uuid.UUID), "store str(x)"),
    ((torch.nn.Module,), "store x.state_dict()"),
    ((torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler), "store x.state_dict()"),
    ((torch.Generator,), "store x.get_state()"),
    ((torch.nn.Parameter,), "store x.detach()"),
    ((torch.Tensor,), "store x.detach().as_subclass(torch.Tensor), without attributes of its own"),
    ((functools.partial,), "store the arguments, and the function's name as a str"),
    ((types.FunctionType, types.BuiltinFunctionType, types.MethodType, np.ufunc), "store its name as a str"),
    ((type,), "store its name as a str"),
    ((range,), "store [x.start, x.stop, x.step], or list(x)"),
    ((slice,), "store [x.start, x.stop, x.step]"),
    ((frozenset,), "store set(x)"),
    ((deque,), "store list(x)"),
    ((array.array,), "store x.tolist()"),
    ((bytes,), "store bytearray(x)"),
    ((type(...), type(NotImplemented)), "store None, or a word"),
    ((BaseException, types.GenericAlias, types.UnionType), "store str(x)"),
)
_BUILTIN_BASES = (dict, list, tuple, set, str, int, float, complex, bytearray)
_OF_GLOBALS = {"builtins.frozenset": "store set(x)", "builtins.bytes": "store bytearray(x): an empty bytes is refused"}


def plain_form(value: Any) -> str:
    """What to store instead of this object.

    >>> import datetime
    >>> plain_form(datetime.date(2026, 1, 31)), plain_form(np.float32(1))
    ('store x.isoformat()', 'store float(x)')
    """
    if type(value).__module__.partition(".")[0] == "omegaconf":
        return "store OmegaConf.to_container(x, resolve=True)"
    for kinds, text in _FORMS:
        if issubclass(type(value), kinds):
            return text
    if issubclass(type(value), np.ndarray):
        return _of_array(value)
    return _by_shape(value)


def _of_array(value: np.ndarray[Any, Any]) -> str:
    """`torch.from_numpy` takes neither every dtype nor every layout."""
    kind = value.dtype.kind
    if kind in "mM":
        return "store x.astype(str).tolist()"
    if kind not in "biufc":
        return "store x.tolist()"
    if value.dtype.itemsize > (16 if kind == "c" else 8):
        return f"store torch.from_numpy(x.astype({'complex' if kind == 'c' else 'float'}))"
    if not value.dtype.isnative:
        return 'store torch.from_numpy(x.astype(x.dtype.newbyteorder("="))), or x.tolist()'
    if any(stride < 0 for stride in value.strides):
        return "store torch.from_numpy(x.copy()), or x.tolist()"
    return "store torch.from_numpy(x), or x.tolist()"


def _by_shape(value: object) -> str:
    """Kinds that are known by what they offer rather than by a base class."""
    kind = type(value)
    if dataclasses.is_dataclass(kind):
        return "store x.to_dict()" if callable(getattr(kind, "to_dict", None)) else "store dataclasses.asdict(x)"
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return "store tuple(x), or x._asdict()"
    if kind is int:
        return "store str(x), or a float"
    for base in _BUILTIN_BASES:
        if issubclass(kind, base):
            return "store plain values in it only" if kind is base else f"store {base.__name__}(x){_nested(value)}"
    if callable(getattr(kind, "save_pretrained", None)):
        return "call x.save_pretrained(folder) beside the checkpoint"
    for method in ("model_dump", "state_dict", "to_dict", "asdict", "_asdict", "tolist", "to_str"):
        if callable(getattr(kind, method, None)):
            return f"store x.{method}()"
    if hasattr(kind, "__attrs_attrs__"):
        return "store attrs.asdict(x)"
    return _by_protocol(kind)


def _nested(value: Any) -> str:
    """Configurations (of yacs, easydict …) hold others of their own class."""
    held = dict.values(value) if issubclass(type(value), dict) else ()
    return ", and the same of those inside it" if any(type(part) is type(value) for part in held) else ""


def _by_protocol(kind: type) -> str:
    if issubclass(kind, Mapping):
        return "store dict(x)"
    if issubclass(kind, Iterator):
        return "store the list that it goes over, and its position"
    if kind.__module__ in ("typing", "ipaddress"):
        return "store str(x)"
    if kind.__dictoffset__:
        return "store its fields as a dict of plain values, such as vars(x)"
    slots = [name for base in kind.__mro__ for name in _names(vars(base).get("__slots__")) if name[:2] != "__"]
    if slots:
        return f"store its fields as a dict of plain values: {', '.join(slots[:4])}{' …' if slots[4:] else ''}"
    return "leave it out, or store what it is made from as plain values"


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots or ())


def plain_form_of_global(path: str) -> str | None:
    """The same for builtins that pickle writes without asking the object."""
    return _OF_GLOBALS.get(path)
