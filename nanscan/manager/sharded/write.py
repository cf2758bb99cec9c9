"""One checkpoint written by all ranks of a group: all of it is durable and verified before the marker says so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nanscan.checkpoint.save import save
from nanscan.errors import CheckpointError
from nanscan.manager.folder import Entry, Folder
from nanscan.manager.sharded import gate
from nanscan.manager.sharded.marker import Digest, Marker, check_files, digest_of, write_marker
from nanscan.manager.sharded.place import Place, sync_folder
from nanscan.manager.sharded.ranks import Ranks, RanksLost
from nanscan.manager.sharded.split import Split, own_values, rank_file, shared_pieces, split

__all__ = ["Options", "write_sharded"]


class Options(NamedTuple):
    """What the manager was told: see `CheckpointManager`."""

    check_finite: Any
    on_unpicklable: str


def write_sharded(
    state: Mapping[str, Any],
    buffers: frozenset[str],
    metric: Mapping[str, float],
    folder: Folder,
    ranks: Ranks,
    options: Options,
) -> Entry:
    """Write a step's folder; every rank calls it with its own state.

    Args:
        state: what `nanscan.manager.contents.contents` returned here.
        buffers: names of the model's tensors that each rank may hold for itself.
        metric: for the marker.
        folder: of the checkpoints.
        ranks: who writes.
        options: of the manager.

    Raises:
        NonFiniteError, CheckpointError: the same on all ranks; the folder is not there then.
        RanksLost: a rank did not answer; what is there has no marker and is no checkpoint.
    """
    step = int(state["step"])
    final = folder.directory(step)
    parts = _checked(state, buffers, final, ranks, options)
    place = Place(final)
    path = ranks.by_first(lambda: _made(place), "the new folder")
    try:
        written = _write(parts, path, ranks, options)
        files = _verified(path, written, ranks)
        ranks.by_first(lambda: _completed(place, Marker(step, ranks.size, files, dict(metric)), folder), "the marker")
    except RanksLost:
        place.let_go()
        raise
    except BaseException:
        if ranks.is_first:
            place.give_up()
        raise
    return Entry(step, final)


def _checked(state: Mapping[str, Any], buffers: frozenset[str], final: Path, ranks: Ranks, options: Options) -> Split:
    """The two parts of the state, if all ranks' states may be saved."""
    rank = ranks.ranks[ranks.index]
    found = ranks.together(lambda: gate.bad_rows(state, str(final), options.check_finite, rank), "what is not finite")
    gate.refuse(found, str(final), options.check_finite)
    parts = _split_together(state, ranks)
    pieces = ranks.together(lambda: shared_pieces(parts.tensors, ranks.size), "which tensors several ranks hold")
    own = own_values(pieces, parts.tensors, buffers)
    if own:
        parts.rest["own"] = own
    return parts


def _split_together(state: Mapping[str, Any], ranks: Ranks) -> Split:
    kept: list[Split] = []
    ranks.together(lambda: kept.append(split(state, ranks.index, ranks.size)), "the parts of the state")
    return kept[0]


def _made(place: Place) -> Path:
    place.make()
    return place.path


def _write(parts: Split, path: Path, ranks: Ranks, options: Options) -> dict[str, Digest]:
    """Write this rank's files; returns what each must hold."""
    from nanscan.manager.sharded.files import write_tensors  # torch.distributed.checkpoint takes a second to import

    name = rank_file(ranks.index)
    written = write_tensors(parts.tensors, path, ranks)

    def rest() -> None:
        save(parts.rest, path / name, check_finite=False, on_unpicklable=options.on_unpicklable)

    ranks.together(rest, "the ranks' own files")
    written[name] = digest_of(path / name)  # it was compared with what was to be written
    return written


def _verified(path: Path, written: Mapping[str, Digest], ranks: Ranks) -> dict[str, Digest]:
    """Read back what this rank wrote; all files of all ranks, if each is right and durable."""

    def verify() -> dict[str, Digest]:
        wrong = check_files(path, written, list(written))
        if wrong:
            raise CheckpointError(f"'{path}' was not written as it should: {'; '.join(wrong)}. The disk may be failing")
        sync_folder(path)
        return dict(written)

    every = ranks.together(verify, "whether all files are written")
    return {name: digest for files in every for name, digest in files.items()}


def _completed(place: Place, marker: Marker, folder: Folder) -> None:
    write_marker(place.path, marker)
    place.finish()
    folder.file(marker.step).unlink(missing_ok=True)  # a plain one of the same step is replaced by this one
