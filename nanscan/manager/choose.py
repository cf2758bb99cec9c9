"""Which checkpoint a restore takes: the newest that verifies and holds what is asked for."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanscan import messages
from nanscan.checkpoint.finite import nan_in
from nanscan.checkpoint.load import load
from nanscan.checkpoint.tensors import tensors_in
from nanscan.errors import CheckpointError, CheckpointWarning, CorruptCheckpoint
from nanscan.manager.contents import FORMAT, PARTS, VERSION
from nanscan.manager.folder import Entry, Folder
from nanscan.manager.restored import PassedOver
from nanscan.manager.sharded.choose import candidates, read_sharded
from nanscan.manager.sharded.ranks import Ranks, RanksLost
from nanscan.manager.sharded.reading import laid_out, own_part

__all__ = ["Chosen", "choose"]

_FIELDS = ("format", "version", "step", "epoch", "extra", "rng", "guard", "optimizer_names", "nanscan")
_OTHER_NAMES = {"model": ("state_dict", "net"), "scheduler": ("lr_scheduler",)}  # of torch.save, in scripts of others
_OTHER_STEPS = ("global_step", "global_steps", "iteration", "iter")


class Chosen(NamedTuple):
    """A checkpoint that is read, and those before it that could not be used."""

    path: Path
    saved: dict[str, Any]
    passed_over: tuple[PassedOver, ...]


class Unusable(Exception):
    """Why a file that can be read is no checkpoint to restore from."""


def choose(
    folder: Folder, only: Path | None, parts: Mapping[str, Any], ranks: Ranks, check: bool = True
) -> Chosen | None:
    """The newest usable checkpoint, read into host memory (shards where the run has them); None if there is none.

    Args:
        folder: where to look.
        only: take this one or none.
        parts: what is to be restored, by name; with a model, a checkpoint without a model's state is of no use.
        ranks: who restores; all take the same one.
        check: a file of others with a NaN in its weights or its optimizer's state is of no use.

    Raises:
        CorruptCheckpoint: there are checkpoints, and not one of them is usable; lists each with its reason.
    """
    passed: list[PassedOver] = []
    entries, incomplete = candidates(folder, only, ranks)
    for entry in entries:
        _pass_incomplete(passed, incomplete, entry.step)
        try:
            return Chosen(entry.path, _read(entry, parts, ranks, only is not None, check), tuple(passed))
        except RanksLost:
            raise
        except (CheckpointError, OSError, Unusable) as error:
            if only is not None and not isinstance(error, Unusable):
                raise
            if getattr(error, "errno", None) == errno.ENOENT:
                continue  # another process removed it just now, which has a newer one
            passed.append(PassedOver(entry.path, str(error)))
            if entry is not entries[-1]:
                _warn(passed[-1])
    if not entries:
        _pass_incomplete(passed, incomplete, -1)  # killed in its first save: the run begins anew
        return None
    if passed:
        if only is not None:
            raise CorruptCheckpoint(f"'{only}' can't be used; nothing was restored: {passed[-1].reason}")
        raise CorruptCheckpoint(_nothing_usable(folder.path, passed))
    there = ranks.by_first(folder.entries, "which checkpoints there are")
    return choose(folder, None, parts, ranks, check) if there else None


def _pass_incomplete(passed: list[PassedOver], incomplete: list[Entry], step: int) -> None:
    """Note, with a warning, the folders of later steps that lack their marker."""
    while incomplete and incomplete[0].step >= step:
        entry = incomplete.pop(0)
        passed.append(PassedOver(entry.path, "it is incomplete (no marker): its writers were killed, or are at it now"))
        _warn(passed[-1])


def _read(entry: Entry, parts: Mapping[str, Any], ranks: Ranks, named: bool, check: bool) -> dict[str, Any]:
    """A checkpoint's dict on every rank, or the same error on all."""
    kept: list[dict[str, Any]] = []
    if ranks.by_first(lambda: entry.is_sharded, "what kind of checkpoint it is"):
        kept.append(read_sharded(entry, parts, ranks))
    else:
        ranks.together(lambda: kept.append(_read_file(entry, named, check)), "what was read")
        kept[0] = laid_out(own_part(kept[0], ranks), parts)
    if parts.get("model") is not None and "model" not in kept[0]:
        has = ", ".join(map(repr, kept[0]))
        raise Unusable(f"it holds no 'model' (only {has})")
    return kept[0]


