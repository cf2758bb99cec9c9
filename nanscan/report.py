"""What a scan and a step found, as plain data. A leaf: it describes, it decides nothing and imports no torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from nanscan.clipping.record import Spike
from nanscan.report_json import parsed, plain, strict
from nanscan.report_rows import Label, TensorReport, tensor_report

if TYPE_CHECKING:
    from typing_extensions import Self

    from nanscan.engine.result import EngineScan

__all__ = ["Label", "Report", "StepReport", "TensorReport"]

_TOTALS = frozenset({"finite", "norm", "finite_norm", "inf_norm", "nan_count", "inf_count", "numel"})


class Source(Protocol):
    """Where a lazy report gets a field from that it does not hold yet."""

    provides: ClassVar[frozenset[str]]

    def field(self, name: str) -> Any: ...


@dataclass(frozen=True)
class Report:
    """What one scan found, in total and per tensor. Frozen and picklable; fields are filled when first read.

    Attributes:
        finite: True if no element of any tensor is NaN or Inf.
        norm: 2-norm over all elements, each tied tensor once; NaN if an element is NaN, inf if one is Inf and none NaN.
        finite_norm: 2-norm over the finite elements only.
        inf_norm: largest magnitude of the finite elements (0.0 if there are none).
        nan_count: how many elements are NaN (a complex element counts once).
        inf_count: how many elements are Inf and not NaN.
        numel: how many elements were read.
        tensors: one `TensorReport` for each tensor, in the order given. Made each time it is read (microseconds a row):
            keep it where you need it more than once.
        bad: those of `tensors` that hold a NaN or Inf.
        origin: where the first NaN or Inf was made, if that was looked for; else None.

    >>> import nanscan, torch
    >>> report = nanscan.scan({"w": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0, float("nan")])})
    >>> report.finite, report.finite_norm, [row.name for row in report.bad]
    (False, 5.0990195135927845, ['b'])
    """

    finite: bool
    norm: float
    finite_norm: float
    inf_norm: float
    nan_count: int
    inf_count: int
    numel: int
    tensors: tuple[TensorReport, ...]
    bad: tuple[TensorReport, ...]
    origin: Any = None

    @classmethod
    def from_scan(
        cls,
        scan: EngineScan,
        labels: Sequence[Label],
        places: Mapping[int, tuple[int, ...]] | None = None,
        **known: Any,
    ) -> Self:
        """A report over an engine's result, without copying the rows yet.

        Args:
            scan: the engine's result.
            labels: the name and look of the tensor at each position that was scanned.
            places: position -> index of the first bad element, where it isn't the row-major index in the shape
                (sparse tensors).
            known: fields that are known already, such as `step`.
        """
        return cls.from_source(ScanSource(scan, labels, places), **known)

    @classmethod
    def from_source(cls, source: Source, **known: Any) -> Self:
        """A report whose fields come from `known`, else from `source` when they are read."""
        self = object.__new__(cls)
        fields = self.__dict__
        fields.update(known)
        fields["_source"] = source
        return self

    def __getattr__(self, name: str) -> Any:
        fields, item = self.__dict__, self.__dataclass_fields__.get(name)
        if item is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        source = fields.get("_source")
        value = source.field(name) if source is not None and name in source.provides else _default(item)
        if name != "tensors":  # a table of thousands of rows is made anew each time: a history of them must stay small
            fields[name] = value
        return value

    def __getstate__(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def without_table(self) -> Self:
        """A copy whose `tensors` holds the bad rows only; totals and `bad` stay. It keeps no engine result alive."""
        own = self.__dict__
        bad = () if self.finite else self.bad
        if "_source" in own:
            for name in own["_source"].provides - own.keys() - {"bad", "tensors"}:
                getattr(self, name)
        slim = object.__new__(type(self))
        slim.__dict__.update(own)
        slim.__dict__.pop("_source", None)
        slim.__dict__.update(bad=bad, tensors=bad)
        return slim

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain Python data, rows as dicts; NaN and Inf stay floats."""
        return {item.name: plain(getattr(self, item.name)) for item in dataclasses.fields(self)}

    def to_json(self, *, tensors: bool = True) -> str:
        """One line of strict JSON. Non-finite floats become the strings "NaN", "Infinity", "-Infinity".

        Args:
            tensors: False leaves the table of all tensors out (the bad ones stay).
        """
        names = [name for name in self.__dataclass_fields__ if tensors or name != "tensors"]
        return json.dumps({name: strict(plain(getattr(self, name))) for name in names}, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict` and of a parsed `to_json` line; a line without its table gets the bad rows.

        Raises:
            ValueError: if a field is missing that has no default.

        >>> report = Report(True, 5.0, 5.0, 4.0, 0, 0, 2, (), ())
        >>> Report.from_dict(report.to_dict()) == report
        True
        >>> import json
        >>> Report.from_dict(json.loads(report.to_json())) == report
        True
        """
        fields = {item.name: item for item in dataclasses.fields(cls)}
        values = {name: parsed(name, value) for name, value in data.items() if name in fields}
        values.setdefault("tensors", values.get("bad", ()))
        missing = [name for name, item in fields.items() if _required(item) and name not in values]
        if missing:
            raise ValueError(f"not a {cls.__name__}: {', '.join(missing)} missing; keys found: {', '.join(data)}")
        return cls(**values)

    def describe(self, limit: int = 5) -> str:
        """One line: the bad tensors, each with its counts and first index, at most `limit` of them by name.

        If there are none: the norm, and the three tensors that have most of it.
        A bad loss is always among them: it tells a fault of the forward pass from one of the backward pass.
        """
        if not self.bad:
            most = sorted(self.tensors, key=lambda row: -row.norm)[:3] if len(self.tensors) > 1 else []
            largest = ", ".join(f"{row.name!r} {row.norm:.6g}" for row in most)
            more = f"; most in {largest}" if most else ""
            return f"all finite, norm {self.norm:.6g} over {self.numel} elements{more}"
        loss = [row for row in self.bad[limit:] if row.kind == "loss"][:1]
        clauses = [row.describe() for row in (*self.bad[: limit - len(loss)], *loss)]
        left = len(self.bad) - limit
        return "; ".join(clauses) + (f"; and {left} more" if left > 0 else "")

    def _repr_html_(self) -> str:  # notebooks call it
        from nanscan.reporting.html import report_html

        return report_html(self)


@dataclass(frozen=True)
class StepReport(Report):
    """What the guard found at one optimizer step and what it did about it.

    Attributes:
        step: which call of `optimizer.step()` this was, from 0.
        clip_factor: what the gradients were multiplied by for `clip_norm` (1.0 = not clipped). Where each unit has a
            limit of its own (agc): the norm of all gradients after clipping by that before.
        clip_limit: the norm that was allowed, where it follows the run (`AdaptiveClip`, `on_spike="clip"`); else None.
        spike: the `Spike` that this step was, where `on_spike` looks for them; None if it was none.
        loss: what was given to `observe` for this step, of several the mean; else the mean of what was given to
            `check_microbatch`, without the dropped ones; None if nothing was.
        skipped: True if the optimizer did not step.
        action: `"step"`, `"skip"`, `"raise"`, `"zero"` or `"warn"`.
        time: when, in seconds since the epoch.
        buffers: buffers of the model that hold a NaN or Inf; looked at when a step is skipped or a micro-batch dropped.
        loss_scale: what the loss was multiplied by, as far as a gradient scaler has told; else 1.0.
        scale_note: on a bad step with a `nanscan.GradScaler`: what the scale has to do with it.
        microbatches: how many `check_microbatch` has seen for this step; 0: none was checked.
        dropped: the indices of those that were given up.
        microbatch: index of the one that brought the NaN or Inf of this step, where that is known; else None.
        parameters: parameters and optimizer state that hold a NaN or Inf after the step; looked at every
            `check_params_every` steps, and when a step is skipped.

    Norms, counts and rows are of the gradients, unscaled, before clipping; the loss given to `observe` is a row too.

    >>> StepReport(True, 5.0, 5.0, 4.0, 0, 0, 2, (), (), step=7, clip_factor=0.2).skipped
    False
    """

    # default_factory, not a default: a class attribute would hide a field that is still to be filled.
    step: int = 0
    time: float = 0.0
    clip_factor: float = field(default_factory=lambda: 1.0)
    clip_limit: float | None = field(default_factory=lambda: None)
    spike: Spike | None = field(default_factory=lambda: None)
    loss: float | None = field(default_factory=lambda: None)
    skipped: bool = field(default_factory=lambda: False)
    action: str = field(default_factory=lambda: "step")
    buffers: tuple[TensorReport, ...] = field(default_factory=tuple)
    parameters: tuple[TensorReport, ...] = field(default_factory=tuple)
    microbatches: int = field(default_factory=int)
    dropped: tuple[int, ...] = field(default_factory=tuple)
    microbatch: int | None = field(default_factory=lambda: None)
    loss_scale: float = field(default_factory=lambda: 1.0)
    scale_note: str = field(default_factory=str)


class ScanSource:
    """Fields of a report from an engine's result and the labels of what was scanned."""

    __slots__ = ("labels", "places", "scan")
    provides: ClassVar[frozenset[str]] = _TOTALS | {"bad", "tensors"}

    def __init__(
        self, scan: EngineScan, labels: Sequence[Label], places: Mapping[int, tuple[int, ...]] | None = None
    ) -> None:
        self.scan = scan
        self.labels = labels
        self.places = places

    def field(self, name: str) -> Any:
        """The value of the field called `name`."""
        if name in _TOTALS:
            return getattr(self.scan, name)
        rows = self.scan.bad_rows() if name == "bad" else self.scan.rows()
        return tuple(tensor_report(row, self.labels, self.places) for row in rows)


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default_factory is dataclasses.MISSING:
        raise AttributeError(f"field {item.name!r} was not filled")
    return item.default_factory()


def _required(item: dataclasses.Field[Any]) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
