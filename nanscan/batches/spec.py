"""What is known of the batches: `BatchSpec` for the whole, `FieldSpec` for one field."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nanscan import paddle_objects

__all__ = ["BatchSpec", "FieldSpec"]

_CACHED_FORMS = 256


@dataclass(frozen=True)
class FieldSpec:
    """What one field of a batch must look like; what is None is not asked for.

    A field that has one with `min` or `max` is judged by these instead of by `num_classes`, `vocab_size`,
    `max_positions` and `value_range`. `FieldSpec()` says that nothing is known: only NaN and Inf are looked for.

    Args:
        dtype: a `torch.dtype`, a numpy dtype or a name such as `"float32"`.
        shape: with None (or -1) for a size that may be any. As many entries as the tensor has dimensions, or one fewer:
            then it is the shape of a sample, without the batch dimension.
        min, max: bounds of the (finite) values, both included.
        allow_nan: True if NaN is legitimate (a missing value); Inf never is.

    Raises:
        ValueError: `min` is above `max`, or a bound is NaN.
        TypeError: `dtype` names no dtype.

    >>> FieldSpec("float32", (None, 3, 32, 32), min=0.0, max=1.0).dtype
    torch.float32
    """

    dtype: Any = None
    shape: tuple[int | None, ...] | None = None
    min: float | None = None
    max: float | None = None
    allow_nan: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", None if self.dtype is None else _dtype(self.dtype))
        if self.shape is not None:
            shape = tuple(None if size is None or size < 0 else int(size) for size in self.shape)
            object.__setattr__(self, "shape", shape)
        _check_bounds("FieldSpec", self.min, self.max)

    @property
    def bounded(self) -> bool:
        """True if it has a bound."""
        return self.min is not None or self.max is not None


@dataclass(frozen=True)
class BatchSpec:
    """What the batches of a run must look like; what is None is not checked.

    Which field is what is told by its name: labels are `labels`, `targets`, `y`, `*_label` …; tokens `input_ids`,
    `token_ids`, `tokens`; images `image`, `img`, `pixel_values` …; masks `*padding_mask` (1 or True: padding) and
    `*attention_mask` (0 or False: padding). In a pair without names the first is the input (tokens if it is an
    integer matrix) and the second the target. `fields` overrides that.

    Args:
        num_classes: labels must be 0 … num_classes - 1; floating-point labels must be probabilities, 0 … 1.
        ignore_index: a label that is always allowed (several: a collection); None: there is none.
        vocab_size: token ids must be 0 … vocab_size - 1.
        max_positions: the longest sequence of tokens.
        value_range: `(low, high)`, bounds of the values of images and other floating-point inputs.
        fields: path → `FieldSpec`, such as `"image"`, `"labels.mask"`, `"1"` (the second of a tuple). A field that is
            named here must be there.

    Raises:
        ValueError: a size is not positive, or a range is empty.

    >>> import nanscan
    >>> spec = BatchSpec(num_classes=3, value_range=(0, 1))
    >>> batch = {"image": torch.rand(4, 1, 2, 2), "labels": torch.tensor([0, 1, 5, 2])}
    >>> print(*nanscan.check_batch(batch, spec))
    batch["labels"][2]: labels: sample 2 has 5, allowed 0..2 (num_classes 3); 1 of 4 bad
    """

    num_classes: int | None = field(default=None, kw_only=True)
    ignore_index: int | Collection[int] | None = field(default=-100, kw_only=True)
    vocab_size: int | None = field(default=None, kw_only=True)
    max_positions: int | None = field(default=None, kw_only=True)
    value_range: tuple[float, float] | None = field(default=None, kw_only=True)
    fields: Mapping[str, FieldSpec] | None = field(default=None, kw_only=True)
    _sources: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    _token_types: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _plans: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _quick: list[Callable[[Any], bool]] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("num_classes", "vocab_size", "max_positions"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or int(value) != value or value < 1):
                raise ValueError(f"BatchSpec: {name} must be a positive whole number or None, not {value!r}")
        if self.value_range is not None:
            low, high = self.value_range
            _check_bounds("BatchSpec: value_range", low, high)
            object.__setattr__(self, "value_range", (float(low), float(high)))
        object.__setattr__(self, "fields", _checked_fields(self.fields))
        object.__setattr__(self, "_ignored", _ignored(self.ignore_index))

    @classmethod
    def from_model(cls, model: Any, **known: Any) -> BatchSpec:
        """A spec with what can be read off a model: its vocabulary, its position table, its number of classes.

        The token table is the Embedding called `tok…`, `word…`, `wte`, `embed_tokens` …, or the only one there is;
        the position table (Embedding, parameter or buffer) `pos…`, `wpe`, `pe`; the classes are the outputs of the
        last Linear or Conv (`head`, `classifier`, `fc`, `lm_head` …); a table of token types is read too. A Hugging
        Face `model.config` adds `vocab_size`, `num_labels` and `max_position_embeddings`. What can't be told for sure
        is left None.

        Args:
            model: any module; a compiled or DDP one is looked into. Or a `paddle.nn.Layer`.
            known: arguments of `BatchSpec` that are known better, or besides.

        >>> model = torch.nn.ModuleDict({"tok": torch.nn.Embedding(10, 4), "pos": torch.nn.Embedding(4, 4)})
        >>> spec = BatchSpec.from_model(model)
        >>> spec.vocab_size, spec.max_positions, spec.num_classes
        (10, 4, None)
        """
        from nanscan.batches.models import sizes_of, takes_time_first, token_types_of

        if paddle_objects.is_layer(model):
            from nanscan.batches.paddle_layers import outline_of

            model = outline_of(model)
        found = {name: size for name, size in sizes_of(model).items() if name not in known}
        arguments: dict[str, Any] = {name: size.value for name, size in found.items()}
        spec = cls(**arguments, **known)
        spec._sources.update({name: size.source for name, size in found.items()})
        types = token_types_of(model)
        if types is not None:
            spec._token_types["rows"], spec._sources["token_types"] = types.value, types.source
        if takes_time_first(model):
            spec._sources["time_first"] = "maybe"
        return spec

    @classmethod
    def learn(cls, batches: Iterable[Any], *, base: BatchSpec | None = None, margin: float = 1.0) -> BatchSpec:
        """A spec with what some batches have in common: the dtype and shape of each field, the range of its values.

        Sizes that differ between them are free, and so are the batch size and the length of tokens and masks. Ranges
        are learnt of floating-point fields only (a class not seen yet is no drift), not of masks. Fields that not every
        batch has are left out.

        Args:
            batches: good ones, such as `itertools.islice(loader, 8)`; all are read.
            base: what is known already; its fields stay as they are. Also what these batches are checked against.
            margin: how far a range is widened on either side, as a fraction of its width.

        Raises:
            BadBatch: one of the batches is bad.
            ValueError: there is no batch.

        >>> import nanscan
        >>> spec = BatchSpec.learn([{"x": torch.rand(4, 3)}, {"x": torch.rand(2, 3)}])
        >>> spec.fields["x"].shape, nanscan.check_batch({"x": torch.rand(4, 5)}, spec)[0].reason
        ((None, 3), 'has shape (4, 5), expected (any, 3)')
        """
        from nanscan.batches.learn import learnt

        return learnt(batches, base if base is not None else cls(), margin)

    def known_of(self, name: str) -> FieldSpec | None:
        """The `FieldSpec` of a field, if there is one."""
        return (self.fields or {}).get(name)

    @property
    def ignored(self) -> tuple[int, ...]:
        """The ignore indices."""
        return self._ignored  # type: ignore[attr-defined,no-any-return]

    def source(self, name: str) -> str:
        """The module that a size was read off, '' where it was given."""
        return self._sources.get(name, "")

    def rows_of(self, role: str) -> int | None:
        """The rows of the table that ids of this role are looked up in, None where it is not known."""
        types = self._token_types.get("rows")
        return {"token": self.vocab_size, "position": self.max_positions, "type": types}.get(role)

    def plan_of(self, form: Any) -> Any:
        """What `remember` kept for batches of this form, else None."""
        return self._plans.get(form)

    def remember(self, form: Any, plan: Any) -> None:
        """Keep what has been worked out for batches of one form; a run with ever new forms does not fill the memory."""
        if len(self._plans) >= _CACHED_FORMS:
            self._plans.clear()
        self._plans[form] = plan

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}, "_quick": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __hash__(self) -> int:
        return hash((self.num_classes, self.vocab_size, self.max_positions, self.value_range))


def _checked_fields(fields: Mapping[str, FieldSpec] | None) -> dict[str, FieldSpec] | None:
    if fields is None:
        return None
    for name, item in fields.items():
        if not isinstance(item, FieldSpec):
            raise TypeError(f"BatchSpec: fields[{name!r}] must be a FieldSpec, not a {type(item).__name__}")
    return {str(name): item for name, item in fields.items()}


def _ignored(index: int | Collection[int] | None) -> tuple[int, ...]:
    if index is None:
        return ()
    try:
        return tuple(int(i) for i in index) if isinstance(index, Collection) else (int(index),)
    except (TypeError, ValueError):
        raise TypeError(f"BatchSpec: ignore_index must be a whole number, several, or None, not {index!r}") from None


def _check_bounds(what: str, low: float | None, high: float | None) -> None:
    if any(bound is not None and bound != bound for bound in (low, high)):
        raise ValueError(f"{what}: a bound is NaN")
    if low is not None and high is not None and low > high:
        raise ValueError(f"{what}: min {low:g} is above max {high:g}")


def _dtype(given: Any) -> torch.dtype:
    if isinstance(given, torch.dtype):
        return given
    if type(given).__module__ == "paddle":
        given = str(given)
    name = given.rpartition(".")[2] if isinstance(given, str) else np.dtype(given).name
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"FieldSpec: {given!r} names no dtype of PyTorch")
    return found
