"""How preflight is called: what it takes, what it refuses, what it costs; its table and its page agree."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nanscan
from benchmarks.models import ResNet18
from nanscan.preflight_checks.codes import CODES

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "preflight.md").read_text()


class WithLoss(nn.Module):
    """Returns a dict with its loss, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self.fc(x).softmax(-1), labels)}


def test_every_code_is_documented_with_its_severity_and_title() -> None:
    rows = dict(re.findall(r"^\| `(NS\d+)` \| (\w+ \| [^|]+?) \|", PAGE, re.MULTILINE))
    assert rows == {code: f"{row.severity} | {row.title}" for code, row in CODES.items()}


def test_codes_are_of_one_form_and_each_has_a_fix() -> None:
    assert all(re.fullmatch(r"NS[1-8]\d\d", code) and row.fix.endswith((".", ").")) for code, row in CODES.items())
    assert len({row.title for row in CODES.values()}) == len(CODES)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"model": 3}, TypeError, "model must be a torch.nn.Module, got int"),
        ({"optimizer": 3}, TypeError, "optimizer must be"),
        ({"loss_fn": 3}, TypeError, "loss_fn must be a function"),
        ({"forward": 3}, TypeError, "forward must be a function"),
        ({"loss_fn": F.mse_loss, "forward": lambda m, b: 0}, ValueError, "not both"),
        ({"loss_fn": F.mse_loss, "batch": torch.ones(3)}, ValueError, "must be (inputs, targets), got a Tensor of 3"),
        ({"autocast_dtype": torch.int8}, ValueError, "autocast_dtype must be torch.float16"),
        ({"silence": {"NS999"}}, ValueError, "there is no code 'NS999'"),
    ],
)
def test_misuse_is_refused(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=re.escape(says)):
        nanscan.preflight(**{"model": nn.Linear(2, 2), **arguments})


def test_one_code_can_be_silenced_as_a_string() -> None:
    assert nanscan.preflight(nn.Linear(2, 2).eval(), silence="NS209") == []


def test_the_most_severe_comes_first() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)).eval()
    model[0].weight.data[0, 0] = float("inf")
    optimizer = torch.optim.AdamW(model.parameters())
    severities = [f.severity for f in nanscan.preflight(model, optimizer)]
    assert severities == ["error", "warning", "info"]


def test_a_mapping_is_called_by_keywords_and_its_loss_is_used() -> None:
    batch = {"x": torch.randn(6, 8), "labels": torch.randint(0, 3, (6,))}
    assert [(f.code, f.where) for f in nanscan.preflight(WithLoss(), None, batch)] == [("NS407", "model")]


def test_inputs_without_a_loss_run_forward_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    nn.init.constant_(model[0].bias, -100)
    assert [f.code for f in nanscan.preflight(model, None, torch.randn(6, 8))] == ["NS410"]


def test_the_line_of_a_nan_prone_op_is_named() -> None:
    model = nn.Linear(8, 3)
    batch = torch.randn(6, 8), torch.randint(0, 3, (6,))

    def loss_fn(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(out.softmax(-1).log(), targets)  # the line

    (finding,) = nanscan.preflight(model, None, batch, loss_fn)
    assert finding.code == "NS701" and "F.nll_loss(out.softmax(-1).log(), targets)  # the line" in finding.message


def test_the_origin_of_a_nan_is_named_with_its_module() -> None:
    class Bad(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x - 99).sqrt()

    model = nn.Sequential(nn.Linear(8, 3), Bad())
    findings = nanscan.preflight(model, None, torch.randn(6, 8), forward=lambda m, x: m(x).sum())
    (finding,) = [f for f in findings if f.code == "NS404"]
    assert finding.where == "1" and "aten.sqrt" in finding.message and "(x - 99).sqrt()" in finding.message


def test_names_are_those_inside_of_data_parallel() -> None:
    model = nn.DataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)))
    optimizer = torch.optim.Adam(model.module[0].parameters(), lr=1e-3)
    batch = torch.randn(6, 8), torch.randint(0, 3, (6,))
    assert [f.where for f in nanscan.preflight(model, optimizer, batch, F.cross_entropy)] == ["1.weight"]


def test_a_resnet_takes_a_few_steps() -> None:
    torch.manual_seed(0)
    model, batch = ResNet18(10), (torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        return time.perf_counter() - start

    def look() -> float:
        start = time.perf_counter()
        nanscan.preflight(model, optimizer, batch, F.cross_entropy)
        return time.perf_counter() - start

    step(), look()
    one, cost = min(step() for _ in range(3)), min(look() for _ in range(3))
    assert cost < 10 * one + 0.5, f"a step takes {one:.3f} s, a preflight {cost:.3f} s"
