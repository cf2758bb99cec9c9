"""Reads an HDF5 file in a process of its own: the C library may crash or hang on a damaged one.

Run as a script, without the package around it: ``python hdf5_child.py FILE``. Its first line of output is a JSON
list of the datasets; after that, for each line of input that holds a dataset's number, it writes that dataset's bytes
in row-major order.
"""

from __future__ import annotations

import json
import sys
from typing import Any, BinaryIO

BLOCK = 1 << 24
MEMORY = 6 << 30
MAX_DATASETS = 1_000_000
RATIO = 1100  # deflate packs 1,032 bytes into one at best


def described(dataset: Any) -> dict[str, Any]:
    """What the parent has to know of a dataset."""
    import numpy as np

    dtype = dataset.dtype
    row = {"name": dataset.name, "shape": list(dataset.shape or ()), "size": dtype.itemsize, "why": ""}
    if dtype.hasobject or dataset.shape is None:
        return {**row, "dtype": None, "why": "no numbers"}
    row["dtype"] = np.lib.format.dtype_to_descr(dtype)
    row["attributes"] = {key: str(dataset.attrs[key])[:100] for key in list(dataset.attrs)[:20] if key == "dtype"}
    if dataset.external or dataset.is_virtual:
        return {**row, "why": "its data lies in other files"}
    stored, nbytes = dataset.id.get_storage_size(), dataset.size * dtype.itemsize
    row["fill"] = stored == 0 and nbytes > 0
    if stored and nbytes > RATIO * stored + (1 << 26):
        raise ValueError(f"dataset {dataset.name} declares {nbytes} bytes, but stores {stored}")
    return row


def datasets(file: Any) -> list[Any]:
    """Every dataset in the file; links to other files are not followed."""
    import h5py

    found: list[Any] = []

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found.append(item)
            if len(found) > MAX_DATASETS:
                raise ValueError(f"more than {MAX_DATASETS} datasets")

    file.visititems(visit)
    return found


def write(dataset: Any, out: BinaryIO) -> None:
    """Its bytes, some rows at a time."""
    import numpy as np

    if dataset.shape == ():
        out.write(np.asarray(dataset[()]).tobytes())
        return
    row = dataset.size // max(1, dataset.shape[0]) * dataset.dtype.itemsize
    chunk = dataset.chunks[0] if dataset.chunks else 1
    rows = max(1, BLOCK // max(1, row))
    rows = rows // chunk * chunk or rows
    for start in range(0, dataset.shape[0], rows):
        part = dataset[start : start + rows]
        out.write(np.ascontiguousarray(part).data if part.size else b"")


def main(path: str) -> None:
    """Serve one file."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    import h5py
    import numpy as np

    out = sys.stdout.buffer
    with h5py.File(path, "r", rdcc_nbytes=1 << 26) as file:
        found = datasets(file)
        rows = [described(dataset) for dataset in found]
        out.write(json.dumps(rows).encode() + b"\n")
        out.flush()
        for line in sys.stdin:
            number, fill = int(line.rstrip("f\n")), line.endswith("f\n")
            if fill:
                out.write(np.asarray(found[number].fillvalue, found[number].dtype).tobytes())
            else:
                write(found[number], out)
            out.flush()


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file: its neighbours are no top-level modules
    try:
        main(sys.argv[1])
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
