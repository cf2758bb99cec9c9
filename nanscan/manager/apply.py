"""Loading a checkpoint's parts into the objects of a run: all of them, or none."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nanscan import messages
from nanscan.errors import CheckpointError, CheckpointWarning
from nanscan.guard import GuardedOptimizer
from nanscan.manager.contents import PARTS, generators_of
from nanscan.manager.schedules import compare_scheduler, quoted
from nanscan.manager.sharded.ranks import ALONE, Ranks
from nanscan.matching import MatchReport, load_model_state, load_optimizer_state
from nanscan.matching.undo import Before
from nanscan.rng import rng_state, set_rng_state
from nanscan.state_copy import copy_state

__all__ = ["Matches", "apply", "report_differences"]

Matches = dict[str, MatchReport]
Undo = list[Callable[[], Any]]
_NO_OPTIONS = frozenset({
    "params", "param_names", "initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr", "max_momentum", "base_momentum",
})  # fmt: skip  # what parameters and schedulers put into groups of any kind


def report_differences(saved: Mapping[str, Any], parts: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(parts asked for and not in the file, parts in the file and not asked for), both warned about by name."""
    wanted = [name for name in PARTS if parts[name] is not None] + ["rng"]
    missing = tuple(name for name in wanted if not _is_held(name, saved, parts))
    unused = tuple(name for name in PARTS if name in saved and parts[name] is None)
    if missing:
        messages.warn(
            f"nanscan: not in the checkpoint and left as they are: {', '.join(missing)}. The resumed run will not "
            "follow the one that was interrupted.",
            CheckpointWarning,
        )
    if unused:
        messages.warn(
            f"nanscan: in the checkpoint and not restored: {', '.join(unused)}. Give them to restore() too "
            f"({', '.join(f'{name}={name}' for name in unused)}).",
            CheckpointWarning,
        )
    return missing, unused


def _is_held(name: str, saved: Mapping[str, Any], parts: Mapping[str, Any]) -> bool:
    """Whether a checkpoint holds a part; a scaler that was disabled has left nothing for one that is enabled."""
    if name == "scaler" and saved.get(name) == {} and parts[name] is not None:
        return not parts[name].state_dict()
    return name in saved


def apply(saved: Mapping[str, Any], parts: Mapping[str, Any], strict: bool, ranks: Ranks = ALONE) -> Matches:
    """Load every part that both sides have; after an exception, on any rank, all parts are as they were.

    The random state comes last, so that nothing that happens here disturbs it.

    Args:
        saved: the checkpoint.
        parts: name in `PARTS` -> the object, or None.
        strict: as for `nanscan.matching.load_model_state`.
        ranks: who restores.

    Raises:
        CheckpointError: a part does not fit its state.
    """
    before = rng_state()
    undo: Undo = [lambda: set_rng_state(before)]
    both = {name: part for name, part in parts.items() if part is not None and _is_held(name, saved, parts)}
    found: list[Matches] = []

    def load() -> None:
        if "rng" in saved:
            set_rng_state(saved["rng"])  # first of all it must be valid
        for name in ("scheduler", "scaler", "loader"):
            if name in both:
                _load_small(name, both[name], saved[name], undo)
        if "model" in both and ranks.size > 1:  # it may be loaded here, and fail elsewhere
            undo.append(Before(both["model"], dict(both["model"].state_dict(keep_vars=True))).restore)
        found.append(_load_large(saved, both, strict, undo))

    try:
        ranks.together(load, "whether all parts were loaded")
    except BaseException:
        for step in reversed(undo):
            try:
                step()
            except Exception as error:  # of the part itself; the others are put back all the same
                said = f"{type(error).__name__}: {error}"
                messages.warn(f"nanscan: a part could not be put back as it was ({said})", CheckpointWarning)
        raise
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)  # said the first time
        set_rng_state(saved.get("rng", {}))
    _load_generators(saved.get("rng", {}), both.get("loader"))
    return found[0]


def _load_generators(state: Any, loader: Any) -> None:
    """What a loader's own generators draw next; they come after the loader, which draws while it is loaded."""
    held = state.get("loader", []) if isinstance(state, Mapping) else []
    own = generators_of(loader) if held else []
    for generator, words in zip(own, held, strict=False):
        generator.set_state(words.cpu())


