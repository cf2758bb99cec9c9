"""No false alarm: the usual networks with standard initialisation and settings, with and without a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanscan
from benchmarks.models import LSTMClassifier, ResNet18, SmallGPT, UNet, ViT

DOCUMENTED = {"NS306", "NS307", "NS308"}  # infos on standard settings, see docs/preflight.md


class Healthy(NamedTuple):
    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    batch: Callable[[], Any]
    how: dict[str, Any]
    infos: set[str]


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def images(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3, size, size), torch.randint(0, 10, (8,))


def masks() -> tuple[Tensor, Tensor]:
    return torch.rand(4, 1, 32, 32), (torch.rand(4, 1, 32, 32) > 0.5).float()


HEALTHY = {
    "resnet": Healthy(
        lambda: ResNet18(10),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4),
        lambda: images(64),
        {"loss_fn": F.cross_entropy},
        {"NS308"},
    ),
    "unet": Healthy(UNet, lambda p: torch.optim.Adam(p, lr=1e-3), masks, {"loss_fn": nn.BCEWithLogitsLoss()}, set()),
    "gpt": Healthy(
        SmallGPT,
        lambda p: torch.optim.AdamW(p, lr=3e-4),
        lambda: torch.randint(0, 256, (4, 65)),  # as many as there are positions, and the last target
        {"forward": next_token},
        DOCUMENTED,
    ),
    "lstm": Healthy(
        LSTMClassifier,
        lambda p: torch.optim.Adam(p, lr=1e-3),
        lambda: (torch.randint(1, 200, (8, 20)), torch.randint(0, 4, (8,))),
        {"loss_fn": nn.CrossEntropyLoss()},
        {"NS306"},
    ),
    "vit": Healthy(
        ViT,
        lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.05),
        lambda: images(32),
        {"loss_fn": nn.CrossEntropyLoss(label_smoothing=0.1)},
        DOCUMENTED,
    ),
}


def codes(findings: list[nanscan.Finding]) -> set[str]:
    return {finding.code for finding in findings}


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize(("with_optimizer", "with_batch"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_healthy_network_raises_no_alarm(name: str, with_optimizer: bool, with_batch: bool) -> None:
    torch.manual_seed(0)
    healthy = HEALTHY[name]
    model = healthy.model()
    optimizer = healthy.optimizer(model.parameters()) if with_optimizer else None
    how = {"batch": healthy.batch(), **healthy.how} if with_batch else {}
    findings = nanscan.preflight(model, optimizer, **how)
    assert [f for f in findings if f.severity != "info"] == [], str(findings)
    assert codes(findings) == (healthy.infos if with_optimizer else set()), str(findings)


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_at_all_is_found_where_the_advice_is_followed(name: str) -> None:
    torch.manual_seed(0)
    healthy = HEALTHY[name]
    model = healthy.model()
    large = [p for p in model.parameters() if p.dim() > 1]
    small = [p for p in model.parameters() if p.dim() < 2]
    inner = healthy.optimizer([{"params": large}, {"params": small, "weight_decay": 0.0}])
    scheduler = torch.optim.lr_scheduler.LinearLR(inner, 0.01, total_iters=100)
    optimizer = nanscan.wrap(inner, model, clip_norm=1.0)
    findings = nanscan.preflight(model, optimizer, healthy.batch(), scheduler=scheduler, **healthy.how)
    assert findings == []
    assert str(findings) == "nanscan.preflight: nothing found"


@pytest.mark.parametrize("name", ["resnet", "gpt", "vit"])
def test_no_alarm_under_autocast(name: str) -> None:
    torch.manual_seed(0)
    healthy = HEALTHY[name]
    findings = nanscan.preflight(healthy.model(), None, healthy.batch(), **healthy.how, autocast_dtype=torch.bfloat16)
    assert findings == [], str(findings)


def test_no_alarm_over_zeroed_residual_gains_and_a_last_layer_at_zero() -> None:
    torch.manual_seed(0)
    model = ResNet18(10)
    for name, module in model.named_modules():
        if name.endswith("bn2"):
            nn.init.zeros_(module.weight)
    findings = nanscan.preflight(model, None, images(32), F.cross_entropy)
    assert [f for f in findings if f.severity != "info"] == [], str(findings)
    vit = ViT()
    nn.init.zeros_(vit.head.weight)
    findings = nanscan.preflight(vit, None, images(32), F.cross_entropy)
    assert [f for f in findings if f.severity != "info"] == [], str(findings)
    assert "NS102" in codes(findings)


def test_no_alarm_over_activation_checkpointing() -> None:
    torch.manual_seed(0)
    model = SmallGPT()

    def forward(model: Any, tokens: Tensor) -> Tensor:
        x = model.wte(tokens) + model.wpe(torch.arange(tokens.shape[1]))
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return F.cross_entropy(model.head(model.ln_f(x)).flatten(0, 1), tokens.flatten())

    assert nanscan.preflight(model, None, torch.randint(0, 256, (4, 16)), forward=forward) == []


def test_no_alarm_over_gpt2_style_initialisation_with_tied_weights() -> None:
    torch.manual_seed(0)
    model = SmallGPT()
    model.head.weight = model.wte.weight
    for param in model.parameters():
        if param.dim() > 1:
            nn.init.normal_(param, std=0.02)
    findings = nanscan.preflight(model, None, torch.randint(0, 256, (4, 33)), forward=next_token)
    assert codes(findings) == {"NS207"}


def test_no_alarm_over_a_frozen_backbone() -> None:
    torch.manual_seed(0)
    model = ResNet18(10).requires_grad_(False)
    model.fc.requires_grad_(True)
    optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.01)
    assert nanscan.preflight(model, optimizer, images(32), F.cross_entropy) == []
