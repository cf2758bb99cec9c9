"""Who made the NaN or Inf: looks at the ops of a batch in which one was found, in the order in which they ran."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanscan.origin.frames import Place
from nanscan.origin.modules import ModuleStack, storage_key
from nanscan.origin.ops import Kind, drops_values, ends_in_inf, fills_with_inf, never_masks, tensors_in
from nanscan.origin.ranges import Counts, bad_counts, has_plus_inf
from nanscan.origin.record import Origin
from nanscan.origin.torch_private import WeakStorage, plain
from nanscan.origin.writing import forward_origin, input_origin, overwritten

__all__ = ["Call", "Finding", "Judge", "Run"]

MAX_FINDINGS = 32  # later ones are consequences in practice; each costs a description


class Call(NamedTuple):
    """Where and by whom an op was called; kept for as long as the trace, without tensors."""

    func: Any
    place: Place
    module: nn.Module | None


class Run(NamedTuple):
    """One op that ran, with its tensors; kept until its outputs were scanned."""

    call: Call
    kind: Kind
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any
    sequence: int
    # What it overwrote: tensor, its counts (None for running statistics, on which the output does not depend), a copy.
    before: tuple[tuple[Tensor, Counts | None, Tensor | None], ...] = ()
    frame: FrameType | None = None  # that called it: what the user's variables are called

    def inputs(self) -> list[Tensor]:
        return list(tensors_in((*self.args, *self.kwargs.values())))


@dataclass(eq=False)
class Finding:
    """Something that was found, and whether it counts.

    Attributes:
        origin: what is known of it.
        counts: False for an Inf that may be legitimate (a mask), until it does harm.
        sequence: of the autograd node of the op, -1 if unknown.
        consumed: an op took it and gave something finite.
        dropped: an op chose other elements (`where`), and no other op has consumed it.
        escaped: an op that does not choose consumed it.
        outside: an Inf that came in from outside: it counts where it does harm, never for being left as a result.
        mask: such a one that is -Inf only, and may be a mask: it counts where no mask has any business.
        ends: the memory (by its key) in which it stands and from which no op has taken it on or thrown it away.
    """

    origin: Origin
    counts: bool
    order: int
    sequence: int = -1
    consumed: bool = False
    dropped: bool = False
    escaped: bool = False
    outside: bool = False
    mask: bool = False
    ends: set[int] = field(default_factory=set)

    @property
    def thrown_away(self) -> bool:
        """True if its elements were not chosen (a `where` took the other branch) and not used elsewhere."""
        return self.dropped and not (self.escaped or self.ends)

    @property
    def is_origin(self) -> bool:
        """Whether it stands, as far as is known now."""
        return self.counts and not self.thrown_away


@dataclass(eq=False)
class Judge:
    """The findings of a trace and which memory holds what they made."""

    modules: ModuleStack
    findings: list[Finding] = field(default_factory=list)
    _holders: dict[int, tuple[Any, list[Finding]]] = field(default_factory=dict)
    _outside: dict[int, Finding] = field(default_factory=dict)
    _unwritten: dict[int, tuple[Any, Call]] = field(default_factory=dict)

    @property
    def watching(self) -> bool:
        """True if it matters what later ops do with what was found."""
        return any(not finding.mask for finding in self.findings)

    def origins(self) -> list[Origin]:
        """Those that count, first in time first."""
        return [f.origin for f in sorted(self.findings, key=lambda f: f.order) if f.is_origin]

    # ---- forward -----------------------------------------------------------------------------------------------------

    def batch(self, runs: Iterable[Run], bad: Callable[[Tensor], Counts | None]) -> None:
        """Look at ops in order; `bad` gives the counts of an output, None if it is finite."""
        for run in runs:
            found = [(i, t, c) for i, t, c in _outputs(run, bad) if not _was_bad(run, t)]
            if found:
                self._judge(run, *found[0])
            elif self._holders:
                self._absorbed(run)

    def _judge(self, run: Run, position: int, output: Tensor, counts: Counts) -> None:
        inputs = self._bad_inputs(run)
        self._inf_from_outside(run, inputs)
        sources = [f for tensor, _ in inputs for f in self.made(tensor)]
        nan_in = any(c[0] for _, c in inputs)
        made: list[Finding] = []
        if counts[0] and (not nan_in or _new_places(run, output, torch.isnan)):
            made = self._new_nan(run, position, sources)
        elif not counts[0] and _makes_inf(run, inputs, nan_in):
            made = [self._add(forward_origin(run, position, "inf", self.modules), False, run.sequence)]
        elif nan_in and not any(f.origin.kind == "nan" for f in sources):
            made = self._from_outside(run, inputs)
        else:
            for finding in sources:
                finding.counts = finding.counts or (counts[0] > 0 and finding.origin.kind == "nan")
        for tensor, _ in inputs:
            self._taken(tensor)
        self._hold(output, made or sources)

    def _new_nan(self, run: Run, position: int, sources: list[Finding]) -> list[Finding]:
        """An op made NaN; if of an Inf that an earlier op had made out of finite numbers, that one comes first."""
        origin = forward_origin(run, position, "nan", self.modules)
        for finding in sources:
            if not finding.counts and finding.origin.kind == "inf" and not finding.mask:
                self.blame(finding, f"{origin.op} then made NaN of it{_at(origin)}")
        return [self._add(origin, True, run.sequence)]

    def _from_outside(self, run: Run, inputs: list[tuple[Tensor, Counts]]) -> list[Finding]:
        tensor = next(t for t, c in inputs if c[0])
        key = storage_key(tensor)
        known = None if key is None else self._outside.get(key)
        only_asked = run.call.func is torch.ops.aten.abs.default  # as `torch.isfinite` does; any other op uses it
        if known is not None:
            known.counts = known.counts or not only_asked
            return [known]
        _, maker = self._unwritten.get(key, (None, None)) if key is not None else (None, None)
        finding = self._add(input_origin(run, tensor, "nan", self.modules, maker), not only_asked)
        if key is not None:
            self._outside[key] = finding
        return [finding]

    def _inf_from_outside(self, run: Run, inputs: list[tuple[Tensor, Counts]]) -> None:
        """An Inf that no traced op made. A weight that is Inf is no mask, nor is what is multiplied as a matrix."""
        unmasked = {id(tensor) for tensor in never_masks(run.call.func, run.args)}
        for tensor, _ in inputs:
            if (tensor.dim() > 0 or id(tensor) in unmasked) and self.is_new_inf(tensor, overwritten(run, tensor)):
                self.given(run, tensor)
            for finding in self.made(tensor) if id(tensor) in unmasked else ():
                finding.counts = finding.counts or finding.outside

    def is_new_inf(self, tensor: Tensor, seen: Tensor | None = None) -> bool:
        """True for a tensor with an Inf that no traced op made; `seen` is what it held if the op overwrote it."""
        if self._known(tensor):
            return False
        counts = bad_counts(tensor if seen is None else seen)
        return counts[1] > 0 and counts[0] == 0

    def given(self, run: Run, tensor: Tensor) -> Finding:
        """A tensor that was Inf before any traced op: a finding that does not count yet, unless it is a parameter."""
        named = self.modules.tensor_name(tensor)
        seen = overwritten(run, tensor)
        origin = input_origin(run, tensor, "inf", self.modules, seen=seen)
        finding = self._add(origin, named is not None and named[0] == "parameter")
        finding.outside = True
        finding.mask = not finding.counts and not has_plus_inf(tensor if seen is None else seen)
        self._hold(tensor, [finding])
        return finding

    def _bad_inputs(self, run: Run) -> list[tuple[Tensor, Counts]]:
        before = {id(tensor): None if run.kind.fresh else counts for tensor, counts, _ in run.before}
        found = []
        for tensor in run.inputs():
            counts = before[id(tensor)] if id(tensor) in before else bad_counts(tensor)
            if counts is not None and counts != (0, 0):
                found.append((tensor, counts))
        return found

    def _absorbed(self, run: Run) -> None:
        """An op gave something finite: whatever it took of what was found goes no further here."""
        if not run.kind.skip:
            chooses = drops_values(run.call.func)
            for tensor in run.inputs():
                clean = (chooses or run.kind.fresh) and _overwrites_all(run, tensor)
                drops = chooses or clean
                for finding in self.made(tensor):
                    finding.consumed = True
                    finding.dropped = finding.dropped or drops
                    finding.escaped = finding.escaped or not drops
                if drops:
                    self._taken(tensor)
                if clean:  # a later op that reads this memory reads what was written
                    self._holders.pop(storage_key(tensor) or 0, None)

    def _taken(self, tensor: Tensor) -> None:
        """What was found in this memory has gone on into an op's output, or was thrown away: here is no end of it."""
        key = storage_key(tensor)
        for finding in self.made(tensor) if key is not None else ():
            finding.ends.discard(key)

    # ---- what is known of memory -------------------------------------------------------------------------------------

    def made(self, tensor: Tensor) -> list[Finding]:
        """The findings whose NaN or Inf may be in this tensor's memory."""
        key = storage_key(tensor)
        entry = None if key is None else self._holders.get(key)
        return [] if entry is None else entry[1]

    def unwritten(self, tensor: Tensor, call: Call) -> None:
        """A call gave memory that nobody has written to."""
        key = storage_key(tensor)
        if key is not None:
            self._unwritten[key] = (WeakStorage(plain(tensor).untyped_storage()), call)

    def _known(self, tensor: Tensor) -> bool:
        """True for memory in which a NaN or Inf was seen before: an op's output, or what came in from outside."""
        return storage_key(tensor) in self._holders

    def _hold(self, tensor: Tensor, findings: list[Finding]) -> None:
        key = storage_key(tensor)
        if key is not None:
            for finding in findings:
                finding.ends.add(key)
            have = self._holders.get(key)
            known = [] if have is None else have[1]
            merged = [*known, *(f for f in findings if f not in known)]
            # The weak reference keeps the key from being given to other memory.
            self._holders[key] = (WeakStorage(plain(tensor).untyped_storage()), merged)

    def settle(self) -> None:
        """At the end: an Inf that no op has turned into something finite is a result, and counts."""
        for finding in self.findings:
            finding.counts = finding.counts or not (finding.consumed or finding.outside)

    def forget(self) -> None:
        """Let go of all memory."""
        self._holders.clear()
        self._unwritten.clear()

    # ---- the list ----------------------------------------------------------------------------------------------------

    def blame(self, finding: Finding, note: str) -> None:
        """What was found has done harm: it counts."""
        finding.counts = finding.escaped = True
        if finding.origin.note is None:
            finding.origin = replace(finding.origin, note=note)

    def by_sequence(self, sequence: int) -> Finding | None:
        """The finding of the forward op that an autograd node belongs to."""
        return next((f for f in self.findings if f.sequence == sequence >= 0), None)

    def add(self, origin: Origin, counts: bool = True) -> Finding:
        """An origin that the backward pass found."""
        return self._add(origin, counts)

    def _add(self, origin: Origin, counts: bool, sequence: int = -1) -> Finding:
        finding = Finding(origin, counts, len(self.findings), sequence)
        if len(self.findings) < MAX_FINDINGS or not any(f.is_origin for f in self.findings):
            self.findings.append(finding)
        return finding


