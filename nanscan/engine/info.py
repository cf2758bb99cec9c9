"""What `nanscan.engine_info` answers: which engine runs, why, and how to get a faster one."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

from nanscan.config import Config, load_config
from nanscan.engine import toolchain
from nanscan.engine.build import Outcome, cuda_outcome, native_outcome

__all__ = ["EngineInfo", "engine_info"]


@dataclass(frozen=True)
class EngineInfo:
    """Which engine scans in this process, and what it is made of.

    Attributes:
        engine: ``native``, ``eager`` or ``reference``.
        why: why it is that one.
        faster: how to get a faster one; empty if this is the fastest.
        native: the compiled CPU module: ``prebuilt``, ``jit`` (built on first use), ``not built`` (the first scan does
            that), ``failed``, or ``not asked for``.
        native_path: its file, if it is there.
        instruction_set: what its loops use on this processor, such as ``x86-64-v3``; None if it is not loaded.
        threads: how many threads a scan on the CPU may use.
        cuda: the CUDA library, in the same words as ``native``, or ``not needed`` (PyTorch is built without CUDA).
        cuda_why: why it is there, or is not.
        cuda_path: its file, if it is there.
        cuda_toolkit: the CUDA toolkit found, or where one was looked for.
        compiler: the C++ compiler found, or that there is none.
        cache_dir: where engines built on first use are kept.
    """

    engine: str
    why: str
    faster: str
    native: str
    native_path: str | None
    instruction_set: str | None
    threads: int
    cuda: str
    cuda_why: str
    cuda_path: str | None
    cuda_toolkit: str
    compiler: str
    cache_dir: str

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain data, ready for JSON.

        Example:
            >>> engine_info().to_dict()["engine"] in ("native", "eager", "reference")
            True
        """
        return asdict(self)

    def rows(self) -> dict[str, str]:
        """The facts in words, by heading, in the order in which they are shown; without those that have nothing to say.

        Example:
            >>> list(engine_info().rows())[0]
            'engine'
        """
        rows = {
            "engine": f"{self.engine}: {self.why}",
            "to go faster": self.faster,
            "cpu": f"{self.instruction_set + ', ' if self.instruction_set else ''}{self.threads} threads",
            "cuda": f"{self.cuda}: {self.cuda_why}",
            "cuda toolkit": self.cuda_toolkit,
            "compiler": self.compiler,
            "cache": self.cache_dir,
        }
        return {name: text for name, text in rows.items() if text}

    def __str__(self) -> str:
        pad = "\n" + " " * 14
        return "\n".join(f"{name:<14}{pad.join(text.splitlines())}" for name, text in self.rows().items())


def engine_info() -> EngineInfo:
    """Which engine scans in this process, why, and how to get a faster one.

    Compiles nothing: a compiled module that is not built yet is reported as such, and built by the first scan.

    Returns:
        The facts; ``str()`` of it is what a bug report needs.

    Raises:
        ValueError: a ``NANSCAN_*`` variable has a value it does not know.

    Example:
        >>> print(engine_info())  # doctest: +ELLIPSIS
        engine ...
    """
    config = load_config()
    compiled = config.engine in ("auto", "native")
    native = native_outcome(may_compile=False) if compiled else _not_asked_for(config)
    cuda = cuda_outcome(may_compile=False) if compiled else _not_asked_for(config)
    engine, why, faster = _choose(config, native)
    search = toolchain.search_cuda()
    return EngineInfo(
        engine=engine,
        why=why,
        faster=faster,
        native=native.how,
        native_path=getattr(native.value, "__file__", None),
        instruction_set=native.value.instruction_set() if native.value else None,
        threads=_threads(native.value),
        cuda=cuda.how,
        cuda_why=f"{cuda.why}\n{cuda.remedy}".strip() if cuda.how == "failed" else cuda.why,
        cuda_path=str(cuda.value) if cuda.value else None,
        cuda_toolkit=str(search.toolkit or " ".join(search.tried)),
        compiler=str(toolchain.find_cxx() or "none (neither CXX nor c++, g++, clang++ on PATH)"),
        cache_dir=str(config.cache_dir),
    )


def _choose(config: Config, native: Outcome[ModuleType]) -> tuple[str, str, str]:
    """The engine, why it is that one, and how to get a faster one."""
    if config.engine in ("eager", "reference"):
        return config.engine, native.why, native.remedy
    if native.how == "failed" and config.engine == "auto":
        return "eager", f"the compiled engine is not available.\n{native.why}", native.remedy
    return "native", native.why, native.remedy


def _not_asked_for(config: Config) -> Outcome[Any]:
    name = f"NANSCAN_ENGINE={config.engine}"
    return Outcome(None, "not asked for", f"{name} chooses it.", f"Unset NANSCAN_ENGINE (it is {config.engine}).")


def _threads(module: ModuleType | None) -> int:
    if module is not None:
        return int(module.max_threads())
    try:
        import torch
    except ImportError:
        return os.cpu_count() or 1
    return torch.get_num_threads()
