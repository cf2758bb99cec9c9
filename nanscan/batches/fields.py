"""The fields of a batch: what each is called, whether its first dimension counts samples, and what it is for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanscan.batches.walk import LABELS, Leaf, Step, dotted, path_of, shape_of
from nanscan.report_rows import unravel

__all__ = ["Field", "Placed", "families", "fields_of", "is_int"]

_LABELS = re.compile(LABELS)
_TOKENS = re.compile(r"(.*_)?(input_ids|token_ids)|tokens")
_TEXT = re.compile(r"ids|idx|text|src|tgt|source|x|inputs?")  # tokens only where they are integers (batch, length)
_POSITIONS = re.compile(r"(.*_)?position_ids|positions")
_PADDING = re.compile(r"(.*_)?(padding_mask|pad_mask)")
_ATTENTION = re.compile(r"(.*_)?attention_mask")
_SCORES = re.compile(r"(.*_)?(attn_mask|src_mask|tgt_mask|memory_mask)")  # added to scores where it is floating-point
_TYPES = re.compile(r"(.*_)?(token_type_ids|segment_ids|type_ids)")
_LENGTHS = re.compile(r"(?!.*(target|label|tgt|trg)).*?(lengths?|lens?|seq_?len)")
_BOXES = re.compile(r"(.*_)?b?box(es)?")
_MAPS = re.compile(r"(.*_)?(masks?|segmentation|seg|label_map)")  # targets where they lie upon an image
_IMAGE = re.compile(r"(.*_)?(images?|imgs?|pixels?|pixel_values|photos?|pictures?)(_\d+)?")
_AUDIO = re.compile(r"(.*_)?(audios?|waveforms?|wavs?|speech|signals?)|input_values")
_INPUT = re.compile(r"x|xs|inputs?|data|features?|image\w*|img\w*|pixel\w*")
_ADDITIVE = re.compile(r".*(mask|bias).*")
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


@dataclass(frozen=True)
class Field:
    """One tensor's place in the batch; made once for each form (nesting, dtypes, shapes) of batch.

    Attributes:
        steps: how to get to it.
        name: what messages call it: its last key, else `labels` for the targets of a pair, else its path.
        field: its dotted path for `BatchSpec(fields=…)`, without the index of a list of samples.
        batched: True if its first dimension counts samples; False for a sample of its own and for 0-dim.
        role: `"label"`, `"token"`, `"type"`, `"position"`, `"padding"`, `"attention"`, `"scores"`, `"image"`,
            `"audio"`, `"input"`, `"lengths"`, `"box"` or `""`.
        additive: True if `-inf` in it is legitimate: a mask or bias that is added to scores.
    """

    steps: tuple[Step, ...]
    name: str
    field: str
    batched: bool
    role: str
    additive: bool
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def path(self) -> str:
        return path_of(self.steps)

    @property
    def place(self) -> tuple[int, ...]:
        """Where it stands in the lists under its name: `(1,)` for `batch["input_ids"][1]`."""
        named = [i for i, (kind, key) in enumerate(self.steps) if kind == "a" or isinstance(key, str)]
        return tuple(int(key) for _, key in self.steps[named[-1] + 1 :]) if named else ()

    def at(self, index: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """The path of the sample that holds element `index`, and the index within that sample."""
        place = tuple(index)
        return (f"{self.path}[{place[0]}]", place[1:]) if self.batched else (self.path, place)

    def first(self, bad: Tensor) -> tuple[int, tuple[int, ...], str, tuple[int, ...]]:
        """How many elements are marked, the index of the first, and what `at` says of it."""
        index = unravel(int(bad.reshape(-1).to(torch.uint8).argmax()), bad.shape)
        return int(bad.sum()), index, *self.at(index)


Placed = tuple[int, Field]  # a field, and which leaf of the batch it is


def families(placed: Sequence[Placed]) -> dict[tuple[Step, ...], dict[str, Placed]]:
    """The fields that lie side by side in one dict, tuple or object: by its place, and by their names in lower case."""
    found: dict[tuple[Step, ...], dict[str, Placed]] = {}
    for i, field in placed:
        found.setdefault(field.steps[:-1], {})[field.name.lower()] = (i, field)
    return found


def is_int(dtype: torch.dtype) -> bool:
    """True for the integer dtypes (bool is none)."""
    return dtype in _INTEGERS


def fields_of(leaves: Sequence[Leaf]) -> list[Field]:
    """A `Field` for each leaf, in order."""
    alone = _sample_lists(leaves)
    plains = [tuple(step for i, step in enumerate(steps) if steps[:i] not in alone) for steps, _ in leaves]
    packed = {steps[:-1] for steps, _ in leaves if steps and steps[-1] == ("a", "batch_sizes")}  # PackedSequence
    pair = {plain[0] for plain in plains if plain} in ({("t", 0), ("t", 1)}, {("l", 0), ("l", 1)})
    made = []
    for plain, (steps, value) in zip(plains, leaves, strict=True):
        batched = value.dim() > 0 and plain == steps and steps[:-1] not in packed and not value.is_nested
        made.append(_field(steps, plain, value, batched, pair))
    return made if any(field.role == "label" for field in made) else [_as_target(field, made) for field in made]


def _as_target(field: Field, fields: Sequence[Field]) -> Field:
    """A mask of the size of an image is what is to be learnt, in a batch without labels."""
    images = [other for other in fields if other.role == "image" and len(other.shape) > 2]
    fits = any(other.shape[-2:] == field.shape[-2:] for other in images)
    if not fits or len(field.shape) < 3 or field.dtype is torch.bool or not _MAPS.fullmatch(field.name.lower()):
        return field
    return dataclasses.replace(field, role="label", additive=False)


def _field(steps: tuple[Step, ...], plain: tuple[Step, ...], value: Tensor, batched: bool, pair: bool) -> Field:
    key = next((str(key) for kind, key in reversed(plain) if kind == "a" or isinstance(key, str)), "")
    place = plain[0][1] if plain and pair and len(plain) <= 1 and not key else None
    role = _role(key, value, place) if key else _role_by_place(value, place, root=not steps)
    name = key or ("labels" if role == "label" else path_of(steps))
    additive = bool(_ADDITIVE.fullmatch(key.lower()))
    return Field(steps, name, dotted(plain), batched, role, additive, value.dtype, shape_of(value))


def _role(key: str, value: Tensor, place: int | None) -> str:
    """By name; a name that fits but a dtype that does not is no match."""
    name, whole = key.lower(), is_int(value.dtype)
    if whole and value.dim() == 1 and _LENGTHS.fullmatch(name):
        return "lengths"
    if _BOXES.fullmatch(name) and value.dim() in (2, 3) and value.shape[-1] == 4 and value.dtype is not torch.bool:
        return "box"
    if name.startswith(("num_", "n_", "len_")) or name.endswith(("_len", "_length", "_lengths")):
        return ""
    if whole and (_TOKENS.fullmatch(name) or (_TEXT.fullmatch(name) and _is_text(value))):
        return "token"
    if whole and _TYPES.fullmatch(name):
        return "type"
    if whole and _POSITIONS.fullmatch(name):
        return "position"
    if _PADDING.fullmatch(name):
        return "padding"
    if _ATTENTION.fullmatch(name):
        return "attention"
    if _SCORES.fullmatch(name) and value.is_floating_point() and value.dim() > 1:
        return "scores"
    if _LABELS.fullmatch(name):
        return "label" if value.dtype is not torch.bool else ""
    if _IMAGE.fullmatch(name) and value.dim() >= 2:
        return "image"
    if _AUDIO.fullmatch(name) and value.is_floating_point() and value.dim() in (2, 3):
        return "audio"
    return "input" if _INPUT.fullmatch(name) else ""


def _role_by_place(value: Tensor, place: int | None, root: bool) -> str:
    """By place: of a pair the first is the input, the second the target; a batch that is one tensor is an input."""
    if place == 1:
        pixels = value.dtype is torch.uint8 and value.dim() == 4
        return "" if value.dtype is torch.bool or pixels else "label"
    if place == 0 or root:
        return "token" if is_int(value.dtype) and _is_text(value) else "input"
    return ""


def _is_text(value: Tensor) -> bool:
    return value.dtype in (torch.int32, torch.int64) and value.dim() == 2


def _sample_lists(leaves: Sequence[Leaf]) -> set[tuple[Step, ...]]:
    """The places of lists that hold one entry per sample (detection), as against a list of batched tensors."""
    lists: dict[tuple[Step, ...], list[Leaf]] = {}
    for steps, value in leaves:
        for i, step in enumerate(steps):
            if step[0] == "l" or (step[0] == "t" and i):
                lists.setdefault(steps[:i], []).append((steps[i:], value))
    sizes = {place: 1 + max(steps[0][1] for steps, _ in items) for place, items in lists.items()}
    return {place for place, items in lists.items() if _one_per_sample(place, items, sizes, lists)}


def _one_per_sample(
    place: tuple[Step, ...],
    items: list[Leaf],
    sizes: dict[tuple[Step, ...], int],
    lists: dict[tuple[Step, ...], list[Leaf]],
) -> bool:
    beside = [o for o in sizes if o != place and len(o) == len(place) and sizes[o] == sizes[place]]
    if items[0][0][0][0] == "t":  # tuples count samples only where detection makes them: tuple(zip(*samples))
        return _each_has_boxes(items) or (_all_pictures(items) and any(_each_has_boxes(lists[o]) for o in beside))
    inner = {steps[1][0] if len(steps) > 1 else "" for steps, _ in items}
    if inner <= {"k", "a"} and inner:
        return bool(set.intersection(*_keys(items)))
    if inner == {"t"}:  # a list of (input, target) tuples: what a collate function that does nothing gives
        return True
    if inner != {""} or not place:
        return False
    shapes = {shape_of(value) for _, value in items}
    return len(shapes) > 1 or (_all_pictures(items) and bool(beside))


def _keys(items: list[Leaf]) -> list[set[Step]]:
    """The keys of each entry."""
    keys: dict[int, set[Step]] = {}
    for steps, _ in items:
        keys.setdefault(steps[0][1], set()).update(steps[1:2])
    return [*keys.values()]


def _each_has_boxes(items: list[Leaf]) -> bool:
    """Is each entry the target of one sample: a dict with its boxes?"""
    found = {steps[0][1] for steps, value in items if steps[1:] == (("k", "boxes"),) and value.dim() == 2}
    return len(found) == len(_keys(items))


def _all_pictures(items: list[Leaf]) -> bool:
    shapes = [(len(steps), shape_of(value)) for steps, value in items]
    return all(depth == 1 and len(shape) == 3 and shape[0] in (1, 3, 4) for depth, shape in shapes)
