"""Gives the same bad gradients to nanscan and to others that guard or clip a step, and tables what each leaves behind.

python tools/peers_table.py            print the table
python tools/peers_table.py --write    put it into docs/peers.md

Peers that are not installed are left out: pip install stabilityguard autoclip lightning
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import re
import tempfile
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nanscan

PAGE = Path(__file__).parent.parent / "docs" / "peers.md"
START, END = "<!-- table: tools/peers_table.py -->", "<!-- end of table -->"
LIMIT = 1.0

Step = Callable[[nn.Module, torch.optim.Optimizer], Callable[[], object]]
"""Takes a model and its optimizer, returns what makes one step with the gradients that are there then."""


def torch_clip(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()

    return step


def torch_scaler(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))

    def step() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        scaler.step(optimizer)
        scaler.update()

    return step


def stabilityguard(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    from stabilityguard import GuardedOptimizer

    return GuardedOptimizer(optimizer, model, nan_action="skip", log_dir=tempfile.mkdtemp()).step


def autoclip(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    from autoclip.torch import QuantileClip

    return QuantileClip.as_optimizer(optimizer=optimizer, quantile=0.9, history_length=100).step


def lightning(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Lightning's own clipping: what `Trainer(gradient_clip_val=1.0)` calls before the optimizer's step."""
    from lightning.pytorch.plugins.precision import Precision

    def step() -> None:
        Precision().clip_gradients(optimizer, clip_val=LIMIT)
        optimizer.step()

    return step


def guarded(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    return nanscan.wrap(optimizer, model, clip_norm=LIMIT).step


PEERS: dict[str, tuple[str, Step]] = {
    "torch `clip_grad_norm_`": ("torch", torch_clip),
    "torch `GradScaler`, `clip_grad_norm_`": ("torch", torch_scaler),
    "stabilityguard": ("stabilityguard", stabilityguard),
    "autoclip": ("autoclip", autoclip),
    "Lightning's clipping": ("lightning", lightning),
    "`nanscan.wrap`": ("nanscan", guarded),
}


class Trial:
    """A small model that has trained for two steps, its next gradients, and what a peer makes of them."""

    def __init__(self, prepare: Step) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.said = ""
        self._step = prepare(self.model, self.optimizer)
        for _ in range(2):
            self.step(1.0)
        self.weights, self.state = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def step(self, value: float, element: float | None = None) -> None:
        """Set every gradient to `value`, one element of the last weight to `element`, and step; keep what is said."""
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        if element is not None:
            self.model[1].weight.grad[0, 2] = element
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *_, **__: output.write(str(message))  # type: ignore[assignment]
            self._step()
        self.said = output.getvalue()

    def weights_after(self) -> str:
        bad = nanscan.scan(self.model).nan_count
        if bad:
            return f"{bad} of 25 NaN"
        same = all(torch.equal(value, self.weights[name]) for name, value in self.model.state_dict().items())
        return "unchanged" if same else "changed, finite"

    def state_after(self) -> str:
        return "unchanged" if _equal(self.state, self.optimizer.state_dict()) else "changed"


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def one_nan(trial: Trial) -> str:
    trial.step(0.1, float("nan"))
    return f"weights {trial.weights_after()}, state {trial.state_after()}"


def one_inf(trial: Trial) -> str:
    trial.step(0.1, float("inf"))
    return f"weights {trial.weights_after()}, state {trial.state_after()}"


def named(trial: Trial) -> str:
    trial.step(0.1, float("nan"))
    parts = {"parameter": "1.weight", "module": "'1'", "index": "[0, 2]", "count": "1 NaN"}
    found = [what for what, text in parts.items() if text in trial.said]
    return ", ".join(found) or ("something is said, no place" if trial.said else "nothing")


def left_over(trial: Trial) -> str:
    trial.step(0.1, float("nan"))
    gradient = trial.model[1].weight.grad
    return "cleared" if gradient is None or gradient.isfinite().all() else "the NaN stays"


def large(trial: Trial) -> str:
    trial.step(2e19)
    gradients = [p.grad for p in trial.model.parameters() if p.grad is not None]
    norm = nanscan.scan(gradients).norm
    return f"norm {norm:.3g}" if gradients else "step skipped"


def went_on(trial: Trial) -> str:
    trial.step(0.1, float("nan"))
    trial.step(0.1)
    return f"weights {trial.weights_after()}"


ROWS: dict[str, Callable[[Trial], str]] = {
    "one gradient element of 25 is NaN": one_nan,
    "one is Inf": one_inf,
    "what is said of the NaN": named,
    "`.grad` after it": left_over,
    "a healthy step after it": went_on,
    "finite gradients of 2e19, clipped to 1": large,
}


def table() -> str:
    """The table in Markdown; a peer that fails says so in its cell."""
    peers = {name: step for name, (package, step) in PEERS.items() if _version(package)}
    lines = ["| | " + " | ".join(peers) + " |", "|" + "---|" * (len(peers) + 1)]
    for what, look in ROWS.items():
        lines.append("| " + " | ".join([what, *(_cell(look, step) for step in peers.values())]) + " |")
    versions = sorted({f"{package} {_version(package)}" for package, _ in PEERS.values() if _version(package)})
    return "\n".join([*lines, "", f"Run with {', '.join(versions)}, on a CPU."])


def _cell(look: Callable[[Trial], str], step: Step) -> str:
    try:
        return look(Trial(step))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:60] if str(error) else ''}".replace("|", "\\|")


def _version(package: str) -> str:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/peers.md")
    made = table()
    if not parser.parse_args().write:
        print(made)
        return 0
    text = PAGE.read_text()
    PAGE.write_text(re.sub(f"{START}.*?{END}", lambda _: f"{START}\n{made}\n{END}", text, flags=re.DOTALL))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
