"""Runs known faults under plain PyTorch, anomaly mode, sherlorch (where installed) and nanscan; tables what they say.

python tools/origins_table.py            print the table
python tools/origins_table.py --write    put it into docs/origins.md
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanscan

PAGE = Path(__file__).parent.parent / "docs" / "origins.md"
START, END = "<!-- table: tools/origins_table.py -->", "<!-- end of table -->"
INF = float("inf")

Fault = Callable[[Tensor], Tensor]


def _masked_attention(x: Tensor) -> Tensor:
    attention = nn.MultiheadAttention(4, 1, batch_first=True)
    tokens = x.expand(2, 3, 4) + torch.randn(2, 3, 4)
    mask = torch.tensor([[False] * 3, [True] * 3])
    return attention(tokens, tokens, tokens, key_padding_mask=mask)[0][0].sum()


def _entropy(x: Tensor, repaired: bool) -> Tensor:
    logp = torch.cat([x[:2], x.new_full((1,), -INF)]).log_softmax(-1)
    term = logp.exp() * logp
    return -(term.nan_to_num(0.0) if repaired else term).sum()


def _masked_value(x: Tensor) -> Tensor:
    value = torch.tensor([[[1.0, 1.0], [float("nan"), 1.0]]])
    keep = torch.tensor([[[True, False]]])
    query = (x[:2] * 0)[None, None]
    return F.scaled_dot_product_attention(query, torch.zeros(1, 2, 2), value, attn_mask=keep).sum()


def _batch_norm_of_half(x: Tensor) -> Tensor:
    return ((x.half() * 30000) * 3).float().sum()


def _legitimate(x: Tensor) -> Tensor:
    masked = x.masked_fill(torch.tensor([False, False, True]), -INF)
    return masked.softmax(-1)[0] + masked.logsumexp(-1) + F.max_pool1d(x[None, None], 3, padding=1).sum()


# name -> (the leaf's values, what is computed of it)
FAULTS: dict[str, tuple[list[float], Fault]] = {
    "magnitude of 0: `(re**2 + im**2).sqrt()`": ([0.0, 0.0, 3.0], lambda x: (x**2 + x**2).sqrt().sum()),
    "square root of 0": ([0.0, 1.0, 4.0], lambda x: x.sqrt().sum()),
    "`where` trick with sqrt": ([-1.0, 4.0, 1.0], lambda x: torch.where(x > 0, x.sqrt(), x).sum()),
    "`where` trick with log": ([0.0, 4.0, 1.0], lambda x: torch.where(x > 0, x.log(), x).sum()),
    "attention row with every key masked": ([1.0, 2.0, 3.0, 4.0], _masked_attention),
    "standard deviation of equal values, by hand": ([1.0, 1.0, 1.0], lambda x: ((x - x.mean()) ** 2).mean().sqrt()),
    "cross-entropy, every target ignored": (
        [1.0, 2.0, 3.0],
        lambda x: F.cross_entropy(x.expand(2, 3), torch.tensor([-100, -100])),
    ),
    "standard deviation of one element": ([1.0], lambda x: x.std()),
    "mean of an empty selection": ([1.0, 2.0, 3.0], lambda x: x[x > 5].mean()),
    "division by a count of 0": ([1.0, 2.0, 3.0], lambda x: (x * (x > 5)).sum() / (x > 5).sum()),
    "MSE of an empty selection": ([1.0, 2.0, 3.0], lambda x: F.mse_loss(x[x > 5], torch.zeros(0))),
    "`atan(y / x)` at (0, 0)": ([0.0, 1.0], lambda x: torch.atan((x * 1) / (x * 1)).sum()),
    "`acos` at 1": ([1.0, 0.5], lambda x: torch.acos(x).sum()),
    "fractional power of a negative number": ([-0.5, 2.0], lambda x: (x**0.5).sum()),
    "entropy of a masked action": ([0.0, 0.0], lambda x: _entropy(x, False)),
    "the same, mended by `nan_to_num`": ([0.0, 0.0], lambda x: _entropy(x, True)),
    "exp overflow in a softmax by hand": ([1000.0, 0.0], lambda x: (x.exp() / x.exp().sum())[0]),
    "`x / x.norm()` of a zero vector": ([0.0, 0.0, 0.0], lambda x: (x / x.norm()).sum()),
    "`F.normalize` of a zero vector": ([0.0, 0.0, 0.0], lambda x: F.normalize(x, dim=0).sum()),
    "float16 overflow": ([1.0, 2.0], _batch_norm_of_half),
    "log laundered by `nan_to_num`": ([0.0, 2.0], lambda x: x.log().nan_to_num(0.0, 0.0, 0.0).sum()),
    "NaN in a masked-out attention value": ([1.0, 1.0], _masked_value),
    "no fault: masks, padding, `logsumexp`": ([1.0, 2.0, 3.0], _legitimate),
    "no fault: norm and `atan2` at 0": ([0.0, 0.0], lambda x: x.norm() + torch.atan2(x, x).sum()),
}


def _leaf(values: list[float]) -> Tensor:
    torch.manual_seed(0)
    return torch.tensor(values, requires_grad=True)


def plain(values: list[float], fault: Fault) -> str:
    """What somebody sees who looks at the loss and the gradients."""
    x = _leaf(values)
    loss = fault(x)
    loss.backward()
    return f"loss {loss.item():.4g}, gradient {_summary(x.grad)}"


def _summary(grad: Tensor | None) -> str:
    if grad is None:
        return "none"
    if grad.isnan().any():
        return f"{int(grad.isnan().sum())} of {grad.numel()} NaN"
    if grad.isinf().any():
        return f"{int(grad.isinf().sum())} of {grad.numel()} Inf"
    return f"finite (max {grad.abs().max().item():.2g})"


def anomaly(values: list[float], fault: Fault) -> str:
    """What `torch.autograd.set_detect_anomaly` says."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.set_detect_anomaly(True):
                fault(_leaf(values)).backward()
    except RuntimeError as error:
        found = re.search(r"Function '(\w+)' returned nan values", str(error))
        return found[1] if found else str(error)
    return "nothing"


