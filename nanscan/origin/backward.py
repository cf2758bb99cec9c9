"""The backward pass: hooks on the nodes of the autograd graph, put on when it starts and taken off when it ends.

A node is judged as a whole, by the gradients that went in and those that came out: what its formula makes on the way
and masks again (the gradient of a norm at 0) is no fault. Nor is what a later node masks before any leaf gets it (the
gradient of `logsumexp` in a row that `masked_fill` wrote): findings count once a bad gradient arrives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanscan.origin.dispatch import OpMode, scan_bad, unseen
from nanscan.origin.frames import source_of
from nanscan.origin.judge import Call, Finding, Judge, Run
from nanscan.origin.node import HOOKED, NodeRun, node_origin, saved_of
from nanscan.origin.ops import kind_of
from nanscan.origin.ranges import bad_counts, range_of
from nanscan.origin.record import Origin
from nanscan.origin.torch_private import enter, is_current, is_on_stack, leave, plain, replace_backward, sequence_nr
from nanscan.origin.writing import loss_of_mask

__all__ = ["GraphWatch", "install", "uninstall"]

_SUM_OR_HOOK = "a sum of gradients overflowed, or a hook changed it, after this node"
# Nodes that only hand elements on, under another shape or order.
# fmt: off
_MOVERS = frozenset({
    "AddBackward0", "TBackward0", "TransposeBackward0", "TransposeBackward1", "PermuteBackward0",
    "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1",
    "UnsqueezeBackward0", "CloneBackward0", "AliasBackward0", "SplitBackward0", "UnbindBackward0",
    "SelectBackward0", "SliceBackward0", "CatBackward0", "StackBackward0", "DetachBackward0",
})
# fmt: on
# Under these names a node saves what its forward took, as against what it made.
_INPUTS = frozenset({"self", "other", "input", "weight", "mat1", "mat2", "batch1", "batch2", "target", "vec"})
_LOG_SUMS = ("Logsumexp", "Logaddexp", "Logcumsumexp")
_moves: dict[type, bool] = {}


class GraphWatch:
    """What a trace does about backward passes.

    Args:
        judge: gets what is found.
        mode: the trace's dispatch mode, which is off in backward except where a checkpoint runs the forward again.
    """

    def __init__(self, judge: Judge, mode: OpMode) -> None:
        self.judge = judge
        self.mode = mode
        self._bad = False  # a bad gradient was seen in this backward pass: later ones are its consequences
        self._first: Any = None  # the finding whose Inf has not become NaN yet
        self._last: tuple[Any, dict[int, int]] = (None, {})  # the last node that ran, and the memory of what it made
        self._parents: dict[Any, list[Any]] = {}
        self._waiting: list[tuple[Finding, str | None]] = []  # count, with that note, once a bad gradient arrives
        self._arrived = False
        self._masked: Finding | None = None  # a loss of -Inf that a mask made
        self._mapped = 0

    def run(self, original: Callable[..., Any], roots: Sequence[Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a backward pass with hooks on its graph."""
        self.mode.flush()
        bad_roots = self._judge_roots(roots)
        outer = (self._bad, self._parents, self._waiting, self._arrived)
        self._bad, self._parents, self._mapped = False, {}, sequence_nr()
        self._waiting, self._arrived = [], bad_roots or _keeps_inner(args, kwargs)
        handles: list[Any] = []
        own = is_current(self.mode)
        paused, self.mode.paused = self.mode.paused, True
        try:
            self._watch(roots, handles)
            if not own:
                return self._checked(original(roots, *args, **kwargs))
            leave(self.mode)
            try:
                return self._checked(original(roots, *args, **kwargs))
            finally:
                enter(self.mode)
        finally:
            self.mode.paused = paused
            self._map_new_nodes(None)
            for handle in handles:
                handle.remove()
            self._last = (None, {})
            for finding, _ in self._waiting:
                finding.consumed = True
            self._bad, self._parents, self._waiting, self._arrived = outer

    def _judge_roots(self, roots: Sequence[Any]) -> bool:
        """A loss that is NaN or Inf: whatever made it does harm. Returns whether one is (outputs may hold a mask)."""
        tensors = [t for t in roots if isinstance(t, Tensor)]
        bad = scan_bad(tensors)
        if bad:
            for finding in [
                f
                for t in tensors
                for f in self.judge.made(t)
                if not (f.is_origin or f.mask or (f.outside and t.numel() > 1))
            ]:
                self.judge.blame(finding, "backward() was called on it")
            losses = [t for t in tensors if id(t) in bad and t.numel() == 1]
            with unseen():
                for loss in losses:
                    self._unexplained(loss)
            self.mode.found()
            return bool(losses)
        return False

    def _unexplained(self, loss: Tensor) -> None:
        """An Inf loss that no op made out of finite numbers: an Inf that was written on purpose has reached it."""
        call = None if loss.grad_fn is None else self._call(loss.grad_fn)
        if call is not None and not any(f.is_origin for f in self.judge.findings):
            given = [f.origin for f in self.judge.made(loss) if f.outside]
            self._masked = self.judge.add(loss_of_mask(call, loss.detach(), self.judge.modules, given))

    def _watch(self, roots: Sequence[Any], handles: list[Any]) -> None:
        """Put hooks on all nodes that the roots lead to."""
        waiting = [node for node in (_node_of(root) for root in roots) if node is not None]
        seen = set(waiting)
        parents = self._parents
        while waiting:
            node = waiting.pop()
            kind = type(node)
            moves = _moves.get(kind)
            if moves is None:
                moves = _moves[kind] = node.name() in _MOVERS
            children = node.next_functions
            if not children and hasattr(node, "variable"):
                handles.append(node.register_prehook(partial(self._before_leaf, node)))
                continue
            if not moves:
                handles.append(node.register_hook(partial(self._after, node)))
                if "Checkpoint" in kind.__name__:
                    handles.append(node.register_prehook(self._before_checkpoint))
            for child, _ in children:
                if child is not None:
                    if child in parents:
                        parents[child].append(node)
                    else:
                        parents[child] = [node]
                        if child not in seen:
                            seen.add(child)
                            waiting.append(child)

    # ---- called by the autograd engine -------------------------------------------------------------------------------

    def _after(self, node: Any, made: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> None:
        """A node has run."""
        if "Checkpoint" in type(node).__name__:
            self._after_checkpoint()
        new = [t for t in made if t is not None and not any(t is other for other in incoming)]
        if new:
            bad = scan_bad(new)
            if bad:
                self._judge(node, made, incoming, bad)
            self._last = (node, {_pointer(t): t.numel() for t in new})
        if sequence_nr() != self._mapped:
            self._map_new_nodes(node)

    def _before_leaf(self, node: Any, incoming: tuple[Tensor | None, ...]) -> None:
        """A gradient is about to be added to a leaf's: has it been seen as it is now?"""
        if self.mode.keeper is not None:
            self.mode.keeper.save_grad(node.variable)
        gradient = incoming[0]
        parents = self._parents.get(node, [])
        if gradient is None:
            return
        if self._bad:
            if self._waiting and scan_bad([gradient]):
                self._arrive()
            return
        last, memory = self._last
        seen = len(parents) == 1 and parents[0] is last
        if not (seen and memory.get(_pointer(gradient)) == gradient.numel()) and scan_bad([gradient]):
            with unseen():
                self._between(parents, plain(gradient), bool(node.variable._backward_hooks))
            self._arrive()

    def _before_checkpoint(self, incoming: Any) -> None:
        """Re-entrant checkpointing runs a piece of the forward pass again, and records its nodes only now."""
        self.mode.paused = False
        if not is_on_stack(self.mode):
            enter(self.mode)

    def _after_checkpoint(self) -> None:
        if is_current(self.mode):
            self.mode.flush()
            leave(self.mode)
        self.mode.paused = True

    # ---- what was found ----------------------------------------------------------------------------------------------

    def _judge(self, node: Any, made: Any, incoming: Any, bad: dict[int, tuple[int, int]]) -> None:
        position = next(i for i, t in enumerate(made) if t is not None and id(t) in bad)
        with unseen():
            self._judged(node, [plain(t) for t in made], [plain(t) for t in incoming], position)
        if self._arrived:
            self._arrive()

    def _arrive(self) -> None:
        """A bad gradient has reached a leaf or the caller: what was found on the way counts."""
        self._arrived = True
        waiting, self._waiting = self._waiting, []
        masked, self._masked = self._masked, None
        if masked is not None and any(f.origin.op.startswith(_LOG_SUMS) for f, _ in waiting):
            masked.counts, masked.consumed = False, True  # of nothing but -Inf: the value is right, the gradient is not
        for finding, note in waiting:
            if note is None:
                finding.counts = True
            else:
                self.judge.blame(finding, note)
        self.mode.found()

    def _add(self, origin: Origin) -> Finding:
        finding = self.judge.add(origin, counts=False)
        self._waiting.append((finding, None))
        return finding

    def _judged(self, node: Any, made: list[Any], incoming: list[Any], position: int) -> None:
        counts = [bad_counts(t) for t in incoming if t is not None]
        nan_in, inf_in = any(c[0] for c in counts), any(c[1] for c in counts)
        is_nan = any(t is not None and bad_counts(t)[0] for t in made)
        known, self._bad = self._bad, True
        if nan_in or inf_in:
            if not known:
                worst = next(t for t in incoming if t is not None and bad_counts(t) != (0, 0))
                self._between(self._parents.get(node, []), worst)
            if is_nan and not nan_in:
                self._became_nan(node)
            return
        run = NodeRun(node, self._call(node), tuple(made), tuple(incoming), position, saved_of(node))
        self._produced(run, "nan" if bad_counts(made[position])[0] else "inf")

    def _produced(self, run: NodeRun, kind: str) -> None:
        """Finite gradients went in and a bad one came out."""
        forward = self.judge.by_sequence(run.node._sequence_nr())
        if forward is not None and not forward.thrown_away:
            self._blame([forward], f"the backward of it ({run.node.name()}) then made {_word(kind)} gradients")
            return
        self._given(run)
        masks = "Rnn" not in run.node.name()  # whose gates are finite where its input is not
        saved = [f for t in run.saved.values() if isinstance(t, Tensor) for f in self.judge.made(t)]
        harmed = [f for f in saved if not (f.thrown_away or (f.mask and masks))]
        if harmed:
            self._blame(harmed, f"{run.node.name()} then made {_word(kind)} gradients of it")
            return
        if run.saved_nan() and any(f.is_origin for f in self.judge.findings):
            return  # a consequence of the NaN of the forward pass
        note = None if forward is None else "its value in forward was not finite there either, and was thrown away"
        finding = self._add(node_origin(run, kind, self.judge.modules, note))
        if kind == "inf" and self._first is None:
            self._first = finding

    def _given(self, run: NodeRun) -> None:
        """An Inf that came in from outside, was saved for backward, and that forward had made something finite of."""
        if run.call is None:
            return
        inputs = [run.saved[name] for name in _INPUTS & run.saved.keys()]
        given = [t for t in inputs if isinstance(t, Tensor) and t.dim() > 0 and self.judge.is_new_inf(t)]
        for tensor in given:
            self.judge.given(Run(run.call, kind_of(run.call.func), tuple(given), {}, (), -1), tensor)

    def _blame(self, findings: list[Finding], note: str) -> None:
        """An Inf that forward made out of finite numbers has come back as a bad gradient: it counts at once."""
        for finding in findings:
            if not finding.is_origin:
                self.judge.blame(finding, note)
        self.mode.found()

    def _became_nan(self, node: Any) -> None:
        """An Inf gradient met a 0 or another Inf."""
        if self._first is not None:
            call = self._call(node)
            self._waiting.append((self._first, f"{node.name()} then made NaN of it{_line(call)}"))
            self._first = None

    def _between(self, parents: list[Any], gradient: Tensor, hooks: bool = False) -> None:
        """What came out of the nodes was finite; summed up, or after a hook, it is not."""
        self._bad = True
        kind = "nan" if bad_counts(gradient)[0] else "inf"
        node = self._last[0] if self._last[0] in parents or not parents else parents[-1]
        if node is None:
            given = range_of("the gradient given to backward()", gradient.detach())
            self._add(Origin(kind, "backward", "input", name=given.name, outputs=(given,)))
            return
        hooked = kind == "nan" or (hooks and len(parents) == 1)  # finite numbers don't sum up to NaN
        note = "a hook changed it after this node" if hooked else _SUM_OR_HOOK
        origin = node_origin(NodeRun(node, self._call(node), (gradient,), (), 0, {}), kind, self.judge.modules, note)
        self._add(replace(origin, hint=HOOKED) if hooked else origin)

    def _checked(self, result: Any) -> Any:
        """The gradients that `torch.autograd.grad` returns."""
        tensors = [t for t in result or () if isinstance(t, Tensor)]
        if tensors and (self._waiting or not self._bad) and scan_bad(tensors):
            if not self._bad:
                with unseen():
                    self._between([], next(t for t in tensors if bad_counts(t) != (0, 0)))
            self._arrive()
        return result

    def _call(self, node: Any) -> Call | None:
        return self.mode.calls.get(node._sequence_nr())

    def _map_new_nodes(self, node: Any) -> None:
        """Nodes recorded in backward (create_graph=True) belong to the forward line of the node that recorded them."""
        now = sequence_nr()
        call = None if node is None else self._call(node)
        if call is not None:
            for number in range(self._mapped, now):
                self.mode.calls.setdefault(number, call)
        self._mapped = now


def _keeps_inner(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for `backward(inputs=[…])`: the gradients of tensors that may be no leaves are kept."""
    return bool(kwargs.get("accumulate_grad")) and len(args) > 3 and bool(args[3])


def _node_of(root: Any) -> Any:
    if isinstance(root, Tensor):
        return root.grad_fn
    return getattr(root, "node", None)  # a GradientEdge


def _pointer(tensor: Tensor) -> int:
    """Where its elements are; 0 for one without memory of its own (sparse, or wrapped by `torch.func`)."""
    try:
        return tensor.data_ptr() if tensor.layout is torch.strided else 0
    except RuntimeError:
        return 0


def _word(kind: str) -> str:
    return {"nan": "NaN", "inf": "Inf"}[kind]


def _line(call: Call | None) -> str:
    if call is None or call.place.code is None:
        return ""
    return f" (line {source_of(call.place.code, call.place.offset).line})"


# ---- where backward passes start ------------------------------------------------------------------------------------

_active = threading.local()
_lock = threading.Lock()
_installed: list[Any] = []  # the original function, once for each trace that is running in any thread


def install(watch: GraphWatch) -> None:
    """Have the backward passes that this thread starts run by `watch`, until `uninstall`."""
    with _lock:
        if not _installed:
            _installed.append(replace_backward(_run_backward))
        else:
            _installed.append(_installed[0])
    _active.__dict__.setdefault("watches", []).append(watch)


def uninstall(watch: GraphWatch) -> None:
    """Undo `install`."""
    _active.watches.remove(watch)
    with _lock:
        original = _installed.pop()
        if not _installed:
            replace_backward(original)


def _run_backward(roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    original = _installed[0]
    for watch in _active.__dict__.get("watches", ()):
        original = partial(_through, watch, original)
    return original(roots, *args, **kwargs)


def _through(watch: GraphWatch, original: Callable[..., Any], roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    return watch.run(original, roots, args, kwargs)
