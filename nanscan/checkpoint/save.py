"""`nanscan.save`: a state becomes a file in one moment, complete, finite, loadable and with a digest of every bit."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from nanscan import paddle_objects
from nanscan.checkpoint import digest
from nanscan.checkpoint.atomic import replacing, target_of
from nanscan.checkpoint.finite import MODES, check_finite_state
from nanscan.checkpoint.formats import Format, format_of
from nanscan.checkpoint.picklable import PickleWatch, problems_of, refuse_paddle, refuse_shards, unpicklable
from nanscan.checkpoint.system import refused
from nanscan.checkpoint.tensors import Found, Seen, tensors_in
from nanscan.checkpoint.writer import DigestingWriter
from nanscan.errors import CheckpointError, CheckpointWarning
from nanscan.local_paths import refuse_other_places
from nanscan.messages import warn
from nanscan.pickling.drop import drop_all, drop_unpicklable
from nanscan.pickling.naming import caller_frame, root_name
from nanscan.pickling.problem import PickleProblem, in_lines

__all__ = ["save"]

_UNTOUCHED = "The file that was there is untouched"
_ROUNDS = 3  # of leaving things out: what is left of a container may be refused in its turn
_OVERHEAD = 4096  # bytes of an archive beyond its tensors, roughly


def save(
    obj: Any,
    path: str | os.PathLike[str],
    *,
    check_finite: bool | str = True,
    on_unpicklable: str = "raise",
) -> Path:
    """Save a state so that the file is either the old one or the complete new one, whatever happens meanwhile.

    The state is written to a temporary file in the same folder, flushed to the disk, compared with its digests, and
    renamed over ``path``; then the folder is flushed. A file that is replaced keeps its mode bits and, where
    permitted, its owner; symbolic links are followed; another hard link to it keeps the old content; missing folders
    are made. Temporary files of processes that were killed are removed by the next save to the same path.

    The file is what `torch.save` writes, with a digest (xxh3_128) of every tensor in one more member of the archive:
    ``torch.load(path)`` opens it without nanscan, with ``mmap=True`` too.

    Args:
        obj: dicts, lists and tuples of tensors, numbers and strings, such as ``model.state_dict()``, nested.
        path: where to. ``.safetensors`` and ``.h5``/``.hdf5`` are written in those formats (dicts of tensors only);
            ``.pdparams``, ``.pdopt``, ``.pdstates`` and ``.pdtensors``, for Paddle's tensors, are what `paddle.save`
            writes, with the digests behind it: ``paddle.load(path)`` opens them. Any other name is a torch file.
        check_finite: True refuses a state in which a floating-point or complex tensor holds a NaN or Inf; "nan" allows
            Inf (masks hold it on purpose); False looks at nothing. Numbers outside of tensors are never looked at: a
            best loss may well begin at inf.
        on_unpicklable: "raise" refuses a state with a value that can't be pickled, or that
            ``torch.load(weights_only=True)`` would refuse, and lists every one; "drop" leaves them out and warns. A
            scheduler's functions, which its ``state_dict()`` replaces by None, are warned about.

    Returns:
        The path.

    Raises:
        NonFiniteError: by ``check_finite``, with ``.report``.
        CheckpointError: by ``on_unpicklable``, with ``.problems``; for sharded tensors (DTensor).
        CheckpointSystemError: the system refused (full disk, permission …): an `OSError` with its ``errno``.
        TypeError: ``path`` is a file object, which can't be replaced in one moment, or stands before ``obj``.
        ValueError: ``path`` begins with ``~`` or is a URL.

    >>> import nanscan, tempfile, torch
    >>> path = nanscan.save({"w": torch.ones(3), "step": 7}, tempfile.mkdtemp() + "/last.pt")
    >>> nanscan.load(path)["step"], torch.load(path)["step"]
    (7, 7)
    """
    if check_finite not in MODES or on_unpicklable not in ("raise", "drop"):
        raise ValueError(
            f'check_finite is True, False or "nan" (got {check_finite!r}); on_unpicklable is "raise" or "drop" '
            f"(got {on_unpicklable!r})"
        )
    if issubclass(type(obj), (str, os.PathLike)) and not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"the arguments are the other way round: nanscan.save({type(path).__name__}, {str(obj)!r})")
    name = path_of(path)
    form, root = format_of(name), root_name(obj, caller_frame())
    for _ in range(_ROUNDS if on_unpicklable == "drop" else 0):
        try:
            _save(obj, root, name, form, check_finite)
            return Path(name)
        except CheckpointError as error:
            problems = getattr(error, "problems", None)
            left = _without(obj, root, name, form, problems) if problems else obj
            if left is obj:
                raise
            obj = left
    _save(obj, root, name, form, check_finite)
    return Path(name)


def path_of(path: Any) -> str:
    """A path as text."""
    try:
        name = os.fsdecode(path)
    except TypeError:
        raise TypeError(
            f"path is a {type(path).__name__}: nanscan.save and nanscan.load take a path (str or pathlib.Path). A file "
            "object can't be replaced in one moment; use torch.save and torch.load for it"
        ) from None
    refuse_other_places(name, "path")
    return name


def _save(obj: Any, root: str, path: str, form: Format | None, mode: bool | str) -> None:
    seen = Seen()
    found = _tensors_in(obj, root, path, seen)
    refuse_shards(found, path)
    if paddle_objects.imported() and not (form is not None and form.holds_paddle):
        refuse_paddle(obj, found, path)
    try:
        with replacing(target_of(path)) as new:
            if form is None:
                whole = _write_torch(
                    obj, root, new.fd, path, found, seen, lambda: check_finite_state(found, path, mode)
                )
                new.check = lambda fd: digest.check_written(fd, path, whole)
            else:
                also = form.prepare(obj, path)
                check_finite_state([*found, *also], path, mode)
                form.write(obj, new.path)
                new.follow()
                new.check = lambda fd: form.check(fd, path)
    except OSError as error:
        raise refused(error, path, "save", _bytes_of(found), _UNTOUCHED if os.path.isfile(path) else "") from error
    empty = [item.path for item in found if isinstance(item.tensor, torch.Tensor) and item.tensor.is_meta]
    if empty:
        more = f" and {len(empty) - 3} more" if len(empty) > 3 else ""
        warn(
            f"saved to {path!r} without the values of {', '.join(empty[:3])}{more}: on the meta device there are none "
            "(a model that was offloaded, or made under torch.device('meta'))",
            CheckpointWarning,
        )
    if seen.lost_functions and not _is_managers(obj):
        warn(
            f"saved to {path!r} without the functions of a scheduler, which its state_dict() leaves out: "
            f"{', '.join(seen.lost_functions)}. Make the scheduler with the same functions before load_state_dict()",
            CheckpointWarning,
        )


def _is_managers(obj: Any) -> bool:
    """A `CheckpointManager` has said what its file leaves out."""
    return type(obj) is dict and obj.get("format") == "nanscan-checkpoint"


def _tensors_in(obj: Any, root: str, path: str, seen: Seen) -> list[Found]:
    try:
        return tensors_in(obj, seen)
    except RecursionError as error:
        raise unpicklable(obj, path, problems_of(obj, root, ()), error) from error


def _write_torch(
    obj: Any, root: str, fd: int, path: str, found: Sequence[Found], seen: Seen, check: Callable[[], None]
) -> digest.Written:
    """Write the archive with its digests; ``check`` is called after pickling, before the first byte is written."""
    watch = PickleWatch(seen.huge, found)

    def before_writing() -> None:
        if not watch.is_loadable():
            raise unpicklable(obj, path, problems_of(obj, root, list(watch.suspects.values())), None)
        check()

    written = DigestingWriter(fd, before_writing)
    try:
        torch.save(obj, cast(Any, written), pickle_module=watch.module)
    except Exception as error:
        if written.failure is not None:
            raise written.failure from None
        raise unpicklable(obj, path, problems_of(obj, root, list(watch.suspects.values())), error) from error
    except BaseException:
        if written.failure is not None:
            raise written.failure from None
        raise
    written.flush()
    return digest.add_digests(fd, written, watch.paths(found))


def _bytes_of(found: Sequence[Found]) -> int:
    """About how many bytes the file takes."""
    paddle: list[Any] = [item.tensor for item in found if paddle_objects.is_tensor(item.tensor)]
    sizes = {
        item.tensor.untyped_storage()._cdata: item.tensor.untyped_storage().nbytes()
        for item in found
        if not paddle_objects.is_tensor(item.tensor) and _has_storage(item)
    }
    return sum(sizes.values()) + sum(int(t.size) * int(t.itemsize) for t in paddle) + _OVERHEAD


def _has_storage(item: Found) -> bool:
    try:
        item.tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return False
    return not item.tensor.is_meta


def _without(obj: Any, root: str, path: str, form: Format | None, problems: Sequence[PickleProblem]) -> Any:
    """The state without what can't be saved, after a warning that names all of it; itself where nothing can go."""
    if form is None:
        left, found = drop_all(obj, name=root, weights_only=True)
        problems = [problem for problem in found if problem.severity == "error"]
    else:
        left = drop_unpicklable(obj, problems)
    if left is obj:
        return obj
    listed = in_lines(problems)
    warn(f"nanscan.save left {len(problems)} value(s) out of {path!r}:\n  {listed}", CheckpointWarning)
    return left
