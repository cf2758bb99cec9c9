"""What may go into a file of Paddle's: tensors, arrays, numbers and text in plain containers, all else by path."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from nanscan import paddle_objects
from nanscan.checkpoint.tensors import Found, keyed
from nanscan.errors import CheckpointError
from nanscan.pickling.naming import Step, render, type_name
from nanscan.pickling.problem import PickleProblem, in_lines

__all__ = ["Stored", "arrays_in", "moved", "refuse_unfit", "stored_in"]

_DICTS, _LISTS = (dict, OrderedDict), (list, tuple, set)
_LEAVES = (bool, int, float, complex, str, type(None))
# paddle.load makes tensors of arrays; of others than these it can't.
_ARRAYS = {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "float16", "float32", "float64"}
_ARRAYS |= {"complex64", "complex128"}
_KEYS = (bool, int, float, complex, str, type(None))
_STATE = "save its state_dict(), for set_state_dict() of one that the program makes anew"


class Stored(NamedTuple):
    """A tensor or array in the order in which paddle.save meets it."""

    path: str
    value: Any

    @property
    def size(self) -> int:
        return int(self.value.size) * int(self.value.itemsize)

    def has(self, payload: bytes) -> bool:
        """Whether these are its bytes; asked for small ones."""
        array = self.value if isinstance(self.value, np.ndarray) else self.value.detach().cpu().numpy()
        return bool(array.tobytes() == payload)


def stored_in(obj: Any) -> list[Stored]:
    """Every tensor and array, in order."""
    return [
        Stored(leaf.path, leaf.value)
        for leaf in _walk(obj, "", ())
        if isinstance(leaf.value, np.ndarray) or paddle_objects.is_tensor(leaf.value)
    ]


def arrays_in(obj: Any) -> list[Found]:
    """NumPy arrays of floats: some of Paddle's states hold them instead of tensors."""
    return [
        Found(item.path, torch.from_numpy(np.ascontiguousarray(item.value)))
        for item in stored_in(obj)
        if isinstance(item.value, np.ndarray) and item.value.dtype in (np.float16, np.float32, np.float64, np.complex64)
    ]


def refuse_unfit(obj: Any, path: str) -> None:
    """Raise `CheckpointError` with `.problems` for everything that paddle.save or paddle.load would not give back."""
    problems = [
        PickleProblem(render("state", leaf.steps), type_name(leaf.value), *judged, steps=leaf.steps)
        for leaf in _walk(obj, "", ())
        if (judged := leaf.refused or _judged(leaf.value)) is not None
    ]
    if problems:
        raise _error(path, problems)


def _error(path: str, problems: list[PickleProblem]) -> CheckpointError:
    listed = in_lines(problems)
    error = CheckpointError(
        f"cannot save to {path!r}: {len(problems)} value(s) don't fit into a file of paddle.save. Change them as said, "
        f'or leave them out with on_unpicklable="drop":\n  {listed}'
    )
    error.problems = problems  # type: ignore[attr-defined]
    return error


class _Leaf(NamedTuple):
    """Something that is not a container; `refused` (reason, fix) where its place already says that it can't stay."""

    path: str
    value: Any
    steps: tuple[Step, ...]
    refused: tuple[str, str] | None = None


def _walk(value: Any, path: str, steps: tuple[Step, ...], around: frozenset[int] = frozenset()) -> Iterator[_Leaf]:
    """Everything that is not a container that paddle.save goes through."""
    kind = type(value)
    if id(value) in around:
        yield _Leaf(path, value, steps, ("a container that holds itself has no end for paddle.save", "keep it once"))
    elif kind in _DICTS:
        for key, item in value.items():
            inner = (*steps, ("item", key))
            if type(key) in _KEYS:
                yield from _walk(item, keyed(path, key), inner, around | {id(value)})
            else:
                yield _Leaf(
                    keyed(path, key), key, inner, ("keys are text or numbers in a file of Paddle's", "use those")
                )
    elif kind in _LISTS and not _is_pair(value):
        step = "key" if kind is set else "item"
        for i, item in enumerate(value):
            yield from _walk(item, f"{path}[{i}]", (*steps, (step, i)), around | {id(value)})
    else:
        yield _Leaf(path or "tensor", value, steps)


def _is_pair(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2 and type(value[0]) is str and isinstance(value[1], np.ndarray)


def _judged(value: Any) -> tuple[str, str] | None:
    """(reason, fix) for what doesn't fit."""
    if paddle_objects.is_tensor(value):
        return _judged_tensor(value)
    if _is_pair(value):
        return "paddle.load takes a pair of text and array for a tensor and gives that back", "use a list or a dict"
    if isinstance(value, np.ndarray):
        return _judged_array(value)
    if type(value) in _LEAVES or isinstance(value, (np.number, np.bool_)):
        return None
    if isinstance(value, torch.Tensor):
        return "a tensor of PyTorch in a file of Paddle's", "save it apart, as .pt, or as x.numpy()"
    if paddle_objects.is_layer(value) or paddle_objects.is_optimizer(value):
        return "paddle.save takes no whole layer or optimizer", _STATE
    if isinstance(value, (bytes, bytearray)):
        return "paddle.save takes no bytes", "use text, or np.frombuffer(x, np.uint8)"
    return f"paddle.save takes plain values only, no {type_name(value)}", (
        "keep what it is made from: numbers, text, lists, dicts"
    )


def _judged_array(array: np.ndarray[Any, Any]) -> tuple[str, str] | None:
    if array.dtype.hasobject:
        return "an array of objects loads only by running code", "use a list"
    if array.dtype.name in _ARRAYS:
        return None
    wider = "x.astype('int64')" if array.dtype.name == "uint32" else "x.tolist()"
    return f"paddle.load makes a tensor of every array and has none of {array.dtype}", f"save {wider}"


def _judged_tensor(tensor: Any) -> tuple[str, str] | None:
    if not tensor._is_initialized():
        return "the tensor has no memory (yet)", "leave it out, or save after the first forward pass"
    if tensor.is_selected_rows() or tensor.is_sparse():
        return "paddle.save takes no sparse tensor", "save x.to_dense(), or its indices() and values()"
    if paddle_objects.dtype_name(tensor).startswith("float8"):
        return f"paddle.save takes no {paddle_objects.dtype_name(tensor)}", "save x.astype('bfloat16'), which is exact"
    return None


def moved(value: Any, device: Any) -> Any:
    """What was loaded, with its tensors on another device."""
    if paddle_objects.is_tensor(value):
        return value.to(device)
    if type(value) in _DICTS:
        return type(value)((key, moved(item, device)) for key, item in value.items())
    return type(value)(moved(item, device) for item in value) if type(value) in _LISTS else value
