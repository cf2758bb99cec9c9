"""Lightning's Fabric: `nanscan.wrap` before and after `fabric.setup`."""

from __future__ import annotations

import linecache
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import nn

import nanscan
from tests.integrations.lightning_runs import fused, loader, weights

pytestmark = pytest.mark.filterwarnings("ignore")

ORDERS = ("before", "after")
SCALERS = {
    "none": lambda: None,
    "torch": lambda: torch.amp.GradScaler("cpu", init_scale=2.0**10),
    "nanscan": lambda: nanscan.GradScaler("cpu", init_scale=2.0**10),
}


def set_up(order: str | None, scaler: Any = None, make: Any = fused, **options: Any) -> tuple[Fabric, Any, Any]:
    plugin = None if scaler is None else MixedPrecision("16-mixed", "cpu", scaler)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=plugin)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = make(net.parameters())
    if order == "before":
        optimizer = nanscan.wrap(optimizer, net, **options)
    model, optimizer = fabric.setup(net, optimizer)
    if order == "after":
        optimizer = nanscan.wrap(optimizer, model, **options)
    return fabric, model, optimizer


def train(fabric: Fabric, model: Any, optimizer: Any, data: Any) -> list[bool]:
    seen = []
    for x, y in data:
        optimizer.zero_grad()
        fabric.backward((model(x) - y).square().mean())
        optimizer.step()
        seen.append(getattr(optimizer, "step_was_skipped", False))
    return seen


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize("fusing", [True, False])
def test_a_bad_batch_is_skipped_and_all_else_is_as_without(order: str, kind: str, fusing: bool) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.01, fused=fusing)

    plain = set_up(None, SCALERS[kind](), make)
    train(*plain, loader())
    healthy = set_up(order, SCALERS[kind](), make)
    train(*healthy, loader())
    assert weights(healthy[1]) == weights(plain[1]) and healthy[2].skipped_steps == 0

    scaler = SCALERS[kind]()
    fabric, model, optimizer = set_up(order, scaler, make, clip_norm=0.5)
    assert train(fabric, model, optimizer, loader(nan=[3])) == [step == 3 for step in range(10)]
    assert [row.name for row in optimizer.history[3].bad] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    norms = [report.norm for report in optimizer.history if not report.skipped]
    assert min(norms) > 0.1 and max(norms) < 100  # without the loss scale
    assert scaler is None or scaler.get_scale() == 2.0**9
    assert isinstance(optimizer, nanscan.GuardedOptimizer) and "Fabric" in type(optimizer).__name__


@pytest.mark.parametrize("order", ORDERS)
def test_what_fabric_returns_is_the_guard_in_everything(order: str, tmp_path: Any) -> None:
    fabric, model, optimizer = set_up(order)
    assert nanscan.wrap(optimizer, clip_norm=0.5) is optimizer
    for index, (x, y) in enumerate(loader(nan=[3])):
        fabric.backward((model(x) - y).square().mean() / 2)
        report = optimizer.check_microbatch(drop=True)
        assert report.finite == (index != 3)
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert [report.dropped for report in optimizer.history] == [(), (1,), (), (), ()]
    assert all(report.clip_factor < 1 for report in optimizer.history)
    fabric.save(tmp_path / "one.ckpt", {"model": model, "optimizer": optimizer})
    fabric.load(tmp_path / "one.ckpt", {"model": model, "optimizer": optimizer})
    state = optimizer.guard_state_dict()
    again = set_up(order, clip_norm=0.5)[2]
    again.load_guard_state_dict(state)
    assert again.optimizer.guard_state_dict()["counters"] == state["counters"]


def test_warnings_point_at_the_line_of_the_user() -> None:
    with pytest.warns(nanscan.NonFiniteWarning) as seen:
        train(*set_up("after"), loader(nan=[3]))
    assert [linecache.getline(w.filename, w.lineno).strip() for w in seen] == ["optimizer.step()"]


def test_fabrics_module_is_the_one_inside_for_names_and_checks() -> None:
    _, model, optimizer = set_up("after")
    x, y = next(iter(loader()))
    found = nanscan.preflight(model, optimizer, (x, y), nn.functional.mse_loss, silence={"NS308"})
    assert [finding.code for finding in found] == []
    model.module[0].bias.data[1] = float("inf")
    assert [row.name for row in nanscan.scan(model).bad] == ["0.bias"]
