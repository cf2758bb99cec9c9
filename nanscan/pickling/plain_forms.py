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
    ((np.ndarray,), "store torch.from_numpy(x), or x.tolist()"),
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
    ((types.FunctionType, types.BuiltinFunctionType, types.MethodType), "store its name as a str"),
    ((type,), "store its name as a str"),
    ((range,), "store [x.start, x.stop, x.step], or list(x)"),
    ((slice,), "store [x.start, x.stop, x.step]"),
    ((frozenset,), "store set(x)"),
    ((deque,), "store list(x)"),
    ((array.array,), "store x.tolist()"),
    ((bytes,), "store bytearray(x)"),
    ((int,), "store str(x), or a float"),
    ((type(...), type(NotImplemented)), "store None, or a word"),
    ((BaseException,), "store str(x)"),
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
    if issubclass(type(value), np.ndarray) and value.dtype.kind not in "biufc":
        return "store x.astype(str).tolist()" if value.dtype.kind in "mM" else "store x.tolist()"
    for kinds, text in _FORMS:
        if issubclass(type(value), kinds):
            return text
    return _by_shape(value)


def _by_shape(value: object) -> str:
    """Kinds that are known by what they offer rather than by a base class."""
    if dataclasses.is_dataclass(type(value)):
        return "store dataclasses.asdict(x)"
    if issubclass(type(value), tuple) and hasattr(type(value), "_fields"):
        return "store tuple(x), or x._asdict()"
    for base in _BUILTIN_BASES:
        if issubclass(type(value), base):
            exact = type(value) is base
            return "store plain values in it only" if exact else f"store {base.__name__}(x)"
    for method in ("model_dump", "state_dict", "to_dict", "asdict", "_asdict"):
        if callable(getattr(type(value), method, None)):
            return f"store x.{method}()"
    if hasattr(type(value), "__attrs_attrs__"):
        return "store attrs.asdict(x)"
    return "store its fields as a dict of plain values, such as vars(x)"


def plain_form_of_global(path: str) -> str | None:
    """The same for builtins that pickle writes without asking the object."""
    return _OF_GLOBALS.get(path)
