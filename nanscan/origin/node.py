"""An autograd node that made a NaN or Inf, as an `Origin`: its forward line, its gradients, what forward had saved."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanscan.origin.frames import INTERNAL, Place, owner_of
from nanscan.origin.judge import Call
from nanscan.origin.modules import ModuleStack
from nanscan.origin.ranges import bad_counts, element_at, first_of_kind, range_of
from nanscan.origin.record import OpEvent, Origin, TensorRange
from nanscan.origin.torch_private import plain
from nanscan.origin.writing import hint_of, source_and_note

__all__ = ["HOOKED", "NodeRun", "node_origin", "saved_of"]

HOOKED = (
    "a hook (register_hook of a tensor or a parameter) made it out of a finite gradient: nothing was added up there. "
    "Look at the hooks on this path: a division by a norm or count of 0, a scale that overflows."
)
_NOWHERE = Place(None, 0)


class NodeRun(NamedTuple):
    """One node that ran, with its gradients and what forward had saved for it."""

    node: Any
    call: Call | None
    made: tuple[Tensor | None, ...]
    incoming: tuple[Tensor | None, ...]
    position: int
    saved: dict[str, Any]

    def saved_nan(self) -> bool:
        """True if what forward had saved holds a NaN."""
        return any(isinstance(t, Tensor) and bad_counts(t)[0] for t in self.saved.values())


def saved_of(node: Any) -> dict[str, Any]:
    """What a node's forward had saved, by name; what has been freed is left out."""
    if hasattr(type(node), "saved_tensors"):  # of a custom function; asking the node itself would unpack them
        try:
            return {f"saved {i}": plain(t) for i, t in enumerate(node.saved_tensors)}
        except Exception:  # freed, given out once already by a checkpoint, or a hook of the user's that refuses
            return {}
    found: dict[str, Any] = {}
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                found[name.removeprefix("_saved_")] = plain(getattr(node, name))
            except Exception:
                continue
    return found


def node_origin(run: NodeRun, kind: str, modules: ModuleStack, note: str | None = None) -> Origin:
    """The origin for a node whose gradient number `position` is bad."""
    bad = run.made[run.position]
    assert bad is not None
    index = first_of_kind(bad, kind) or ()
    source, inner = source_and_note(run.call.place) if run.call is not None else source_and_note(_NOWHERE)
    zero = any(g is not None and element_at(g, bad.shape, index) == 0.0 for g in run.incoming) and kind == "nan"
    module = None if run.call is None else run.call.module
    custom = _custom_backward(run.node)
    saved = {k: v.detach() if isinstance(v, Tensor) else v for k, v in run.saved.items()}
    event = OpEvent(
        op=run.node.name() if custom is None else "autograd.FunctionBackward",
        phase="backward",
        kind=kind,
        inputs=tuple(None if g is None else g.detach() for g in run.incoming),
        outputs=tuple(None if g is None else g.detach() for g in run.made),
        output=run.position,
        first_bad=index,
        saved=saved,
        module=modules.path(module),
        module_type=None if module is None else type(module).__name__,
        code=source.code,
        zero_gradient=zero,
    )
    notes = [note, custom, "its incoming gradient was exactly 0 there" if zero else None, inner]
    return Origin(
        kind=kind,
        phase="backward",
        op=run.node.name(),
        module=event.module,
        file=source.file,
        line=source.line,
        code=source.code,
        inputs=_inputs(run, saved, bad, index),
        outputs=_outputs(run, bad, index),
        name=_leaf_name(run, modules),
        note="; ".join(item for item in notes if item) or None,
        hint=hint_of(event),
    )


def _custom_backward(node: Any) -> str | None:
    """Where the backward of the user's own `autograd.Function` is written; None for PyTorch's nodes and functions."""
    code = getattr(getattr(getattr(type(node), "_forward_cls", None), "backward", None), "__code__", None)
    if code is None or owner_of(code) == INTERNAL:
        return None
    return f"its backward is at {code.co_filename}:{code.co_firstlineno}"


def _inputs(run: NodeRun, saved: dict[str, Any], bad: Tensor, index: tuple[int, ...]) -> tuple[TensorRange, ...]:
    found = [
        range_of(f"grad_output {i}", g.detach(), bad.shape, index) for i, g in enumerate(run.incoming) if g is not None
    ]
    found += [range_of(k, t, bad.shape, index) for k, t in saved.items() if isinstance(t, Tensor)]
    return tuple(found)


def _outputs(run: NodeRun, bad: Tensor, index: tuple[int, ...]) -> tuple[TensorRange, ...]:
    return tuple(
        range_of(f"grad_input {i}", g.detach(), bad.shape, index if g is bad else None)
        for i, g in enumerate(run.made)
        if g is not None
    )


def _leaf_name(run: NodeRun, modules: ModuleStack) -> str | None:
    """The parameter that the bad gradient belongs to, where the node is next to it."""
    following = run.node.next_functions
    if run.position >= len(following) or len(following) != len(run.made):
        return None
    leaf = getattr(following[run.position][0], "variable", None)
    named = modules.tensor_name(leaf) if isinstance(leaf, torch.Tensor) else None
    return None if named is None else named[1]
