"""The state of every random number generator that a training step draws from, as data that loads without pickle's code.

Python's `random`, NumPy's global generator, PyTorch's on the CPU and on every CUDA device. Generators that a program
made itself (`torch.Generator()`, `numpy.random.default_rng()`) are its own to save.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanscan import messages
from nanscan.errors import CheckpointError, CheckpointWarning

__all__ = ["rng_state", "set_rng_state"]


def rng_state() -> dict[str, Any]:
    """The present state of all global generators: tensors, numbers and strings only.

    Returns:
        `{"python": …, "numpy": …, "torch": uint8 tensor, "cuda": [uint8 tensor for each device]}`; "cuda" is empty as
        long as the program has not used CUDA. All tensors are on the CPU.

    >>> import torch
    >>> state = rng_state()
    >>> first = torch.rand(3), random.random(), np.random.rand()
    >>> set_rng_state(state)
    >>> second = torch.rand(3), random.random(), np.random.rand()
    >>> bool((first[0] == second[0]).all()), first[1:] == second[1:]
    (True, True)
    """
    version, words, gauss = random.getstate()
    used = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64, device="cpu"), "gauss": gauss},
        "numpy": _plain(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if used else [],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put every global generator back to what `rng_state` returned; parts that are not in `state` are left alone.

    A number of CUDA devices that is not the saved one is warned about (`CheckpointWarning`): devices that both have
    are restored, the others keep their state.

    Args:
        state: from `rng_state`, also after a save and a load, on any device.

    Raises:
        CheckpointError: a part is not what `rng_state` returns; the generators are then as they were before.
    """
    before = rng_state()
    try:
        _apply(state)
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError, OverflowError) as error:
        _apply(before)
        raise CheckpointError(
            f"the state of the random number generators can't be restored: {type(error).__name__}: {error}. "
            "It must be what nanscan.rng.rng_state() returned."
        ) from error


def _apply(state: Mapping[str, Any]) -> None:
    if "python" in state:
        python = dict(state["python"])
        words = python["words"]
        listed = words.tolist() if isinstance(words, Tensor) else list(words)
        random.setstate((python["version"], tuple(listed), python["gauss"]))
    if "numpy" in state:
        np.random.set_state(_arrays(state["numpy"]))
    if "torch" in state:
        torch.set_rng_state(state["torch"].cpu())
    _set_cuda(state.get("cuda", []))


def _set_cuda(states: list[Tensor]) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(min(count, len(states))):
        torch.cuda.set_rng_state(states[index].cpu(), index)
    if states and count != len(states):
        messages.warn(
            f"nanscan: the random state of {len(states)} CUDA devices was saved, and there are {count} here: "
            f"{min(count, len(states))} restored. Draws on the other devices will not repeat.",
            CheckpointWarning,
        )


def _plain(value: Any) -> Any:
    """NumPy's state with tensors for arrays (of unsigned integers, which fit in int64) and plain numbers."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        kind = "uint64" if value.dtype == np.uint64 else "int64"
        return {"dtype": str(value.dtype), "words": torch.from_numpy(value.astype(kind).view(np.int64))}
    return value.item() if isinstance(value, np.generic) else value


def _arrays(value: Any) -> Any:
    """The inverse of `_plain`."""
    if isinstance(value, Mapping) and value.keys() == {"dtype", "words"}:
        kind = "uint64" if value["dtype"] == "uint64" else "int64"
        return value["words"].cpu().numpy().view(kind).astype(value["dtype"])
    if isinstance(value, Mapping):
        return {key: _arrays(item) for key, item in value.items()}
    return value
