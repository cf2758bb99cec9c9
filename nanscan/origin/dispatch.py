"""The forward pass: a dispatch mode that collects the outputs of ops and has them scanned in batches.

`__torch_dispatch__` runs for every op, so it does little: look the op up, run it, walk to the user's frame, append. The
outputs are scanned together, by the fused engine, once enough of them wait, and always before an op overwrites memory.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanscan import engine
from nanscan.engine.result import BadInput
from nanscan.origin.frames import USER, Place, owner_of, place_of
from nanscan.origin.judge import Call, Judge, Run
from nanscan.origin.keep import Keeper
from nanscan.origin.modules import ModuleStack
from nanscan.origin.ops import Kind, kind_of
from nanscan.origin.ranges import Counts
from nanscan.origin.torch_private import no_modes, plain, sequence_nr

__all__ = ["Calls", "OpMode", "scan_bad", "unseen"]

BATCH_BYTES = 1 << 20  # about what the second-level cache of one core holds beside the op's own data
BATCH_TENSORS = 64
COPY_BYTES = 16 << 20  # an input that an op overwrites is copied for the description up to this size

# What PyTorch's own in-place ops on these can turn from finite into NaN or Inf, element by element.
# fmt: off
_RISKY = frozenset({
    "log_", "log2_", "log10_", "log1p_", "sqrt_", "rsqrt_", "reciprocal_", "div_", "pow_", "exp_", "exp2_",
    "expm1_", "acos_", "asin_", "atanh_", "acosh_", "lgamma_", "digamma_", "logit_", "xlogy_", "fmod_",
    "remainder_", "float_power_", "square_", "mul_", "erfinv_", "tan_", "embedding_renorm_",
})
# fmt: on

Calls = dict[int, Call]  # sequence number of an autograd node -> the forward op that recorded it

_kinds: dict[Any, Kind] = {}
_getframe = sys._getframe


class OpMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every op of a traced forward pass.

    Args:
        judge: gets the batches in which something was found.
        modules: which module is running.
        keeper: is told of memory before it is overwritten; None where nothing has to be put back.
    """

    def __init__(self, judge: Judge, modules: ModuleStack, keeper: Keeper | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.judge = judge
        self.modules = modules
        self.keeper = keeper
        self.calls: Calls = {}
        self.paused = False  # in backward, where the mode could not be taken off the stack
        self.found: Callable[[], None] = lambda: None  # called after a batch in which something was found
        self._runs: list[Run] = []
        self._outputs: list[Tensor] = []
        self._bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else every op takes a detour through torch._dynamo, and the first one imports it

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kind = _kinds.get(func)
        if kind is None:
            kind = _kinds[func] = kind_of(func)
        if kind.skip or self.paused:
            out = func(*args, **kwargs) if kwargs else func(*args)
            if kind.unwritten and not self.paused:
                self._unwritten(func, out, _getframe(1))
            return out
        if kind.writes or kind.writes_named or kind.statistics:
            return self._writing(kind, func, args, kwargs or {}, _getframe(1))
        out = func(*args, **kwargs) if kwargs else func(*args)
        frame = _getframe(1)
        code = frame.f_code
        place = Place(code, frame.f_lasti) if owner_of(code) == USER else place_of(frame)
        stack = self.modules.stack
        call = Call(func, place, stack[-1] if stack else None)
        sequence = sequence_nr() - 1
        if sequence not in self.calls:
            self.calls[sequence] = call
        self._add(Run(call, kind, args, kwargs or {}, out, sequence, (), frame))
        return out

    def _add(self, run: Run) -> None:
        out = run.outputs
        if type(out) is Tensor and (out.dtype.is_floating_point or out.is_complex()) and out.layout is torch.strided:
            self._runs.append(run)
            self._outputs.append(out)
            self._bytes += out.nbytes
        else:
            self._add_several(run, out)
        if self._bytes > BATCH_BYTES or len(self._runs) > BATCH_TENSORS:
            self.flush()

    def _add_several(self, run: Run, out: Any) -> None:
        """Several outputs, or integers: an op that only compares is of interest for what it took."""
        outputs = out if isinstance(out, (tuple, list)) else (out,)
        tensors = [t for t in outputs[:1] if isinstance(t, Tensor)] if run.kind.first else _floats(outputs)
        self._runs.append(run._replace(outputs=tensors))
        self._outputs += tensors
        self._bytes += sum(t.nbytes if t.layout is torch.strided else 0 for t in tensors)

    def _unwritten(self, func: Any, out: Any, frame: Any) -> None:
        """Memory that holds whatever was there: of interest if an op reads a NaN in it."""
        stack = self.modules.stack
        self.judge.unwritten(out, Call(func, place_of(frame), stack[-1] if stack else None))

    def _writing(self, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: Any) -> Any:
        """An op that overwrites memory: what waits is scanned first, together with what is about to be lost."""
        written = kind.written(args, kwargs)
        statistics = kind.updated(args)
        if self.keeper is not None:
            self.keeper.save([*written, *statistics])
        statistics = statistics[-1:]  # the variance, which breaks first; each costs a copy
        if any(waiting is t for t in statistics for waiting in self._outputs):  # of an instance norm: made just before
            self.flush()
        targets = _floats(written)
        before: list[tuple[Tensor, Counts | None, Tensor | None]] = [(t, None, t.clone()) for t in statistics]
        if targets:
            counts = self.flush(() if kind.fresh or kind.random else targets)
            before += [(t, counts.get(id(t), (0, 0)), None if kind.fresh else _copy(func, t)) for t in targets]
        out = func(*args, **kwargs)
        if kind.random or not (targets or kind.statistics):
            return out
        stack = self.modules.stack
        call = Call(func, place_of(frame), stack[-1] if stack else None)
        sequence = sequence_nr() - 1
        self.calls.setdefault(sequence, call)
        outputs = out if out is not None and not kind.writes_named else targets
        if statistics:
            kind, outputs = kind._replace(first=False), [out[0], *statistics]
        self._add(Run(call, kind, args, kwargs, outputs, sequence, tuple(before), frame))
        return out

    def flush(self, extra: Sequence[Tensor] = ()) -> dict[int, Counts]:
        """Scan what waits; returns the counts of those of `extra` that are bad, by `id`."""
        runs, outputs = self._runs, self._outputs
        if not runs and not extra:
            return {}
        self._runs, self._outputs, self._bytes = [], [], 0
        paused, self.paused = self.paused, True  # an engine that is made of ops is not to be traced
        bad = scan_bad([*outputs, *extra] if extra else outputs)
        self.paused = paused
        if runs and (bad or self.judge.watching):
            with unseen():
                self.judge.batch(runs, lambda tensor: bad.get(id(tensor)))
            if bad:
                self.found()
        return {id(t): bad[id(t)] for t in extra if id(t) in bad} if bad else {}


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """What runs in here is seen by no dispatch mode and recorded in no graph."""
    with no_modes(), torch.no_grad():
        yield


def scan_bad(tensors: Sequence[Tensor]) -> dict[int, Counts]:
    """(NaN, Inf) counts of the tensors that are not finite, by `id`; what can't be read is left out."""
    try:
        scan = engine.scan(tensors)
    except BadInput:
        return _one_by_one(tensors)
    if scan.finite:
        return {}
    bad: dict[int, Counts] = {}
    for row in scan.bad_rows():
        for position in (row.position, *row.also):
            bad[id(tensors[position])] = (row.nan_count, row.inf_count)
    return bad


def _one_by_one(tensors: Sequence[Tensor]) -> dict[int, Counts]:
    bad: dict[int, Counts] = {}
    for tensor in tensors:
        try:
            scan = engine.scan([plain(tensor)])
        except BadInput:  # meta and fake tensors, say: nothing in them to be found
            continue
        if not scan.finite:
            bad[id(tensor)] = (scan.nan_count, scan.inf_count)
    return bad


def _floats(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point() or value.is_complex():
                found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _floats(value)
    return found


def _copy(func: Any, tensor: Tensor) -> Tensor | None:
    """What the tensor held, for the description, where the op is one that often makes NaN."""
    name = func._schema.name.rpartition("::")[2]
    if name not in _RISKY or tensor.layout is not torch.strided or tensor.nbytes > COPY_BYTES:
        return None
    return tensor.detach().clone()
