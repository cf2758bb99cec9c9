"""Which checkpoint a restore takes: the newest that verifies and holds what is asked for."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nanscan import messages
from nanscan.checkpoint.load import load
from nanscan.errors import CheckpointError, CheckpointWarning, CorruptCheckpoint
from nanscan.manager.contents import FORMAT, PARTS, VERSION
from nanscan.manager.folder import Entry, Folder
from nanscan.manager.restored import PassedOver

__all__ = ["Chosen", "choose"]

_FIELDS = ("format", "version", "step", "epoch", "extra", "rng", "guard", "optimizer_names", "nanscan")


class Chosen(NamedTuple):
    """A checkpoint that is read, and those before it that could not be used."""

    path: Path
    saved: dict[str, Any]
    passed_over: tuple[PassedOver, ...]


class Unusable(Exception):
    """Why a file that can be read is no checkpoint to restore from."""


def choose(folder: Folder, only: Path | None, needs_model: bool) -> Chosen | None:
    """The newest usable checkpoint, read into host memory; None if there is none at all.

    Args:
        folder: where to look.
        only: take this file or none.
        needs_model: a file without a model's state is of no use.

    Raises:
        CorruptCheckpoint: there are checkpoints, and not one of them is usable; lists each with its reason.
    """
    passed: list[PassedOver] = []
    entries = list(reversed(folder.entries())) if only is None else [Entry(0, only)]
    for entry in entries:
        try:
            return Chosen(entry.path, _read(entry, needs_model), tuple(passed))
        except (CheckpointError, OSError, Unusable) as error:
            if only is not None and not isinstance(error, Unusable):
                raise
            if getattr(error, "errno", None) == errno.ENOENT:
                continue  # another process removed it just now, which has a newer one
            passed.append(PassedOver(entry.path, str(error)))
            if entry is not entries[-1]:
                _warn(passed[-1])
    if passed:
        raise CorruptCheckpoint(_nothing_usable(folder.path, passed))
    return choose(folder, None, needs_model) if entries and folder.entries() else None


def _read(entry: Entry, needs_model: bool) -> dict[str, Any]:
    saved = load(entry.path, map_location="cpu")
    if not isinstance(saved, dict):
        raise Unusable(f"it holds a {type(saved).__name__}, not the dict of a checkpoint")
    saved = _unified(saved, entry.step)
    if needs_model and "model" not in saved:
        has = ", ".join(map(repr, saved))
        raise Unusable(f"it holds no 'model' (only {has})")
    return saved


def _unified(saved: Mapping[Any, Any], step: int) -> dict[str, Any]:
    """A checkpoint's dict with the manager's names, also of one that torch.save wrote."""
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
        for key in (name, f"{name}_state_dict"):
            if isinstance(rest.get(key), Mapping):
                found[name] = rest.pop(key)
                break
    if not any(name in found for name in PARTS):
        raise Unusable("it is no checkpoint: its dict has none of " + ", ".join(map(repr, PARTS)))
    own = rest.pop("extra", {})
    for name in _FIELDS:
        if name in rest:
            found[name] = rest.pop(name)
    found["extra"] = {**rest, **own} if isinstance(own, Mapping) else {**rest, "extra": own}
    return found


def _warn(passed: PassedOver) -> None:
    messages.warn(f"nanscan: the checkpoint '{passed.path}' is passed over: {passed.reason}", CheckpointWarning)


def _nothing_usable(folder: Path, passed: Sequence[PassedOver]) -> str:
    lines = [f"  {item.path.name}: {item.reason}" for item in passed]
    head = f"none of the {len(passed)} checkpoints in '{folder}' can be used; nothing was restored:"
    return "\n".join([head, *lines, "Restore one from a backup, or remove them to begin anew."])
