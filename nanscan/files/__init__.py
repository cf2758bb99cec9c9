"""Reads the tensors of checkpoint files without running code in them and without holding more than one at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

__all__ = ["read"]


def read(path: str | os.PathLike[str]) -> Iterator[tuple[str, Tensor]]:
    """Read a checkpoint's tensors one at a time.

    Files of `torch.save` (also whole modules, optimizer states, and files from before PyTorch 1.6), plain pickles of
    tensors and arrays, ``.safetensors``, HDF5 (with h5py), ``.npz`` and ``.npy``; the content decides, not the suffix.
    Nothing in the file is imported or called. What can be told without reading data (``meta`` tensors, texts) is left
    out.

    Args:
        path: the file.

    Yields:
        The path of each tensor in the file as typed (``encoder.weight``, ``model.encoder.weight``,
        ``state["optimizer"]["state"][3]["exp_avg"]``), and the tensor, on the CPU, in its own dtype and shape. Tied
        tensors come once for each name.

    Raises:
        CorruptCheckpoint: the file is cut off, damaged, or made to harm its reader.
        CheckpointError: there is no reader for it, or the reader's package is not installed.
        OSError: it can't be opened.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"w": torch.ones(2), "opt": {"lr": 0.1, "m": torch.zeros(3)}}, folder + "/last.pt")
    ...     for name, tensor in read(folder + "/last.pt"):
    ...         print(name, tuple(tensor.shape))
    w (2,)
    state["opt"]["m"] (3,)
    """
    from nanscan.files.formats import open_file

    with open_file(Path(path)) as contents:
        for entry in contents.entries:
            if not entry.unread:
                tensor = entry.tensor()
                yield from ((name, tensor) for name in entry.names)
