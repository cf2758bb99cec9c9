"""Turns what was found into an `Origin`: names, ranges, the user's line, the hint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanscan.origin.frames import INTERNAL, Place, Source, owner_of, source_of
from nanscan.origin.modules import ModuleStack, Owned, storage_key
from nanscan.origin.ops import aten_name, tensors_in
from nanscan.origin.ranges import bad_counts, first_bad_of, first_of_kind, range_of, shape_of
from nanscan.origin.record import OpEvent, Origin, TensorRange
from nanscan.origin.torch_private import plain

if TYPE_CHECKING:
    from nanscan.origin.judge import Call, Run

__all__ = ["forward_origin", "hint_of", "input_origin", "loss_of_mask", "overwritten", "source_and_note"]


def forward_origin(run: Run, position: int, kind: str, modules: ModuleStack) -> Origin:
    """The origin for a forward op whose output number `position` is bad."""
    outputs = tuple(map(plain, tensors_in(run.outputs if isinstance(run.outputs, (list, tuple)) else (run.outputs,))))
    output = plain(outputs[position].detach())
    index = first_of_kind(output, kind) or ()
    source, note = source_and_note(run.call.place)
    op = aten_name(run.call.func)
    inputs = tuple(_as_it_was(run, tensor) for tensor in run.inputs())
    names = [_input_name(run, i, tensor, modules) for i, tensor in enumerate(run.inputs())]
    event = OpEvent(
        op=op,
        phase="forward",
        kind=kind,
        inputs=inputs,
        outputs=tuple(plain(t.detach()) for t in outputs),
        output=position,
        first_bad=index,
        args=run.args,
        kwargs=run.kwargs,
        module=modules.path(run.call.module),
        module_type=None if run.call.module is None else type(run.call.module).__name__,
        code=source.code,
    )
    pointwise = run.kind.pointwise
    ranges = tuple(
        range_of(name, t, shape_of(output), index if pointwise else None)
        for name, t in zip(names, inputs, strict=True)
        if t is not None
    )
    parameter = next((n for t in run.inputs() if (n := modules.tensor_name(t)) is not None), None)
    return Origin(
        kind=kind,
        phase="forward",
        op=op,
        module=event.module,
        file=source.file,
        line=source.line,
        code=source.code,
        inputs=ranges,
        outputs=_output_ranges(outputs, output, index, modules),
        name=None if parameter is None else parameter[1],
        note=note,
        hint=hint_of(event),
    )


def _output_ranges(
    outputs: Sequence[Tensor], bad: Tensor, index: tuple[int, ...], modules: ModuleStack
) -> tuple[TensorRange, ...]:
    if len(outputs) == 1:
        return (range_of("output", bad, shape_of(bad), index),)
    return tuple(
        range_of(
            _output_name(i, t, modules), plain(t.detach()), shape_of(t), index if shape_of(t) == shape_of(bad) else None
        )
        for i, t in enumerate(outputs)
        if t.is_floating_point() or t.is_complex()
    )


def _output_name(position: int, tensor: Tensor, modules: ModuleStack) -> str:
    named = modules.tensor_name(tensor)
    return f"output {position}" if named is None else named[1]  # running statistics


def _as_it_was(run: Run, tensor: Tensor) -> Tensor | None:
    """An input as the op saw it: one that it overwrote is gone, unless a copy was kept."""
    if any(before is tensor for before, _, _ in run.before):
        return overwritten(run, tensor)
    given: Tensor = plain(tensor.detach())
    return given


def overwritten(run: Run, tensor: Tensor) -> Tensor | None:
    """The copy of what a tensor held before the op wrote to it; None if it did not, or none was kept."""
    return next((copy for before, _, copy in run.before if before is tensor), None)


def _input_name(run: Run, position: int, tensor: Tensor, modules: ModuleStack) -> str:
    named = modules.tensor_name(tensor)
    if named is not None:
        return named[1]
    for argument, value in zip(run.call.func._schema.arguments, run.args, strict=False):
        if value is tensor:
            return str(argument.name)
    return f"input {position}"


def input_origin(
    run: Run, tensor: Tensor, kind: str, modules: ModuleStack, maker: Call | None = None, seen: Tensor | None = None
) -> Origin:
    """The origin for a tensor that was bad before any traced op touched it.

    `maker` is the call that gave its memory, where nobody wrote to it: then it is that call's doing. `seen` is what
    the tensor held before the op overwrote it.
    """
    named = modules.owner(tensor)
    call = run.call if maker is None else maker
    source, note = source_and_note(call.place)
    custom = _custom_function(tensor)
    what = "input" if named is None else "parameter"
    what = aten_name(call.func) if maker is not None and named is None else custom if custom is not None else what
    name, value = _as_owned(named, tensor) if named is not None else _outside_name(run, tensor, modules)
    value = plain((value if seen is None else seen).detach())
    if custom is not None and " of aten." in name:
        name = f"output of {custom}"
    if named is not None and named.kind == "buffer":
        note = _both("it is a buffer", note)
    event = OpEvent(
        op=what if custom is None else "autograd.Function",
        phase="forward",
        kind=kind,
        outputs=(value,),
        first_bad=first_bad_of(value) or (),
        module=modules.path(call.module),
        module_type=None if call.module is None else type(call.module).__name__,
        code=source.code,
    )
    return Origin(
        kind=kind,
        phase="forward",
        op=what,
        module=event.module,
        file=source.file,
        line=source.line,
        code=source.code,
        outputs=(range_of(name, value),),
        name=name,
        note=_both(f"it was read by {aten_name(run.call.func)}", note),
        hint=hint_of(event),
    )


def _as_owned(owner: Owned, tensor: Tensor) -> tuple[str, Tensor]:
    """Name and value of a parameter or buffer: an op may have read it as a transposed view, or in part."""
    return owner.name, owner.tensor if bad_counts(owner.tensor) != (0, 0) else tensor


def _custom_function(tensor: Tensor) -> str | None:
    """The class of the user's `autograd.Function` that made a tensor, None where an op of PyTorch's did."""
    made = getattr(type(tensor.grad_fn), "_forward_cls", None)
    return None if made is None else str(made.__name__)


def loss_of_mask(call: Call, loss: Tensor, modules: ModuleStack, given: Sequence[Origin]) -> Origin:
    """The origin for a loss that is Inf although every op that made an Inf was given one: the op that gave the loss.

    `given` are the tensors that were -Inf when they came in: masks, or bad data.
    """
    source, inner = source_and_note(call.place)
    if given:
        inner = _both(f"-Inf came in with {', '.join(str(o.name) for o in given)}", inner)
    note = "no op made it out of finite numbers: an Inf that was written on purpose (a mask) reached the loss"
    return Origin(
        kind="inf",
        phase="forward",
        op=aten_name(call.func),
        module=modules.path(call.module),
        file=source.file,
        line=source.line,
        code=source.code,
        outputs=(range_of("output", loss),),
        note=_both(note, inner),
        hint=(
            "a masked -inf is among what the loss adds up: the target class, action or token is one that the mask "
            "forbids, or a row is masked altogether. Leave such targets and rows out (ignore_index, a where before the "
            "mean), or mend the mask; nanscan.check_batch looks at labels and padding."
        ),
    )


def _outside_name(run: Run, tensor: Tensor, modules: ModuleStack) -> tuple[str, Tensor]:
    """What the user calls a tensor that came in from outside, and it as the user has it (not as a transposed view)."""
    found = modules.argument(tensor) or _variable(tensor, run.frame)
    if found is not None:
        return found if bad_counts(found[1]) != (0, 0) else (found[0], tensor)
    if aten_name(run.call.func) in ("aten.copy_", "aten.fill_") and tensor.dim() == 0:  # x[i, j] = nan
        known, held = modules.tensor_name(run.args[0]), _variable(run.args[0], run.frame)
        written = known[1] if known is not None else held[0] if held is not None else "a tensor"
        return f"the number written into {written}", tensor
    position = next(i for i, other in enumerate(run.inputs()) if other is tensor)
    return f"{_input_name(run, position, tensor, modules)} of {aten_name(run.call.func)}", tensor


def _variable(tensor: Tensor, frame: FrameType | None) -> tuple[str, Tensor] | None:
    """What the user calls a tensor: the variable that holds it in the nearest of the user's frames."""
    key = storage_key(tensor)
    while frame is not None and key is not None:
        if owner_of(frame.f_code) != INTERNAL:
            for name, value in list(frame.f_locals.items()):
                for path, item in _items(name, value):
                    if item is tensor or storage_key(item) == key:
                        return path, item
        frame = frame.f_back
    return None


def _items(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif type(value) in (list, tuple):
        for i, item in enumerate(value[:100]):
            if isinstance(item, Tensor):
                yield f"{name}[{i}]", item
    elif type(value) is dict:
        for key, item in list(value.items())[:100]:
            if isinstance(item, Tensor):
                yield f'{name}["{key}"]' if isinstance(key, str) else f"{name}[{key!r}]", item


def source_and_note(place: Place) -> tuple[Source, str | None]:
    """The user's line, and the library's line that it led to where there is one."""
    if place.code is None:
        return source_of(place.installed, place.installed_offset), None
    source = source_of(place.code, place.offset)
    if place.installed is None:
        return source, None
    inner = source_of(place.installed, place.installed_offset)
    return source, f"called in {inner.file}:{inner.line}: {inner.code}"


def hint_of(event: OpEvent) -> str | None:
    """What the table of hints says; a hint never costs the finding."""
    try:
        from nanscan.origin.hints import hint_for

        with torch.no_grad():
            text: str | None = hint_for(event)
            return text
    except Exception:
        return None


def _both(first: str, second: str | None) -> str:
    return first if second is None else f"{first}; {second}"
