"""Everything nanscan reads from the environment, parsed in this one place.

========================  =======================================================================================
Variable                  Meaning
========================  =======================================================================================
``NANSCAN_ENGINE``        ``auto`` (default), ``native``, ``eager`` or ``reference``. Anything but ``auto`` is a
                          request that raises where it can't be met.
``NANSCAN_CUDA``          ``auto`` (default), ``1`` (the CUDA part must build), ``0`` (never build or load it).
``NANSCAN_CUDA_ARCHS``    Which GPUs to compile for: ``all`` (default while installing), or compute capabilities such as
                          ``80,90``. On first use the default is the GPUs that PyTorch sees.
``NANSCAN_CACHE_DIR``     Where engines built on first use are kept (default ``~/.cache/nanscan``).
``NANSCAN_BUILD_TIMEOUT`` Seconds to wait for another process that is building (default 300).
``NANSCAN_VERBOSE``       ``1``: show the compiler's commands and output while building (default ``0``).
``NANSCAN_DEBUG``         ``1``: the command ``nanscan`` shows the traceback of an error (default ``0``).
========================  =======================================================================================

Only the standard library is imported here: ``setup.py`` loads this file by its path, before nanscan is installed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Config", "load_config"]

ENGINES = ("auto", "native", "eager", "reference")
CUDA_CHOICES = ("auto", "1", "0")


@dataclass(frozen=True)
class Config:
    """The settings of one process, as the environment gives them.

    Example:
        >>> load_config({"NANSCAN_ENGINE": "eager"}).engine
        'eager'
    """

    engine: str = "auto"
    cuda: str = "auto"
    cuda_archs: tuple[str, ...] = ()  # compute capabilities without the dot; empty: not chosen
    cache_dir: Path = Path("~/.cache/nanscan")
    build_timeout: float = 300.0  # seconds
    verbose: bool = False
    debug: bool = False


def load_config(environ: Mapping[str, str] | None = None) -> Config:
    """Read the ``NANSCAN_*`` variables.

    Args:
        environ: the variables, as strings; default: those of this process.

    Returns:
        The settings; an unset or empty variable has its default.

    Raises:
        ValueError: a variable has a value that is not one of those it knows; the message names them.

    Example:
        >>> load_config({"NANSCAN_BUILD_TIMEOUT": "60"}).build_timeout
        60.0
    """
    env = os.environ if environ is None else environ
    return Config(
        engine=_choice(env, "NANSCAN_ENGINE", ENGINES),
        cuda=_choice(env, "NANSCAN_CUDA", CUDA_CHOICES),
        cuda_archs=_archs(env, "NANSCAN_CUDA_ARCHS"),
        cache_dir=_cache_dir(env),
        build_timeout=_seconds(env, "NANSCAN_BUILD_TIMEOUT", 300.0),
        verbose=_switch(env, "NANSCAN_VERBOSE"),
        debug=_switch(env, "NANSCAN_DEBUG"),
    )


def _choice(env: Mapping[str, str], name: str, valid: tuple[str, ...]) -> str:
    value = env.get(name, "").strip().lower() or valid[0]
    if value not in valid:
        raise ValueError(f"{name}={env[name]!r} is not known: use one of {', '.join(valid)}, or unset it.")
    return value


def _archs(env: Mapping[str, str], name: str) -> tuple[str, ...]:
    text = env.get(name, "").strip().lower() or "all"
    archs = () if text == "all" else tuple(part.strip().replace(".", "") for part in text.split(","))
    if not all(re.fullmatch(r"\d{2,3}[af]?", arch) for arch in archs):
        raise ValueError(f"{name}={text!r} is not known: use all, or compute capabilities such as 80,90, or unset it.")
    return archs


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name, "").strip()
    try:
        value = float(text or default)
    except ValueError:
        value = -1.0
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{name}={text!r} is not a time: use a number of seconds above 0, such as 300, or unset it.")
    return value


def _switch(env: Mapping[str, str], name: str) -> bool:
    return _choice(env, name, ("0", "1")) == "1"


def _cache_dir(env: Mapping[str, str]) -> Path:
    """The folder asked for, else ``$XDG_CACHE_HOME/nanscan``, else ``~/.cache/nanscan``."""
    if chosen := env.get("NANSCAN_CACHE_DIR", "").strip():
        return _at_home(chosen).absolute()
    base = env.get("XDG_CACHE_HOME", "").strip() or env.get("HOME", "~").rstrip("/") + "/.cache"
    return _at_home(base) / "nanscan"


def _at_home(path: str) -> Path:
    """``path`` with ``~`` replaced; it is ``/``, as in a container, where the system does not know the user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path("/", *Path(path).parts[1:])