def sherlorch(values: list[float], fault: Fault) -> str:
    """What sherlorch's diagnosis of the loss says."""
    import sherlorch as peer  # type: ignore[import-not-found]

    with peer.trace() as tracker:
        loss = fault(_leaf(values))
        loss.backward()
    if not tracker.has_issue(loss):
        return "nothing"
    try:
        text = str(tracker.diagnose(loss))
    except KeyError:
        return "nothing (the loss is not tracked)"
    found = re.findall(r"Culprit #\d+: \[\d+\] (\S+)", text)
    return ", ".join(dict.fromkeys(found)) or "nothing"


def ours(values: list[float], fault: Fault) -> tuple[str, str]:
    """What `nanscan.trace` says: op and kind, and the hint."""
    with nanscan.trace() as t:
        fault(_leaf(values)).backward()
    if t.origin is None:
        return "nothing", ""
    kind = {"nan": "NaN", "inf": "Inf"}[t.origin.kind]
    return f"{t.origin.op}: {kind}", t.origin.hint or ""


def table() -> str:
    """The table in Markdown."""
    peers: dict[str, Callable[[list[float], Fault], str]] = {"plain PyTorch": plain, "anomaly mode": anomaly}
    try:
        import sherlorch as _  # noqa: F401

        peers["sherlorch"] = sherlorch
    except ImportError:
        print("sherlorch is not installed: its column is left out", file=sys.stderr)
    heads = ["what", *peers, "nanscan.trace", "its hint"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, (values, fault) in FAULTS.items():
        cells = [name, *(look(values, fault) for look in peers.values()), *ours(values, fault)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/origins.md")
    made = table()
    if not parser.parse_args().write:
        print(made)
        return 0
    before, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(f"{before}{START}\n{made}\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