def _outputs(run: Run, bad: Callable[[Tensor], Counts | None]) -> Iterator[tuple[int, Tensor, Counts]]:
    outputs = run.outputs if isinstance(run.outputs, (list, tuple)) else (run.outputs,)
    for position, tensor in enumerate(tensors_in(outputs)):
        counts = bad(tensor)
        if counts is not None:
            yield position, tensor, counts


def _was_bad(run: Run, output: Tensor) -> bool:
    """True for running statistics that an earlier step has spoilt: in training they are only carried along."""
    return any(
        tensor is output and counts is None and copy is not None and bad_counts(copy) != (0, 0)
        for tensor, counts, copy in run.before
    )


def _overwrites_all(run: Run, tensor: Tensor) -> bool:
    """True if the op may have written to all of a tensor's memory: where it is finite now, nothing is left in it."""
    written = any(before is tensor for before, _, _ in run.before)
    return written and tensor.nbytes == tensor.untyped_storage().nbytes()


def _makes_inf(run: Run, inputs: list[tuple[Tensor, Counts]], nan_in: bool) -> bool:
    """True if the Inf that came out is to be followed: made of finite numbers, or a loss that picked a masked class."""
    if not inputs:
        return not fills_with_inf(run.args, run.kwargs)
    return not nan_in and ends_in_inf(run.call.func)


def _new_places(run: Run, output: Tensor, test: Callable[[Tensor], Tensor]) -> bool:
    """True if an element is bad although the elements that it was made of are not: only pointwise ops can say so."""
    if not run.kind.pointwise or run.before:
        return False
    try:
        fine = ~test(output)
        for tensor in run.inputs():
            if tensor.is_floating_point() or tensor.is_complex():
                fine = fine | test(tensor)
        return not bool(fine.all())
    except RuntimeError:
        return False


def _at(origin: Origin) -> str:
    return "" if origin.file is None else f" (line {origin.line})"
