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

__all__ = ["checked_extra", "checked_folder", "checked_parts", "checked_path", "one_of"]


def checked_folder(directory: str | os.PathLike[str]) -> Path:
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(f"directory must be a path, got {type(directory).__name__}")
    refuse_other_places(directory, "directory")
    path = Path(directory).absolute()
    if path.exists() and not path.is_dir():
        text = f"cannot keep checkpoints in '{path}': it is a file; give a folder"
        raise CheckpointSystemError(errno.ENOTDIR, text, str(path))
    return path


def checked_path(path: Any) -> Path | None:
    """Which checkpoint to restore; None: the newest."""
    if path is None:
        return None
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise TypeError(f"path must be that of a checkpoint, as in manager.checkpoints(), got {path!r}")
    return Path(path)


def checked_parts(
    model: Any, optimizer: Any, scheduler: Any, scaler: Any, loader: Any, *, method: str
) -> dict[str, Any]:
    """The parts by name; each must have `method`, but for a loader, which may have no position."""
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {_kind(model)}{_one_module(model)}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {_kind(optimizer)}{_one('optimizer', optimizer)}"
        )
    for name, part in (("scheduler", scheduler), ("scaler", scaler)):
        if part is not None and (isinstance(part, type) or not callable(getattr(part, method, None))):
            raise TypeError(f"{name} must have {method}(), {_kind(part)} has not{_one(name, part)}")
    if method == "load_state_dict" and not hasattr(loader, method):
        loader = None
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "loader": loader}


def _kind(part: Any) -> str:
    return f"the class {part.__name__}" if isinstance(part, type) else type(part).__name__


def _one_module(given: Any) -> str:
    """What to do with several models, or with what is none."""
    if isinstance(given, Mapping):
        named = [str(name) for name, part in given.items() if isinstance(part, nn.Module)]
    else:
        several = given if isinstance(given, (list, tuple)) else ()
        named = [f"model_{index}" for index, part in enumerate(several) if isinstance(part, nn.Module)]
    if named:
        shown = ", ".join(f'"{name}": …' for name in named[:3]) + (", …" if len(named) > 3 else "")
        return f": name each in one module, model=torch.nn.ModuleDict({{{shown}}}), for save() and for restore()"
    if isinstance(given, Mapping) and any(isinstance(value, torch.Tensor) for value in given.values()):
        return ": give the model itself, not its state_dict()"
    return ": an optimizer is given as optimizer=" if isinstance(given, torch.optim.Optimizer) else ""


def _one(name: str, given: Any) -> str:
    """What to do with several optimizers, schedulers or scalers; the same with the first as the others."""
    if isinstance(given, Mapping) and "param_groups" in given:
        return f": give the {name} itself, not its state_dict()"
    if not isinstance(given, (list, tuple, Mapping)) or not given:
        return ""
    other = f"{name}_1" if not isinstance(given, Mapping) else str(list(given)[-1])
    return (
        f": give one here and name each of the others in extra={{'{other}': …}}, which stores its state_dict(); after "
        f'restore() load it from restored.extra["{other}"]'
    )


def checked_extra(extra: Any) -> Mapping[str, Any]:
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise TypeError(f'extra must be a dict, got {_kind(extra)}: name what it holds, extra={{"name": …}}')
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
