"""`load_model_state`: a model's weights from a checkpoint, all or nothing, with every difference named."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from nanscan import messages
from nanscan.errors import CheckpointError, CheckpointWarning
from nanscan.matching.compare import compared, plain_names
from nanscan.matching.given import checked_model_state
from nanscan.matching.keys import bare, bare_path, pair, renamings
from nanscan.matching.report import MatchReport
from nanscan.matching.undo import Before, materialise, on_meta, runs_own_code

__all__ = ["load_model_state"]


def load_model_state(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> MatchReport:
    """Load a model's weights; prefixes that wrappers add are adapted, every other difference is named.

    "module." (DataParallel, DDP) and "_orig_mod." (torch.compile) may stand before the names or within them, on either
    side, in any order; a LightningModule's "model." is adapted where that makes every name match. Everything is
    checked before the first tensor is copied. Tensors are copied, never shared; dtype and device stay the model's.
    Parameters on the meta device get memory where the checkpoint's tensors are; lazy ones get the checkpoint's shape.

    Args:
        model: what to load into; it may be wrapped in DataParallel, DDP or torch.compile.
        state: name -> tensor, as `model.state_dict()` gives it.
        strict: True: any missing, unexpected or mismatched name is an error and nothing is changed. False: what matches
            is loaded, and a `CheckpointWarning` has the name of all that doesn't.

    Returns:
        What was matched. A dtype that isn't the checkpoint's is in `converted`, and warned about.

    Raises:
        CheckpointError: something doesn't match, or with `strict=False` nothing does; the model is as it was.
        TypeError: `state` is no dict.

    >>> model = nn.Linear(2, 1)
    >>> saved = {f"module.{name}": value for name, value in nn.Linear(2, 1).state_dict().items()}
    >>> print(load_model_state(model, saved).describe())
    2 of 2 names of the model loaded (2 adapted: 'module.weight' -> 'weight', …)
    """
    own: dict[str, Any] = dict(model.state_dict(keep_vars=True))
    saved = checked_model_state(state, own)
    pairs = pair(list(saved), list(own), plain_names(model, list(own)))
    report = compared(model, own, saved, pairs)
    values = {name: saved[pairs[name]] for name in report.loaded if name in pairs}
    by_own_code = runs_own_code(model, [*own.values(), *values.values()])
    if not by_own_code or (strict and report.mismatched):
        _judge(report, model, own, saved, strict)
    before = Before(model, own if by_own_code else {})
    try:
        materialise(model, own, values, before)
        if by_own_code:
            used = set(pairs.values())
            rest = {_as_own(key, own): value for key, value in saved.items() if key not in used}
            report = _after_own_code(report, _load(model, {**values, **rest}, saved))
            _judge(report, model, own, saved, strict)
        else:
            _load(model, values, saved)
    except BaseException:
        before.restore()
        raise
    return report


def _judge(
    report: MatchReport, model: nn.Module, own: Mapping[str, Any], saved: Mapping[str, Any], strict: bool
) -> None:
    """Raise if this must not be loaded, else warn of what is not loaded, or not as it was."""
    nothing = bool(own) and not report.loaded
    if nothing or (strict and not report.complete):
        raise CheckpointError(_refusal(_with_hints(report, own, saved), saved, nothing))
    if not report.complete:
        report = _with_hints(report, own, saved)
    left = on_meta(model, report.loaded)
    lines = report.differences()
    if left:
        lines.append(f"still on the meta device, without values: {', '.join(map(repr, left))}")
    if lines:
        # Before the first copy: where warnings are errors, this one too leaves the model as it was.
        messages.warn("nanscan: the checkpoint and the model differ: " + "; ".join(lines), CheckpointWarning)


def _refusal(report: MatchReport, saved: Mapping[str, Any], nothing: bool) -> str:
    if nothing:
        first = f"nothing of this state matches the model: none of its {len(saved)} names could be loaded"
        advice = "Is it the state of another model?"
    else:
        first = "this state does not match the model; nothing was loaded"
        advice = "strict=False loads what matches."
    return "\n  ".join([first, *report.differences(), advice])


def _with_hints(report: MatchReport, own: Mapping[str, Any], saved: Mapping[str, Any]) -> MatchReport:
    """The report with what may be the reason: a part renamed, or a prefix that is not a wrapper's."""
    shapes = {name: _shape(value) for name, value in [*saved.items(), *own.items()]}
    notes = [
        f"renamed? the model's '{name}' may be the checkpoint's '{other}'"
        for name, other in renamings(report.missing, report.unexpected, shapes)
    ]
    if prefix := _other_prefix([bare(key) for key in report.unexpected], {bare(name) for name in report.missing}):
        notes.append(
            f"the checkpoint's names begin with '{prefix}': "
            f"give {{name.removeprefix({prefix!r}): value for name, value in state.items()}}"
        )
    return replace(report, notes=(*report.notes, *notes))


def _other_prefix(saved: list[str], own: set[str]) -> str:
    """What all those names of the checkpoint begin with that would match without it."""
    found = {key[: -len(name)] for key in saved for name in _endings(key) if name in own}
    return found.pop() if len(found) == 1 else ""


def _endings(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[i:]) for i in range(1, len(parts))]


def _shape(value: Any) -> tuple[int, ...] | None:
    try:
        return tuple(value.shape) if isinstance(value, Tensor) else None
    except RuntimeError:  # a lazy parameter has none yet
        return None


# ---- handing it over to torch ----------------------------------------------------------------------------------------


def _load(model: nn.Module, values: dict[str, Any], saved: Mapping[str, Any]) -> Any:
    try:
        return model.load_state_dict(_with_metadata(model, values, saved), strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"this state can't be loaded, and nothing was: {error}") from error


def _with_metadata(model: nn.Module, values: dict[str, Any], saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """`values` with the modules' version numbers under the paths that this model has; torch reads them by path."""
    given = getattr(saved, "_metadata", None)
    state: OrderedDict[str, Any] = OrderedDict(values)
    if given is None:
        return state
    by_path = {bare_path(path): path for path in sorted(given, key=len)}  # of wrappers and wrapped, the innermost
    metadata = {}
    for path, _ in model.named_modules(remove_duplicate=False):
        source = path if path in given and path not in by_path.values() else by_path.get(bare_path(path))
        if source is not None:
            metadata[path] = dict(given[source])
    state._metadata = metadata  # type: ignore[attr-defined]
    return state


def _as_own(key: str, own: Mapping[str, Any]) -> str:
    """A name of the checkpoint that the model has not, under the prefix that all of the model's names have."""
    prefix = ""
    for part in next(iter(own), "").split("."):
        if bare_path(part) or not all(name.startswith(f"{prefix}{part}.") for name in own):
            break
        prefix += f"{part}."
    return prefix + bare(key)


def _after_own_code(report: MatchReport, result: Any) -> MatchReport:
    """The report as torch saw it: hooks of the model may have renamed, added or excused names."""
    missing = set(result.missing_keys)
    found = [name for name in report.missing if name not in missing]
    return replace(
        report,
        loaded=tuple(report.loaded) + tuple(found),
        missing=tuple(name for name in report.missing if name in missing),
        unexpected=tuple(dict.fromkeys(result.unexpected_keys)),
    )
