"""Where torch's `clip_grad_norm_` works, fails or is wrong, next to nanscan's: the table of docs/distributed.md.

Run: python tools/distributed_table.py            prints it
     python tools/distributed_table.py --write    puts it into the page, between its two marks
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.distributed.layouts import FOUR_ONLY  # noqa: E402
from tests.ranks import Ranks  # noqa: E402

PAGE = ROOT / "docs" / "distributed.md"
BEGIN, END = "<!-- table of tools/distributed_table.py -->", "<!-- end of the table -->"
ROWS = {
    "ddp": "DDP",
    "fsdp": "`fully_shard`, uneven shards, some of them empty",
    "hybrid": "`fully_shard` on a mesh of replicas × shards",
    "tensor_parallel": "tensor parallel, plain tensors beside it",
    "sequence_parallel": "sequence parallel: partial gradients, plain tensors beside them",
    "mixed": "`fully_shard` on some modules, the others plain",
    "two_dimensions": "tensor parallel × `fully_shard`: two meshes",
    "part_mesh": "tensor parallel over a part of the mesh, plain replicas along the rest",
}
FOUR = (*FOUR_ONLY, "fsdp")  # over two ranks none of its shards is empty
VALUES = {
    "empty": "a shard without elements",
    "empty inf": "a shard without elements, `norm_type=inf`",
    "bfloat16": "shards, bfloat16 gradients: the norms are rounded to bfloat16 and reduced so",
    "float16": "shards, float16 gradients whose norm is above 65504",
    "large": "shards, float32 gradients around 1e20",
    "small": "shards, float32 gradients around 1e-25",
}


def judged(value: object, wanted: float) -> str:
    """works, wrong (with the number) or fails (with the beginning of the message)."""
    if isinstance(value, str):
        kind, _, text = value.partition(": ")
        short = (
            "mixed torch.Tensor and DTensor"
            if "got mixed" in text
            else "different meshes"
            if "mesh" in text
            else text.split(". ")[0].split(" because")[0][:90]
        )
        return f"fails: {kind}, {short}"
    assert isinstance(value, float)
    right = math.isclose(value, wanted, rel_tol=1e-6)
    return "works" if right else f"wrong: {value:.5g} instead of {wanted:.5g}"


def line_of_layout(worlds: Mapping[int, Ranks], name: str) -> str:
    """The line of one of `ROWS`, found by the processes of `worlds` (by their number)."""
    size = 4 if name in FOUR else 2
    ours, wanted, theirs, gap, _ = worlds[size].run("clip_as_torch", name, 2.0)[0]
    own = judged(ours, wanted) if gap < 1e-6 else f"wrong gradients: off by {gap:.2g}"
    return f"| {ROWS[name]} | {size} | {judged(theirs, wanted)} | {own} |"


def line_of_values(worlds: Mapping[int, Ranks], name: str) -> str:
    """The line of one of `VALUES`."""
    found = worlds[2].of("tests.distributed.clip_scenarios").run("clip_hard", name)
    ours, wanted, theirs, gap, _ = max(found, key=lambda row: "Timed out" not in str(row[2]))  # who did not wait
    waits = "; the other rank waits for it" if any("Timed out" in str(row[2]) for row in found) else ""
    own = judged(ours, wanted) if gap < 1e-2 else f"wrong gradients: off by {gap:.2g}"
    return f"| {VALUES[name]} | 2 | {judged(theirs, wanted)}{waits} | {own} |"


def table() -> str:
    """The Markdown table, made by running every layout."""
    worlds = {size: Ranks(size, "tests.distributed.scenarios") for size in (2, 4)}
    lines = [
        "| layout | processes | `torch.nn.utils.clip_grad_norm_` | `nanscan.clip_grad_norm_` |",
        "|---|---|---|---|",
        *(line_of_layout(worlds, name) for name in ROWS),
        *(line_of_values(worlds, name) for name in VALUES),
    ]
    for ranks in worlds.values():
        ranks.close()
    return "\n".join(lines)


def main() -> None:
    """Print or write the table."""
    text = table()
    if "--write" not in sys.argv:
        print(text)
        return
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    main()