def _load_large(saved: Mapping[str, Any], both: Mapping[str, Any], strict: bool, undo: Undo) -> Matches:
    """Optimizer and model; the model last, as its loading is all or nothing and its undoing costs most."""
    for name in both.keys() & {"model", "optimizer"}:
        if not isinstance(saved[name], Mapping):
            kind = type(saved[name]).__name__
            raise CheckpointError(f"the checkpoint's {name!r} is a {kind}, not a state dict; nothing was restored")
    matches: Matches = {}
    if "optimizer" in both:
        optimizer = both["optimizer"]
        _compare_optimizer(optimizer, saved["optimizer"], strict)
        undo.append(_undo_optimizer(optimizer))
        names = saved.get("optimizer_names")
        matches["optimizer"] = load_optimizer_state(
            optimizer,
            saved["optimizer"],
            model=both.get("model"),
            names=names,
            strict=strict,
            dtypes=_dtypes(saved.get("model")),
        )
        if isinstance(optimizer, GuardedOptimizer):
            _load_guard(optimizer, saved.get("guard"), strict, undo)
    if "model" in both:
        matches["model"] = load_model_state(both["model"], saved["model"], strict=strict)
    return matches


def _dtypes(model: Any) -> dict[str, torch.dtype]:
    """What each parameter was held in when it was saved; empty without the model's state."""
    held = model.items() if isinstance(model, Mapping) else ()
    return {name: value.dtype for name, value in held if isinstance(value, torch.Tensor)}


def _load_guard(guard: GuardedOptimizer, state: Any, strict: bool, undo: Undo) -> None:
    """What the guard itself remembers; None if the checkpoint was saved with a plain optimizer."""
    if state is None:
        return
    former = guard.guard_state_dict()
    if isinstance(state, Mapping) and "format" not in state:  # older ones hold the counters alone
        state = {**former, "clip": None, "spikes": None, "counters": state}
    undo.append(lambda: guard.load_guard_state_dict(former))
    try:
        guard.load_guard_state_dict(state)
    except (TypeError, ValueError) as error:
        if strict:
            raise CheckpointError(f"{error}. Nothing was restored; strict=False leaves this out") from error
        messages.warn(f"nanscan: {error}", CheckpointWarning)


def _load_small(name: str, part: Any, state: Any, undo: Undo) -> None:
    """Scheduler, scaler or loader: their states are small enough to be kept for the undoing."""
    former = copy_state(part.state_dict())
    if name == "scheduler":
        compare_scheduler(part, former, state)
    if former:
        undo.append(lambda: part.load_state_dict(former))
    try:
        part.load_state_dict(state)
    except Exception as error:
        raise CheckpointError(
            f"the state of the {name} can't be loaded into this {type(part).__name__}, and nothing was restored: "
            f"{type(error).__name__}: {error}"
        ) from error
    if name == "loader" and hasattr(part, "state_dict"):
        part.state_dict()  # a StatefulDataLoader makes its iterator now, which draws a number, and not later


def _compare_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], strict: bool) -> None:
    """An optimizer takes over the options and the state of another kind of optimizer too, and fails later or never.

    Options that one side lacks are a matter of PyTorch's version; where both lack some, it is another kind.
    """
    saved = {str(name) for group in state.get("param_groups", ()) for name in group}
    own = {str(name) for name in optimizer.defaults}
    lacks, foreign = own - saved, saved - own - _NO_OPTIONS
    if not saved or not lacks or not foreign:
        return
    inner = optimizer.optimizer if isinstance(optimizer, GuardedOptimizer) else optimizer
    text = (
        f"the state of the optimizer seems to be that of another kind than {type(inner).__name__}: its groups have "
        f"{quoted(foreign)} and lack {quoted(lacks)}"
    )
    if strict:
        raise CheckpointError(f"{text}; nothing was restored. Leave the optimizer out, or give strict=False")
    messages.warn(f"nanscan: {text}", CheckpointWarning)


def _undo_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Loading binds new dicts and leaves the old ones alone, but for the options of groups."""
    inner = optimizer.optimizer if isinstance(optimizer, GuardedOptimizer) else optimizer
    state, groups = inner.state, inner.param_groups
    entries = {key: dict(value) if isinstance(value, dict) else value for key, value in state.items()}
    options = [dict(group) for group in groups]

    def undo() -> None:
        state.clear()
        state.update(entries)
        for group, option in zip(groups, options, strict=True):
            group.clear()
            group.update(option)
        inner.state, inner.param_groups = state, groups

    return undo
