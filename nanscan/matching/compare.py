"""A model's own state beside a checkpoint's: what can be loaded under which name, and what can't and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from nanscan.matching.keys import bare_path
from nanscan.matching.report import MatchReport, Mismatch
from nanscan.names import dtype_name

__all__ = ["compared", "plain_names"]

_WRAPPED_CHILD = {"DataParallel": "module", "DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}


def plain_names(model: nn.Module, names: list[str]) -> dict[str, str]:
    """Name -> the name without the parts of the wrappers that are in `model`; a submodule called "module" stays."""
    wrapped = {
        f"{path}.{child}".lstrip(".")
        for path, module in model.named_modules(remove_duplicate=False)
        if (child := _WRAPPED_CHILD.get(type(module).__name__)) is not None
    }
    return {name: _without(name, wrapped) for name in names} if wrapped else {}


def _without(name: str, wrapped: set[str]) -> str:
    parts = name.split(".")
    return ".".join(part for i, part in enumerate(parts) if ".".join(parts[: i + 1]) not in wrapped)


def compared(
    model: nn.Module, own: Mapping[str, Any], saved: Mapping[str, Any], pairs: Mapping[str, str]
) -> MatchReport:
    """The report of loading `saved` into `own`, nothing being loaded yet.

    Args:
        model: whose state `own` is.
        own: name -> the live tensor, or the extra state.
        saved: name -> what the checkpoint has.
        pairs: own name -> saved name.
    """
    mismatched = [
        Mismatch(name, reason) for name in own if name in pairs and (reason := _problem(own[name], saved[pairs[name]]))
    ]
    mismatched += _contradictions(own, saved, pairs, {item.name for item in mismatched})
    bad = {item.name for item in mismatched}
    given = {id(own[name]) for name in own if name in pairs and name not in bad}
    excused = _excused(model, own, saved, pairs)
    missing = [n for n in own if n not in pairs and n not in excused and not _is_tied(own[n], given)]
    used, absent = set(pairs.values()), {*bad, *missing, *excused}
    return MatchReport(
        "model",
        loaded=tuple(name for name in own if name not in absent),
        adapted=tuple((key, name) for name, key in pairs.items() if key != name and name not in bad),
        missing=tuple(missing),
        unexpected=tuple(key for key in saved if key not in used),
        mismatched=tuple(mismatched),
        converted=tuple(_conversions(own, saved, pairs, bad)),
        notes=tuple(_notes(model, [key for key in saved if key not in used])),
    )


def _problem(own: Any, value: Any) -> str:
    """Why `value` can't be loaded into `own`; "" if it can."""
    if not isinstance(own, Tensor):  # extra state: the module knows what it takes
        return ""
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__} in the checkpoint, not a tensor"
    if is_lazy(value):
        return "" if is_lazy(own) else "has no values yet in the checkpoint: it was saved before the first forward pass"
    if value.is_meta and not own.is_meta:
        return "has no values in the checkpoint: it is on the meta device there"
    if not is_lazy(own) and own.shape != value.shape and not (own.dim() == 0 and value.shape == (1,)):
        return f"has shape {tuple(value.shape)} in the checkpoint, {tuple(own.shape)} in the model"
    if own.dtype != value.dtype and not torch.can_cast(value.dtype, own.dtype):
        theirs, ours = dtype_name(value.dtype), dtype_name(own.dtype)
        return f"is {theirs} in the checkpoint and {ours} in the model, which can't hold such values"
    return "" if own.dtype == value.dtype else _out_of_range(own.dtype, value)


def _out_of_range(dtype: torch.dtype, value: Tensor) -> str:
    """Why values of a wider dtype don't fit: they would become Inf, or other integers, without a word."""
    if value.is_meta or value.is_quantized or value.layout is not torch.strided or not _is_number(dtype):
        return ""
    value = value.detach()
    info = torch.finfo(dtype) if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype)
    if value.dtype.is_floating_point and info.max > 0.99 * torch.finfo(value.dtype).max:
        return ""  # bfloat16 reaches as far as float32
    small = value.to(dtype)
    lost = small.to(value.dtype) != value if isinstance(info, torch.iinfo) else ~_finite(small) & _finite(value)
    if not bool(lost.any()):
        return ""
    return (
        f"is {dtype_name(value.dtype)} in the checkpoint and has {int(lost.sum())} value(s) beyond the range of "
        f"{dtype_name(dtype)}, which the model has (up to {float(info.max):.3g})"
    )


def _is_number(dtype: torch.dtype) -> bool:
    return dtype is not torch.bool and not dtype_name(dtype).startswith(("q", "bits"))


def _finite(value: Tensor) -> Tensor:
    return torch.isfinite(value if value.element_size() > 1 else value.float())


def _contradictions(
    own: Mapping[str, Any], saved: Mapping[str, Any], pairs: Mapping[str, str], bad: set[str]
) -> list[Mismatch]:
    """Names of one tied tensor for which the checkpoint has different values."""
    first: dict[int, str] = {}
    found = []
    for name, value in own.items():
        if name not in pairs or name in bad or not isinstance(value, Tensor):
            continue
        other = first.setdefault(id(value), name)
        if other != name and not _equal(saved[pairs[name]], saved[pairs[other]]):
            found.append(Mismatch(name, f"is tied to '{other}' in the model, the checkpoint has other values for it"))
    return found


def _equal(a: Tensor, b: Tensor) -> bool:
    if a is b or (a.device == b.device and a.data_ptr() == b.data_ptr() and a.stride() == b.stride()):
        return True
    if is_lazy(a) or is_lazy(b) or a.shape != b.shape:
        return is_lazy(a) and is_lazy(b)
    b = b.to(a.device)
    return bool(((a == b) | ((a != a) & (b != b))).all())  # a NaN is the same as a NaN


def _is_tied(value: Any, given: set[int]) -> bool:
    return isinstance(value, Tensor) and id(value) in given


def _excused(model: nn.Module, own: Mapping[str, Any], saved: Mapping[str, Any], pairs: Mapping[str, str]) -> set[str]:
    """Counters that batch norms have only since version 2; torch too fills them where a checkpoint is older."""
    metadata = {bare_path(path): item for path, item in getattr(saved, "_metadata", {}).items()}
    found = set()
    for path, module in model.named_modules(remove_duplicate=False):
        name = f"{path}.num_batches_tracked".lstrip(".")
        if isinstance(module, _NormBase) and name in own:
            version = metadata.get(bare_path(path), {}).get("version")
            if version is None or version < 2:
                found.add(name)
    return found - pairs.keys()


def _conversions(
    own: Mapping[str, Any], saved: Mapping[str, Any], pairs: Mapping[str, str], bad: set[str]
) -> list[Mismatch]:
    found = []
    for name, key in pairs.items():
        ours, theirs = own[name], saved[key]
        both = isinstance(ours, Tensor) and isinstance(theirs, Tensor)
        if both and name not in bad and ours.dtype != theirs.dtype:
            text = f"is {dtype_name(theirs.dtype)} in the checkpoint, {dtype_name(ours.dtype)} in the model"
            found.append(Mismatch(name, text))
    return found


def _notes(model: nn.Module, unexpected: list[str]) -> list[str]:
    buffers = {bare_path(name) for name, _ in model.named_buffers(remove_duplicate=False)}
    known = [key for key in unexpected if bare_path(key) in buffers]
    return [f"a buffer that the model computes itself (persistent=False): {', '.join(map(repr, known))}"] * bool(known)
