"""What is known of the op that made the first NaN or Inf: `Origin` for people and logs, `OpEvent` for the hints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

__all__ = ["OpEvent", "Origin", "TensorRange"]


@dataclass(frozen=True)
class TensorRange:
    """What one input or output of an op looked like.

    Attributes:
        name: the parameter's, buffer's or argument's name where there is one (`"encoder.weight"`, `"self"`), else its
            position (`"input 0"`, `"output 1"`, `"grad_output 0"`).
        shape: a tuple of ints.
        dtype: without the `torch.` prefix, such as `"float16"`.
        device: such as `"cpu"` or `"cuda:0"`.
        min: the smallest finite element, None if there is none (or it is complex).
        max: the largest finite element, None if there is none.
        nan_count: how many elements are NaN.
        inf_count: how many elements are Inf or -Inf.
        first_bad: index of the first NaN or Inf, None if there is none.
        value_at: the element that goes with the origin's first bad one (same place after broadcasting), None where no
            single element does.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"
    min: float | None = None
    max: float | None = None
    nan_count: int = 0
    inf_count: int = 0
    first_bad: tuple[int, ...] | None = None
    value_at: float | str | None = None

    def describe(self) -> str:
        """One line: name, dtype, shape, range and what is bad.

        >>> TensorRange("self", (2,), "float32", min=0.0, max=4.0, value_at=0.0).describe()
        'self: float32 [2], 0 to 4, value there 0'
        """
        parts = [f"{self.name}: {self.dtype} {list(self.shape)}"]
        if self.min is not None and self.max is not None:
            parts.append(f"{self.min:.6g} to {self.max:.6g}")
        if self.nan_count or self.inf_count:
            first = "" if self.first_bad is None else f" (first at {list(self.first_bad)})"
            parts.append(f"{self.nan_count} NaN, {self.inf_count} Inf{first}")
        if self.value_at is not None:
            value = self.value_at if isinstance(self.value_at, str) else f"{self.value_at:.6g}"
            parts.append(f"value there {value}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Origin:
    """Where the first NaN or Inf was made. Frozen, picklable, holds no tensors.

    Attributes:
        kind: `"nan"` or `"inf"`: what the op made.
        phase: `"forward"` or `"backward"`.
        op: the operator as PyTorch names it: `"aten.log"`, in backward the autograd node (`"SqrtBackward0"`); `"input"`
            or `"parameter"` when the bad value came in from outside; `"loss"` when a loss function that was not traced
            made it.
        module: dotted path of the module that ran it (`"encoder.layers.3.norm"`), `""` for the model itself, None
            outside of any. For `"input"` and `"parameter"`: of the module that read it.
        file: the user's own source file; in backward that of the forward call. None if unknown.
        line: its line number, None if unknown.
        code: the source text of that line, `""` if it can't be read.
        inputs: what went in (in backward: the incoming gradients, then what the forward op had saved).
        outputs: what came out.
        name: for `"parameter"` and `"input"` the name of the tensor; else of the parameter that the op read, if any.
        note: what else is to be said, such as which op turned an Inf gradient into NaN.
        hint: the usual cause and the remedy, None if nothing is known.

    >>> origin = Origin("nan", "forward", "aten.log", "head", "train.py", 12, "y = x.log()")
    >>> origin.one_line()
    "NaN made by aten.log in 'head' at train.py:12: y = x.log()"
    """

    kind: str
    phase: str
    op: str
    module: str | None = None
    file: str | None = None
    line: int | None = None
    code: str = ""
    inputs: tuple[TensorRange, ...] = ()
    outputs: tuple[TensorRange, ...] = ()
    name: str | None = None
    note: str | None = None
    hint: str | None = None

    def one_line(self) -> str:
        """Who made it and where, in one line."""
        kind = {"nan": "NaN", "inf": "Inf"}[self.kind]
        text = f"{kind} {self._made()}"
        if self.module is not None:
            text += f" in '{self.module}'" if self.module else " in the model"
        if self.file is not None:
            text += f" at {self.file}:{self.line}"
        return f"{text}: {self.code}" if self.code else text

    def _made(self) -> str:
        if self.op in ("input", "parameter"):
            return f"came in with {self.op} '{self.name}'"
        if self.op == "loss":
            return "made by the loss function (not traced)"
        return f"made by {self.op}" + (" (backward)" if self.phase == "backward" else "")

    def describe(self) -> str:
        """Several lines for people: who, where, what went in and out, what it means."""
        lines = [self.one_line()]
        lines += [f"  in   {item.describe()}" for item in self.inputs]
        lines += [f"  out  {item.describe()}" for item in self.outputs]
        lines += [f"  note {self.note}"] if self.note else []
        lines += [f"  hint {self.hint}"] if self.hint else []
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.describe()

    def _repr_html_(self) -> str:  # notebooks call it
        from nanscan.reporting.html import origin_html

        return origin_html(self)

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain Python data (tuples as lists); floats are finite except in `value_at`."""
        return {item.name: _plain(getattr(self, item.name)) for item in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Origin:
        """The inverse of `to_dict` and of its JSON; unknown keys are left out.

        >>> origin = Origin("inf", "forward", "aten.exp", inputs=(TensorRange("self", (2,), "float16", max=12.0),))
        >>> Origin.from_dict(origin.to_dict()) == origin
        True
        """
        known = {item.name for item in dataclasses.fields(cls)}
        values = {name: value for name, value in data.items() if name in known}
        for name in ("inputs", "outputs"):
            values[name] = tuple(_range(item) for item in values.get(name, ()))
        return cls(**values)


@dataclass
class OpEvent:
    """An op that made a NaN or Inf, with live (detached) tensors, as the hints look at it; never kept.

    Attributes:
        op: as in `Origin.op`.
        phase: `"forward"` or `"backward"`.
        kind: `"nan"` or `"inf"`.
        inputs: the tensors that went in, in order, also integer ones; in backward the incoming gradients (None where
            there was none).
        outputs: what came out; in backward the gradients for the forward op's inputs (None where there is none).
        output: which of `outputs` is bad.
        first_bad: index of the first bad element in it.
        args: the op's positional arguments as called (forward only).
        kwargs: its keyword arguments.
        saved: in backward: what the forward op saved, by name (`"self"`, `"result"`, `"dim"`, `"exponent"`, …).
        module: dotted path, None outside of any module.
        module_type: class name of that module, such as `"BatchNorm1d"`; None outside of any.
        code: the user's source line.
        zero_gradient: in backward: True if the incoming gradient is exactly 0 at the bad element (the `where` trick).
    """

    op: str
    phase: str
    kind: str
    inputs: tuple[Tensor | None, ...] = ()
    outputs: tuple[Tensor | None, ...] = ()
    output: int = 0
    first_bad: tuple[int, ...] = ()
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    saved: dict[str, Any] = field(default_factory=dict)
    module: str | None = None
    module_type: str | None = None
    code: str = ""
    zero_gradient: bool = False


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, TensorRange):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    return value


def _range(item: Mapping[str, Any]) -> TensorRange:
    known = {each.name for each in dataclasses.fields(TensorRange)}
    values = {name: value for name, value in item.items() if name in known}
    for name in ("shape", "first_bad"):
        values[name] = None if values.get(name) is None else tuple(values[name])
    if values.get("value_at") in ("NaN", "Infinity", "-Infinity"):  # as strict JSON writes them
        values["value_at"] = float(values["value_at"])
    return TensorRange(**values)
