"""TensorBoard: norms, clip factor, skips and per-layer norms as scalars, unhealthy steps as text."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from typing import Any

from nanscan import messages
from nanscan.integrations.versions import require
from nanscan.report import StepReport, TensorReport

__all__ = ["TensorBoardLog"]


class TensorBoardLog:
    """Writes each step's report to TensorBoard; give it to `nanscan.wrap(..., log=TensorBoardLog("runs/a"))`.

    Scalars: `nanscan/norm` (NaN or inf where a gradient is), `nanscan/clip_factor`, `nanscan/skipped_steps` (so far),
    `nanscan/loss_scale` and `nanscan/dropped_microbatches` (so far) where there are any; `grad_norm/<name>` for layers.
    Text: `nanscan/report` on each step that was not healthy, with the origin where it was looked for.

    A writer that fails costs one warning, not the step. Pickles and other processes open the same folder again: a
    writer holds locks and threads, which don't travel.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`, another object with its `add_scalar` and `add_text` (as
            tensorboardX has; `flush` and `close` are called where there are any), or the path of a folder.
        every: scalars are written on every so many steps, >= 1; steps that were not healthy always are.
        layers: True: a norm for each parameter; a number n >= 1: one for each module n levels deep, over all its
            parameters; False: none.
        layers_every: those are written on every so many steps, >= 1 (a model has hundreds).

    Raises:
        TypeError: if `writer` is none of these, or a number is no whole one.
        ValueError: if a number is too small.
        ImportError: for a path, without the tensorboard package.

    >>> import tempfile, torch, nanscan
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> log = TensorBoardLog(tempfile.mkdtemp())
    >>> optimizer = nanscan.wrap(torch.optim.SGD([weight], lr=0.1), log=log)
    >>> weight.grad = torch.ones(1); optimizer.step()
    >>> log.close()
    """

    def __init__(self, writer: Any, *, every: int = 1, layers: bool | int = True, layers_every: int = 50) -> None:
        for name, value in (("every", every), ("layers_every", layers_every), ("layers", layers or 1)):
            if not isinstance(value, int):
                raise TypeError(f"{name} must be a whole number of at least 1, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.every = every
        self.layers = layers
        self.layers_every = layers_every
        self.skipped_steps = 0
        self.dropped_microbatches = 0
        self._warned = False
        self._kind: type | None = None
        self._pid = os.getpid()
        if isinstance(writer, (str, os.PathLike)):
            self._folder: str | None = os.path.abspath(writer)
            self._writer = self._opened()
        elif (
            not isinstance(writer, type)
            and callable(getattr(writer, "add_scalar", None))
            and hasattr(writer, "add_text")
        ):
            folder = getattr(writer, "log_dir", None) or getattr(writer, "logdir", None)
            self._folder = None if folder is None else os.path.abspath(folder)
            self._writer, self._kind = writer, type(writer)
        else:
            raise TypeError(
                "writer must be a SummaryWriter (an object with add_scalar and add_text) or the path of a folder, got "
                f"{f'the class {writer.__name__}' if isinstance(writer, type) else type(writer).__name__}"
            )

    def __call__(self, report: StepReport) -> None:
        """Write one step's report."""
        self.skipped_steps += report.skipped
        self.dropped_microbatches += len(report.dropped)
        try:
            if self._writer is None or self._pid != os.getpid():
                self._writer, self._pid = self._opened(), os.getpid()
            if self._writer is not None:
                self._write(report)
        except Exception as error:  # whatever a writer raises, the step was taken
            self._complain(f"can't be written ({type(error).__name__}: {error})")

    def close(self) -> None:
        """Write everything to disk and close the writer; the next report opens the folder again."""
        if self._writer is not None and self._pid == os.getpid():
            _call(self._writer, "close")
        self._writer = None

    def _opened(self) -> Any:
        if self._folder is None:
            self._complain("has no log_dir to be opened again in this process")
            return None
        if self._kind is None:
            require("tensorboard", "2.10", "3", extra="tensorboard")
            from torch.utils.tensorboard import SummaryWriter

            self._kind = SummaryWriter
        return self._kind(self._folder)

    def _write(self, report: StepReport) -> None:
        healthy = report.finite and not (report.skipped or report.parameters or report.dropped or report.spike)
        if report.step % self.every == 0 or not healthy:
            for name, value in self._scalars(report).items():
                self._add(f"nanscan/{name}", value, report)
        if self.layers and report.step % self.layers_every == 0:
            for name, value in layer_norms(report.tensors, self.layers).items():
                self._add(f"grad_norm/{name}", value, report)
        if not healthy:
            self._writer.add_text("nanscan/report", describe(report), report.step)
            _call(self._writer, "flush")  # it may be the last one

    def _scalars(self, report: StepReport) -> dict[str, float]:
        values = {"norm": report.norm, "clip_factor": report.clip_factor, "skipped_steps": self.skipped_steps}
        if report.loss_scale != 1.0:
            values["loss_scale"] = report.loss_scale
        if report.microbatches:
            values["dropped_microbatches"] = self.dropped_microbatches
        return values

    def _add(self, tag: str, value: float, report: StepReport) -> None:
        self._writer.add_scalar(tag, value, report.step, walltime=report.time or None)

    def _complain(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            where = "" if self._folder is None else f" {self._folder}"
            text = f"nanscan: the TensorBoard log{where} {what}; training goes on without it."
            messages.warn(text)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_writer": None, "_pid": 0}

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorBoardLog:
        return self


def _call(writer: Any, name: str) -> None:
    method = getattr(writer, name, None)
    if method is not None:
        method()


def layer_norms(rows: tuple[TensorReport, ...], depth: bool | int) -> dict[str, float]:
    """The norms of gradients by name: each parameter's, or of all those of one module.

    Args:
        rows: of a report.
        depth: True: each parameter; a number: the first so many parts of the names.

    >>> row = TensorReport("enc.0.weight", (2,), "float32", "cpu", 3.0, 1.0, 0, 0, None, kind="grad")
    >>> other = TensorReport("enc.1.weight", (2,), "float32", "cpu", 4.0, 1.0, 0, 0, None, kind="grad")
    >>> layer_norms((row, other), True), layer_norms((row, other), 1)
    ({'enc.0.weight': 3.0, 'enc.1.weight': 4.0}, {'enc': 5.0})
    """
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.kind != "grad":
            continue
        name = row.name.split(" (= ")[0]
        if depth is not True:
            name = ".".join(name.split(".")[:-1][:depth]) or name
        found[name].append(row.norm)
    return {name: _norm(norms) for name, norms in found.items()}


def _norm(norms: list[float]) -> float:
    return math.nan if any(map(math.isnan, norms)) else math.hypot(*norms)


def describe(report: StepReport) -> str:
    """A step that was not healthy, as Markdown."""
    lines = [f"**step {report.step}: {report.action}**"]
    if report.microbatch is not None:
        lines.append(f"it came with micro-batch {report.microbatch} of {report.microbatches}")
    if report.dropped:
        which = ", ".join(map(str, report.dropped))
        lines.append(f"dropped micro-batches {which} of {report.microbatches}")
    if report.spike is not None:
        lines.append(report.spike.describe())
    rows = (*report.bad, *report.buffers, *report.parameters)
    lines += [row.describe() for row in rows[:20]]
    lines += [f"and {len(rows) - 20} more"] if len(rows) > 20 else []
    if report.origin is not None:
        lines.append(report.origin.one_line())
        lines += [f"hint: {report.origin.hint}"] if report.origin.hint else []
    if report.scale_note:
        lines.append(report.scale_note)
    return "\n\n- ".join(lines)
