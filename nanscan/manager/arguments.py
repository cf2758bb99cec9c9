"""What callers hand to the manager: checked, with errors that say what was given and what is wanted."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanscan.errors import CheckpointSystemError
from nanscan.local_paths import refuse_other_places

__all__ = ["checked_extra", "checked_folder", "checked_parts", "one_of"]


def checked_folder(directory: str | os.PathLike[str]) -> Path:
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(f"directory must be a path, got {type(directory).__name__}")
    refuse_other_places(directory, "directory")
    path = Path(directory).absolute()
    if path.exists() and not path.is_dir():
        text = f"cannot keep checkpoints in '{path}': it is a file; give a folder"
        raise CheckpointSystemError(errno.ENOTDIR, text, str(path))
    return path


def checked_parts(
    model: Any, optimizer: Any, scheduler: Any, scaler: Any, loader: Any, *, method: str
) -> dict[str, Any]:
    """The parts by name; each must have `method`, but for a loader, which may have no position."""
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    for name, part in (("scheduler", scheduler), ("scaler", scaler)):
        if part is not None and not callable(getattr(part, method, None)):
            raise TypeError(f"{name} must have {method}(), {type(part).__name__} has not")
    if method == "load_state_dict" and not hasattr(loader, method):
        loader = None
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "loader": loader}


def checked_extra(extra: Any) -> Mapping[str, Any]:
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise TypeError(f"extra must be a dict, got {type(extra).__name__}")
    other = next((key for key in extra if not isinstance(key, str)), None)
    if other is not None:
        raise TypeError(f"the keys of extra must be strings, got {other!r}")
    return extra


def one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    """`value`, if it is one of those.

    >>> one_of("on_error", "warn", ("raise", "warn"))
    'warn'
    """
    if value in allowed:
        return value
    *most, last = (f'"{item}"' if isinstance(item, str) else repr(item) for item in allowed)
    raise ValueError(f"{name} must be {', '.join(most)} or {last}, got {value!r}")
