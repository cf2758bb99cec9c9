"""What dtypes and shapes alone say of a batch: drift from the spec, missing and empty fields, unequal sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nanscan.batches.fields import Field
from nanscan.batches.graphs import has_edges, judge_graph_shapes
from nanscan.batches.problem import BatchProblem
from nanscan.batches.spec import BatchSpec, FieldSpec
from nanscan.batches.tokens import too_long
from nanscan.batches.walk import Step, path_of

__all__ = ["judge_shapes"]

# Fields beside which the first dimension may count nodes, edges or time steps instead of samples.
_RAGGED = ("length", "lengths", "edge_index", "ptr", "cu_seqlens", "offsets", "batch_sizes")

_MORE_KEYS = ("past", "cache", "prefix", "memory", "embeds", "pixel", "image", "audio", "video")
_UNCOUNTED = ("", "scores", "lengths", "box", "audio")  # their first dimension is often another


def judge_shapes(fields: Sequence[Field], spec: BatchSpec) -> list[BatchProblem]:
    """Every problem that is told without reading a value."""
    found = _missing(fields, spec)
    for field in fields:
        known = spec.known_of(field.field)
        found += _empty(field)
        found += _drift(field, known) if known is not None else []
        if known is None or known != FieldSpec():
            found += too_long(field, spec) if field.role == "token" else []
            found += _bytes(field, spec) if known is None or not known.bounded else []
    return found + _sizes(fields) + judge_graph_shapes(fields)


def _missing(fields: Sequence[Field], spec: BatchSpec) -> list[BatchProblem]:
    there = {field.field for field in fields}
    return [
        BatchProblem(_guessed_path(name), "is missing: the spec has it among its fields", kind="missing", field=name)
        for name in spec.fields or ()
        if name not in there
    ]


def _guessed_path(name: str) -> str:
    parts = name.split(".") if name else []
    return path_of(tuple(("t", int(part)) if part.isdigit() else ("k", part) for part in parts))


def _empty(field: Field) -> list[BatchProblem]:
    if 0 not in field.shape or has_edges(field):
        return []
    what = "is empty" if field.role != "label" else "is empty (no target at all)"
    reason = f"{what}: shape {field.shape}; a mean over it is 0/0 = NaN"
    single = "error" if field.batched else "warning"  # one image without an object is usual
    return [BatchProblem(field.path, reason, 1, None, single, "empty", field.field)]  # type: ignore[arg-type]


def _drift(field: Field, known: FieldSpec) -> list[BatchProblem]:
    found = []
    if known.dtype is not None and field.dtype is not known.dtype:
        reason = f"has dtype {_name(field.dtype)}, expected {_name(known.dtype)}"
        found.append(BatchProblem(field.path, reason, kind="dtype", field=field.field))
    if known.shape is not None and not _fits(field, known.shape):
        wanted = ", ".join("any" if size is None else str(size) for size in known.shape)
        reason = f"has shape {field.shape}, expected ({wanted}{',' * (len(known.shape) == 1)})"
        found.append(BatchProblem(field.path, reason, kind="shape", field=field.field))
    return found


def _fits(field: Field, wanted: tuple[int | None, ...]) -> bool:
    shape = field.shape
    if field.batched and len(wanted) == len(shape) - 1:
        shape = shape[1:]
    return len(wanted) == len(shape) and all(w in (None, s) for w, s in zip(wanted, shape, strict=True))


def _bytes(field: Field, spec: BatchSpec) -> list[BatchProblem]:
    """Pixels as they come from a file, where a range of at most 1 is asked for."""
    scaled = spec.value_range is not None and spec.value_range[1] <= 1.0
    if not scaled or field.dtype is not torch.uint8 or field.role not in ("image", "input") or len(field.shape) < 3:
        return []
    low, high = spec.value_range or (0.0, 1.0)
    reason = (
        f"is uint8 (0..255), value_range is {low:g}..{high:g}: images not scaled; convert to float and divide by 255"
    )
    return [BatchProblem(field.path, reason, kind="scale", field=field.field)]


def _sizes(fields: Sequence[Field]) -> list[BatchProblem]:
    """Inputs and labels side by side must have as many samples."""
    families: dict[tuple[Step, ...], list[Field]] = {}
    for field in fields:
        families.setdefault(field.steps[:-1], []).append(field)
    more = any(word in field.path.lower() for field in fields for word in _MORE_KEYS)
    return [
        problem
        for family in families.values()
        for problem in (*_sizes_in(family), *_labels_of_boxes(family), *_beside_tokens(family, more))
    ]


def _labels_of_boxes(family: Sequence[Field]) -> list[BatchProblem]:
    """In a target of one sample each box has a label, and a mask where there are masks."""
    boxes = next((f for f in family if f.role == "box" and not f.batched and len(f.shape) == 2), None)
    return [
        BatchProblem(
            field.path,
            f"has {field.shape[0]} entries, {boxes.path} has {boxes.shape[0]} boxes: each box needs its {what}",
            kind="size",
            field=field.field,
        )
        for field in family
        if boxes is not None and (what := _of_a_box(field)) and field.shape[0] != boxes.shape[0]
    ]


def _of_a_box(field: Field) -> str:
    """What of a box the first dimension counts, `""` if it counts other things."""
    name = field.name.lower()
    if field.role == "label" and not field.batched and field.shape and name.endswith("labels"):
        return "label"
    return "mask" if name == "masks" and not field.batched and len(field.shape) == 3 else ""


def _beside_tokens(family: Sequence[Field], more: bool) -> list[BatchProblem]:
    """`attention_mask` and `token_type_ids` have an entry for each of the `input_ids`, and so with any prefix.

    `more`: a cache, a prefix or an image is there, which a mask may count besides.
    """
    named = {field.name.lower(): field for field in family if len(field.shape) == 2}
    found = []
    for name, ids in named.items():
        if name.endswith("input_ids"):
            prefix = name.removesuffix("input_ids")
            beside = [named[prefix + o] for o in ("attention_mask", "token_type_ids") if prefix + o in named]
            found += [_other_length(field, ids) for field in beside if _is_other_length(field, ids, more)]
    return found


def _is_other_length(field: Field, ids: Field, more: bool) -> bool:
    fewer = field.shape[1] < ids.shape[1] or field.role == "type" or not more
    return field.shape[0] == ids.shape[0] > 0 < ids.shape[1] != field.shape[1] and fewer


def _other_length(field: Field, ids: Field) -> BatchProblem:
    reason = (
        f"has shape {field.shape}, {ids.path} has {ids.shape}: one entry for each token is needed; pad and truncate "
        "both together"
    )
    longer = field.shape[1] > ids.shape[1] and field.role != "type"  # what it counts may be known to the model alone
    severity = "warning" if longer else "error"
    return BatchProblem(field.path, reason, 1, None, severity, "size", field.field)  # type: ignore[arg-type]


def _sizes_in(family: Sequence[Field]) -> list[BatchProblem]:
    if any(field.name.lower().endswith(_RAGGED) for field in family):
        return []
    counted = [field for field in family if field.batched and field.shape[0] and not _is_uncounted(field, family)]
    inputs = [field for field in counted if field.role in ("image", "input", "token", "padding", "attention")]
    if not inputs:
        return []
    base = max(inputs, key=lambda field: field.role in ("image", "token"))
    return [
        BatchProblem(
            field.path,
            f"has {field.shape[0]} samples, {base.path} has {base.shape[0]}: batch sizes differ",
            kind="size",
            field=field.field,
        )
        for field in counted
        if field is not base and not _agree(base, field)
    ]


def _is_uncounted(field: Field, family: Sequence[Field]) -> bool:
    """Also the images and patches that texts of any number refer to, and positions in time, height and width."""
    if field.role == "image":
        return any(other.role == "token" for other in family)
    return field.role in _UNCOUNTED or (field.role == "position" and len(field.shape) > 2)


def _agree(base: Field, field: Field) -> bool:
    """Equal sizes; or one of the usual other ways: time first, labels of all positions in one row, one row for all."""
    size, samples = field.shape[0], base.shape[0]
    if size == samples or (field.role in ("position", "attention") and size == 1):
        return True
    sequence = len(base.shape) == 3 or base.role == "token"
    if len(base.shape) > 1 and sequence and size == base.shape[1]:
        return True
    return size > samples and size % samples == 0 and len(field.shape) == 1 and len(base.shape) > 1


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
