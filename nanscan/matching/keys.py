"""Which key of a checkpoint belongs to which of a model, where wrappers put prefixes before either."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence

from nanscan.names import clean

__all__ = ["bare", "bare_path", "pair", "renamings"]

Rename = Callable[[str], str]

_LIGHTNING = "model."  # what a LightningModule calls the network in it: a name that many models use themselves
_MOST_SUGGESTIONS = 50
_MOST_CANDIDATES = 200


def bare(key: str) -> str:
    """`key` without the parts that DataParallel, DDP, torch.compile, FSDP and activation checkpointing add.

    >>> bare("module._orig_mod.encoder._orig_mod.weight"), bare("module")
    ('encoder.weight', 'module')
    """
    path, dot, last = key.rpartition(".")
    path = bare_path(path)
    return f"{path}.{last}" if dot and path else last


def bare_path(path: str) -> str:
    """The same of a module's path, whose last part may be a wrapper's too.

    >>> bare_path("encoder.module"), bare_path("module")
    ('encoder', '')
    """
    return ".".join(part for part in clean(path).split(".") if part not in ("module", "_forward_module"))


def pair(saved: Sequence[str], own: Sequence[str], plain: Mapping[str, str] | None = None) -> dict[str, str]:
    """Own key -> saved key. Of the ways to read the prefixes, the one that matches most; of equals, the simplest.

    Args:
        saved: the checkpoint's keys.
        own: the model's keys.
        plain: own key -> the key without the wrappers that are known to be there, where it differs. Only a guess is
            possible for the checkpoint: in it a part "module" may be a wrapper's or the name of a submodule.

    >>> pair(["module.weight", "module.bias"], ["weight", "bias"])
    {'weight': 'module.weight', 'bias': 'module.bias'}
    """
    known = plain or {}

    def plainly(key: str) -> str:
        return known.get(key, key)

    found: dict[str, str] = {}
    for read_saved, read_own in _readings(saved, plainly):
        pairs = _pairs(saved, own, read_saved, read_own)
        if len(pairs) > len(found):
            found = pairs
        if len(found) == len(own):
            break
    used = set(found.values())
    rest = _pairs([k for k in saved if k not in used], [k for k in own if k not in found], bare, bare)
    found.update(rest)
    return found if len(found) == len(own) == len(saved) else _with_network_prefix(saved, own) or found


def _readings(saved: Sequence[str], plainly: Rename) -> Iterable[tuple[Rename, Rename]]:
    yield str, str
    yield str, plainly
    for depth in range(1, 1 + max((_leading(key) for key in saved), default=0)):
        yield _without_leading(depth), plainly
    yield clean, plainly
    for depth in range(1, 1 + max((_leading(clean(key)) for key in saved), default=0)):
        yield _cleaned_without_leading(depth), plainly
    yield bare, plainly
    yield bare, bare


def _leading(key: str) -> int:
    """How many parts at the beginning of `key` may be a wrapper's."""
    parts = key.split(".")[:-1]
    return next((i for i, part in enumerate(parts) if bare_path(part)), len(parts))


def _without_leading(depth: int) -> Rename:
    return lambda key: ".".join(key.split(".")[min(depth, _leading(key)) :])


def _cleaned_without_leading(depth: int) -> Rename:
    shorten = _without_leading(depth)
    return lambda key: shorten(clean(key))


def _pairs(saved: Sequence[str], own: Sequence[str], read_saved: Rename, read_own: Rename) -> dict[str, str]:
    theirs, ours = _unique(saved, read_saved), _unique(own, read_own)
    return {key: theirs[name] for name, key in ours.items() if name in theirs}


def _unique(keys: Sequence[str], read: Rename) -> dict[str, str]:
    """What is read -> key, without those that two keys are read as."""
    found: dict[str, str] = {}
    twice = set()
    for key in keys:
        name = read(key)
        if name in found:
            twice.add(name)
        found[name] = key
    return {name: key for name, key in found.items() if name not in twice}


def _with_network_prefix(saved: Sequence[str], own: Sequence[str]) -> dict[str, str] | None:
    """ "model." is taken for a prefix only where that matches every key of both sides."""

    def shortened(key: str) -> str:
        return bare(bare(key).removeprefix(_LIGHTNING))

    for read_saved, read_own in ((shortened, bare), (bare, shortened)):
        pairs = _pairs(saved, own, read_saved, read_own)
        if len(pairs) == len(own) == len(saved):
            return pairs
    return None


def renamings(
    missing: Sequence[str], unexpected: Sequence[str], shapes: Mapping[str, tuple[int, ...] | None]
) -> list[tuple[str, str]]:
    """(missing, unexpected) names that look like one thing renamed: nearly the same name, and the same shape.

    Args:
        missing: the model's names that the checkpoint has not.
        unexpected: the checkpoint's names that the model has not.
        shapes: of both, None where unknown.

    >>> renamings(["encoder.fc1.weight"], ["encoder.fc_1.weight"], {})
    [('encoder.fc1.weight', 'encoder.fc_1.weight')]
    """
    found, free = [], list(unexpected)
    for name in missing[:_MOST_SUGGESTIONS]:
        near = [other for other in free if shapes.get(other) == shapes.get(name)][:_MOST_CANDIDATES]
        close = difflib.get_close_matches(name, near, n=1, cutoff=0.6)
        if close:
            free.remove(close[0])
            found.append((name, close[0]))
    return found
