"""`nanscan.load`: what was saved, or an error that says what is wrong with the file; code in it is never run."""

from __future__ import annotations

import errno
import os
import pickle
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nanscan.checkpoint import digest, foreign
from nanscan.checkpoint.formats import format_of
from nanscan.checkpoint.reader import VerifyingReader
from nanscan.checkpoint.save import path_of
from nanscan.checkpoint.system import refused
from nanscan.errors import CheckpointError, CorruptCheckpoint

__all__ = ["load", "verify_file"]

_OF_DAMAGE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)
_NO_DEVICE = ("Attempting to deserialize object on", "don't know how to restore data location")


def load(
    path: str | os.PathLike[str], *, map_location: Any = None, weights_only: bool = True, verify: bool = True
) -> Any:
    """Load what `nanscan.save` or `torch.save` wrote, after comparing the file with its digests.

    Pickle data and zip headers are compared before anything is unpickled, each tensor's bytes while they are read.
    A file that `torch.save` wrote has no digests; the CRC-32 sums of its zip archive are compared instead.

    Args:
        path: of the file. ``.safetensors`` and ``.h5``/``.hdf5`` are read in those formats, ``.pdparams``,
            ``.pdopt``, ``.pdstates`` and ``.pdtensors`` as `paddle.load` does.
        map_location: where tensors go to, as for `torch.load` (for the other formats: a device).
        weights_only: True loads tensors, numbers, strings and containers and runs no code. False runs whatever code
            the file asks for: only for files that you trust.
        verify: False skips the comparison.

    Returns:
        The object that was saved.

    Raises:
        CorruptCheckpoint: the file is truncated, changed, empty or no checkpoint; damaged tensors are named.
        CheckpointError: ``weights_only=True`` refuses what is in it, or, with False, a class of it can't be imported,
            or it holds tensors of a device that is not here; the message says what and what to do.
        CheckpointSystemError: there is no such file, or it can't be read: an `OSError` with its ``errno``.

    >>> import nanscan, tempfile, torch
    >>> nanscan.load(nanscan.save({"w": torch.ones(2)}, tempfile.mkdtemp() + "/w.pt"))
    {'w': tensor([1., 1.])}
    """
    name = path_of(path)
    form = format_of(name)
    with _opened(name) as fd:
        if form is not None:
            return form.read(name, fd, map_location, verify, weights_only)
        seal = digest.read_seal(fd, name) if verify else None
        if seal is None:
            foreign.check_archive(fd, name, verify)
            return _load_plain(name, fd, map_location, weights_only)
        return _load_verified(name, fd, seal, map_location, weights_only)


def verify_file(path: str | os.PathLike[str]) -> None:
    """Compare every byte of a file with its digests, without unpickling anything.

    Raises:
        CorruptCheckpoint: it is damaged, or no checkpoint.
        CheckpointSystemError: there is no such file, or it can't be read.

    >>> import tempfile, torch
    >>> from nanscan.checkpoint.save import save
    >>> verify_file(save({"w": torch.ones(2)}, tempfile.mkdtemp() + "/w.pt"))
    """
    name = path_of(path)
    form = format_of(name)
    with _opened(name) as fd:
        if form is not None:
            form.check(fd, name)
        elif (seal := digest.read_seal(fd, name)) is not None:
            digest.check_seal(fd, name, seal)
        else:
            foreign.check_archive(fd, name, True)


@contextmanager
def _opened(path: str) -> Iterator[int]:
    """``path`` open for reading; what the system refuses becomes one clear error."""
    try:
        if not path or "\0" in path:
            raise OSError(errno.EINVAL, "not a path: it is empty or holds a null character")
        mode = os.stat(path).st_mode  # before opening: opening a pipe would wait for a writer
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, "a directory")
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a device, pipe or socket, not a file")
        fd = os.open(path, os.O_RDONLY)
        try:
            yield fd
        finally:
            os.close(fd)
    except CheckpointError:
        raise
    except OSError as error:
        raise refused(error, path, "load") from error


def _load_verified(path: str, fd: int, seal: digest.Seal, map_location: Any, weights_only: bool) -> Any:
    """Everything but the tensors is compared first, the tensors as torch reads them, the rest of them at the end."""
    digest.check_rest(fd, path, seal)
    digest.check_regions(fd, path, [region for region in seal.regions if not region.is_storage])
    reader = VerifyingReader(fd, path, seal)
    try:
        loaded = _torch_load(path, reader, map_location, weights_only)
    except Exception:
        if reader.failure is not None:
            raise reader.failure from None
        raise
    if reader.failure is not None:
        raise reader.failure
    digest.check_regions(fd, path, [region for region in reader.unread.values() if region.is_storage])
    return loaded


def _load_plain(path: str, fd: int, map_location: Any, weights_only: bool) -> Any:
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        try:
            return _torch_load(path, file, map_location, weights_only)
        except _OF_DAMAGE as error:
            own_code = callable(map_location) or not weights_only
            if own_code or isinstance(error, CheckpointError) or "allocate" in str(error) or not foreign.is_legacy(fd):
                raise
            raise _unreadable(path, error) from error


def _torch_load(path: str, file: Any, map_location: Any, weights_only: bool) -> Any:
    try:
        return torch.load(file, map_location=map_location, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        if not weights_only:
            raise _unreadable(path, error) from error
        raise foreign.refusal(path, error) from error
    except (EOFError, OSError) as error:  # torch on what is no archive: not the system's word
        raise _unreadable(path, error) from error
    except (ImportError, AttributeError) as error:
        missing = None if weights_only else foreign.missing_class(path, error)
        if missing is None:
            raise
        raise missing from error
    except RuntimeError as error:
        if isinstance(error, CheckpointError):
            raise
        if (other_system := foreign.path_of_another_system(path, error)) is not None:
            raise other_system from error
        if any(words in str(error) for words in _NO_DEVICE):
            raise _of_another_device(path, error) from error
        if "maximum supported version for reading" in str(error):
            raise _of_the_future(path, error) from error
        if "PytorchStreamReader" not in str(error) and "inline_container" not in str(error):
            raise
        raise _unreadable(path, error) from error


def _of_another_device(path: str, error: Exception) -> CheckpointError:
    said = str(error).partition(". ")[0].splitlines()[0]
    return CheckpointError(
        f"{path!r} holds tensors of a device that this machine does not have ({said}): "
        "nanscan.load(path, map_location='cpu'), or another device's name"
    )


def _of_the_future(path: str, error: Exception) -> CheckpointError:
    versions = re.search(r"with version (\d+), but the maximum supported version for reading is (\d+)", str(error))
    said = f"version {versions[1]} of the format, this one reads up to {versions[2]}" if versions else str(error)
    return CheckpointError(
        f"{path!r} was written by a newer PyTorch than this one, {torch.__version__} ({said}): update PyTorch, or save "
        "it again there as a state_dict in an older format (safetensors)"
    )


def _unreadable(path: str, error: Exception) -> CorruptCheckpoint:
    said = next(iter(str(error).splitlines()), "")
    name = "" if isinstance(error, (RuntimeError, OSError, pickle.UnpicklingError)) else f"{type(error).__name__}: "
    return CorruptCheckpoint(
        f"{path!r} is no checkpoint that can be read: {name}{said}. Use an older checkpoint or another copy."
    )