def _read_file(entry: Entry, named: bool, check: bool) -> dict[str, Any]:
    saved = load(entry.path, map_location="cpu")
    if not isinstance(saved, dict):
        raise Unusable(f"it holds a {type(saved).__name__}, not the dict of a checkpoint")
    found = _unified(saved, entry.step, named)
    if check and saved.get("format") != FORMAT:  # the manager's own were looked at before they were written
        _judge_values(entry, found, named)
    return found


def _judge_values(entry: Entry, found: Mapping[str, Any], named: bool) -> None:
    bad = nan_in(tensors_in({name: found[name] for name in ("model", "optimizer") if name in found}))
    if bad and not named:
        raise Unusable(
            f"it was saved after the run had diverged: {bad}. CheckpointManager(check_finite=False) takes it"
        )
    if bad:
        messages.warn(f"nanscan: '{entry.path}' holds NaN, and is restored as it was named: {bad}", CheckpointWarning)


def _unified(saved: Mapping[Any, Any], step: int, named: bool) -> dict[str, Any]:
    """A checkpoint's dict with the manager's names, also of one that torch.save wrote.

    A file that the user named may also hold the state of a model and nothing around it.
    """
    if saved.get("format") == FORMAT:
        version = saved.get("version")
        if not isinstance(version, int) or version > VERSION:
            raise Unusable(
                f"it has version {version!r} of the format, this nanscan reads up to {VERSION}: update nanscan"
            )
        return dict(saved)
    found: dict[str, Any] = {"step": step}
    rest = dict(saved)
    for name in PARTS:
        for key in (name, f"{name}_state_dict", *_OTHER_NAMES.get(name, ())):
            if isinstance(rest.get(key), Mapping):
                found[name] = rest.pop(key)
                break
    if not any(name in found for name in PARTS):
        if named and _is_state_dict(saved):
            return {**found, "model": saved}
        raise Unusable(_without_parts(saved))
    own = rest.pop("extra", {})
    for name in _FIELDS:
        if name in rest:
            found[name] = rest.pop(name)
    if named and "step" not in saved:
        found["step"] = next((saved[key] for key in _OTHER_STEPS if type(saved.get(key)) is int), step)
    found["extra"] = {**rest, **own} if isinstance(own, Mapping) else {**rest, "extra": own}
    return found


def _without_parts(saved: Mapping[Any, Any]) -> str:
    keys = [repr(key)[:60] for key in saved]
    has = (", ".join(keys[:6]) + (f" and {len(keys) - 6} more" if len(keys) > 6 else "")) or "nothing"
    text = f"it is no checkpoint: its dict has {has}, and none of {', '.join(map(repr, PARTS))}"
    inner = next((key for key, value in saved.items() if isinstance(value, Mapping) and _is_state_dict(value)), None)
    how = f"model.load_state_dict(nanscan.load(path)[{inner!r}])"
    return text if inner is None else f"{text}. If its {inner!r} is the model's state: {how}"


def _is_state_dict(saved: Mapping[Any, Any]) -> bool:
    tensors = [isinstance(value, torch.Tensor) for key, value in saved.items() if not str(key).endswith("_extra_state")]
    return any(tensors) and all(tensors) and all(isinstance(key, str) for key in saved)


def _warn(passed: PassedOver) -> None:
    messages.warn(f"nanscan: the checkpoint '{passed.path}' is passed over: {passed.reason}", CheckpointWarning)


def _nothing_usable(folder: Path, passed: Sequence[PassedOver]) -> str:
    lines = [f"  {item.path.name}: {item.reason}" for item in passed]
    head = f"none of the {len(passed)} checkpoints in '{folder}' can be used; nothing was restored:"
    return "\n".join([head, *lines, "Restore one from a backup, or remove them to begin anew."])
