"""No false alarm over what people write: norms, losses, parametrizations, masks, their own autograd functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import nanscan
from tests.preflight_twins import data, mlp

IDIOMS: dict[str, Callable[[], dict[str, Any]]] = {}


def idiom(make: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Enter the arguments of a preflight that must find nothing."""
    IDIOMS[make.__name__] = make
    return make


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@idiom
def rms_norm() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(8, 32), RMSNorm(32), nn.SiLU(), nn.Linear(32, 3))
    return {"model": model, "batch": data(), "loss_fn": F.cross_entropy}


@idiom
def regression() -> dict[str, Any]:
    model = mlp(outputs=1)
    optimizer = torch.optim.Adam(model.parameters())
    return {"model": model, "optimizer": optimizer, "batch": (data()[0], torch.randn(16, 1)), "loss_fn": nn.MSELoss()}


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean, self.logvar, self.decoder = (
            mlp(outputs=32),
            *[nn.Linear(32, 4) for _ in "ab"],
            nn.Linear(4, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        mean, logvar = self.mean(hidden), self.logvar(hidden)
        out = self.decoder(mean + torch.randn_like(mean) * (0.5 * logvar).exp())
        return F.mse_loss(out, x) - 0.5 * (1 + logvar - mean.pow(2) - logvar.exp()).mean()


@idiom
def variational_autoencoder() -> dict[str, Any]:
    return {"model": VAE(), "batch": data()[0], "forward": lambda model, x: model(x)}


@idiom
def contrastive_loss() -> dict[str, Any]:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        z = F.normalize(model(x), dim=-1)
        return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(x)))

    return {"model": nn.Linear(8, 16), "batch": data()[0], "forward": forward}


@idiom
def cosine_similarity() -> dict[str, Any]:
    return {
        "model": nn.Linear(8, 8),
        "batch": data()[0],
        "forward": lambda model, x: 1 - F.cosine_similarity(model(x), x).mean(),
    }


@idiom
def gradient_penalty() -> dict[str, Any]:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        score = model(x).sum()
        (grad,) = torch.autograd.grad(score, x, create_graph=True)
        return score + ((grad.norm(dim=1) - 1) ** 2).mean()

    return {"model": mlp(act=nn.Tanh, outputs=1), "batch": data()[0], "forward": forward}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@idiom
def custom_function() -> dict[str, Any]:
    return {
        "model": nn.Linear(8, 3),
        "batch": data(),
        "forward": lambda model, batch: F.cross_entropy(Doubled.apply(model(batch[0])), batch[1]),
    }


@idiom
def sparse_embedding() -> dict[str, Any]:
    model = nn.EmbeddingBag(10, 3, sparse=True)
    batch = torch.randint(0, 10, (4, 5)), torch.tensor([0, 1, 2, 1])
    optimizer = torch.optim.SparseAdam(model.parameters())
    return {"model": model, "optimizer": optimizer, "batch": batch, "loss_fn": F.cross_entropy}


@idiom
def lbfgs() -> dict[str, Any]:
    model = nn.Linear(8, 3)
    optimizer = torch.optim.LBFGS(model.parameters())
    return {"model": model, "optimizer": optimizer, "batch": data(), "loss_fn": F.cross_entropy}


@idiom
def complex_weights() -> dict[str, Any]:
    model = nn.Linear(8, 3, dtype=torch.complex64)
    batch = torch.randn(4, 8, dtype=torch.complex64)
    return {"model": model, "batch": batch, "forward": lambda model, x: model(x).abs().pow(2).sum()}


@idiom
def double_precision() -> dict[str, Any]:
    model = mlp().double()
    inputs, targets = data()
    optimizer = torch.optim.Adam(model.parameters())
    return {"model": model, "optimizer": optimizer, "batch": (inputs.double(), targets), "loss_fn": F.cross_entropy}


@idiom
def segmentation_with_an_ignored_class() -> dict[str, Any]:
    targets = torch.randint(0, 5, (2, 8, 8))
    targets[0, :4] = 255
    loss = nn.CrossEntropyLoss(ignore_index=255)
    return {"model": nn.Conv2d(3, 5, 1), "batch": (torch.rand(2, 3, 8, 8), targets), "loss_fn": loss}


@idiom
def soft_targets() -> dict[str, Any]:
    batch = data()[0], torch.rand(16, 3).softmax(-1)
    return {"model": mlp(), "batch": batch, "loss_fn": F.cross_entropy}


@idiom
def log_softmax_and_nll() -> dict[str, Any]:
    return {"model": nn.Sequential(*mlp(), nn.LogSoftmax(-1)), "batch": data(), "loss_fn": nn.NLLLoss()}


@idiom
def ctc() -> dict[str, Any]:
    def loss(out: Tensor, targets: Tensor) -> Tensor:
        return F.ctc_loss(out.log_softmax(-1), targets, (12, 12), (4, 4))

    return {"model": nn.Linear(8, 5), "batch": (torch.randn(12, 2, 8), torch.randint(1, 5, (2, 4))), "loss_fn": loss}


@idiom
def padded_sequences() -> dict[str, Any]:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 32, padding_idx=0)
            self.encoder = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
            self.head = nn.Linear(32, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.encoder(self.embedding(tokens), src_key_padding_mask=tokens == 0).mean(1))

    tokens = torch.randint(1, 50, (4, 10))
    tokens[:, 7:] = 0
    model = Encoder()
    return {
        "model": model,
        "batch": (tokens, torch.randint(0, 3, (4,))),
        "loss_fn": F.cross_entropy,
        "silence": {"NS801"},
    }


@idiom
def labels_for_another_head_than_the_last() -> dict[str, Any]:
    model = nn.ModuleDict({"fc": nn.Linear(8, 5), "out": nn.Linear(8, 2)})
    batch = data()[0], torch.randint(0, 5, (16,))

    def forward(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model["fc"](batch[0]), batch[1]) + model["out"](batch[0]).pow(2).mean()

    return {"model": model, "batch": batch, "forward": forward}


@idiom
def reentrant_checkpointing() -> dict[str, Any]:
    def forward(model: Any, batch: Any) -> Tensor:
        hidden = model[0](batch[0])
        return F.cross_entropy(checkpoint(model[1:], hidden, use_reentrant=True), batch[1])

    return {"model": mlp(), "batch": data(), "forward": forward}


@idiom
def several_inputs() -> dict[str, Any]:
    def forward(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return F.cross_entropy(model(batch["views"][0] + batch["views"][1]), batch["label"])

    batch = {"views": [data()[0], data()[0]], "label": data()[1]}
    return {"model": mlp(), "batch": batch, "forward": forward}


@idiom
def warm_up_by_a_lambda() -> dict[str, Any]:
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 100))
    batch = torch.randn(4, 5, 16)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "batch": batch,
        "forward": lambda model, x: model(x).pow(2).mean(),
        "silence": {"NS802"},
    }


@pytest.mark.parametrize("name", IDIOMS)
def test_nothing_is_found(name: str) -> None:
    torch.manual_seed(0)
    findings = nanscan.preflight(**IDIOMS[name]())
    assert findings == [], str(findings)


def test_power_iterations_of_spectral_norm_are_put_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(spectral_norm(nn.Linear(8, 32)), nn.ReLU(), weight_norm(nn.Linear(32, 3)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    findings = nanscan.preflight(model, torch.optim.Adam(model.parameters()), data(), F.cross_entropy)
    assert {f.code for f in findings} == {"NS801"}
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
