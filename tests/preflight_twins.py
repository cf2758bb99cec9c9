"""A bad twin for every code of `nanscan.preflight`, each with its healthy brother: what one flag makes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanscan


class Twin(NamedTuple):
    """One pair.

    Attributes:
        code: what the bad one is to be found by.
        make: `make(bad)` -> arguments of `preflight`.
        severity, where, says: of the finding; `where` is all of it, `says` is in the message.
    """

    code: str
    make: Callable[[bool], dict[str, Any]]
    severity: str
    where: str
    says: str


TWINS: list[Twin] = []
Make = Callable[[bool], dict[str, Any]]


def twin(code: str, severity: str, where: str, says: str) -> Callable[[Make], Make]:
    """Enter a pair into `TWINS`."""

    def enter(make: Make) -> Make:
        TWINS.append(Twin(code, make, severity, where, says))
        return make

    return enter


def mlp(depth: int = 2, width: int = 32, act: type[nn.Module] = nn.ReLU, outputs: int = 3) -> nn.Sequential:
    """8 inputs, `depth` linear layers with activations between, at 0, 2, 4 …"""
    sizes = [8, *[width] * (depth - 1), outputs]
    layers: list[nn.Module] = []
    for i in range(depth):
        layers += [nn.Linear(sizes[i], sizes[i + 1]), act()]
    return nn.Sequential(*layers[:-1])


def data(n: int = 16, inputs: int = 8, classes: int = 3) -> tuple[Tensor, Tensor]:
    """Inputs `(n, inputs)` and a class for each."""
    return torch.randn(n, inputs), torch.randint(0, classes, (n,))


def classify(model: nn.Module, **more: Any) -> dict[str, Any]:
    """Arguments for a classification step of `model`."""
    return {"model": model, "batch": data(), "loss_fn": F.cross_entropy, **more}


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), **{"lr": 1e-3, **options})


def attention(layers: int = 4) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class Computes(nn.Module):
    """A linear layer, and then a function of the user's."""

    def __init__(self, function: Callable[[Tensor], Tensor], outputs: int = 4) -> None:
        super().__init__()
        self.fc = nn.Linear(8, outputs)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.fc(x))


def computing(function: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {"model": Computes(function), "batch": data()[0], "forward": lambda model, x: model(x).sum()}


# --- initial weights -------------------------------------------------------------------------------------------------


@twin("NS101", "error", "0.weight", "1 NaN, 0 Inf of 256 (first at [2, 3])")
def nan_weight(bad: bool) -> dict[str, Any]:
    model = mlp()
    if bad:
        model[0].weight.data[2, 3] = float("nan")
    return {"model": model}


@twin("NS102", "warning", "0.weight", "all 256 elements are 0 and it gets no gradient")
def zero_weights(bad: bool) -> dict[str, Any]:
    model = mlp()
    if bad:
        for param in model.parameters():
            nn.init.zeros_(param)
    nn.init.zeros_(model[0].bias)  # as biases are
    return classify(model)


@twin("NS102", "warning", "0.weight", "all 256 elements are 0")
def zero_weights_without_a_batch(bad: bool) -> dict[str, Any]:
    model = mlp()
    if bad:
        nn.init.zeros_(model[0].weight)
    return {"model": model}


@twin("NS102", "info", "2.weight", "it learns")
def last_layer_that_starts_at_zero(bad: bool) -> dict[str, Any]:
    model = mlp()
    if bad:
        nn.init.zeros_(model[2].weight)
    return classify(model)


@twin("NS103", "warning", "0.weight", "all 32 rows are equal; every element is 0.1")
def constant_weights(bad: bool) -> dict[str, Any]:
    model = mlp()
    if bad:
        nn.init.constant_(model[0].weight, 0.1)
    return {"model": model}


@twin("NS104", "warning", "0.weight", "standard deviation")
def unit_normals(bad: bool) -> dict[str, Any]:
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())])
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=1.0 if bad else 0.1)
    return {"model": model}


@twin("NS104", "warning", "weights.0", "with 64 inputs: outputs")
def unit_normals_of_own_layers(bad: bool) -> dict[str, Any]:
    model = nn.Module()
    scale = 1.0 if bad else 64**-0.5
    model.weights = nn.ParameterList([torch.randn(64, 64) * scale for _ in range(4)])
    return {"model": model}


class Tied(nn.Module):
    def __init__(self, tie: bool = True, std: float = 0.02) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.head = nn.Linear(64, 50, bias=False)
        nn.init.normal_(self.embedding.weight, std=std)
        if tie:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


@twin("NS105", "warning", "embedding.weight", "width 64, tied to head.weight")
def unit_output_embedding(bad: bool) -> dict[str, Any]:
    return {"model": Tied(std=1.0 if bad else 0.02)}


@twin("NS106", "warning", "0.weight", "lazy")
def lazy(bad: bool) -> dict[str, Any]:
    return classify(nn.Sequential(nn.LazyLinear(3) if bad else nn.Linear(8, 3)))


@twin("NS106", "warning", "weight", "on the meta device")
def meta(bad: bool) -> dict[str, Any]:
    return {"model": nn.Linear(8, 3, device="meta" if bad else "cpu")}


# --- parameters ------------------------------------------------------------------------------------------------------


@twin("NS201", "warning", "2.weight", "2 parameters not in the optimizer: 2.weight, 2.bias")
def missing(bad: bool) -> dict[str, Any]:
    model = mlp()
    return {"model": model, "optimizer": adam(model[0] if bad else model)}


@twin("NS202", "error", "0.weight", "2 times in the optimizer")
def twice(bad: bool) -> dict[str, Any]:
    model = mlp()
    optimizer = adam(model)
    if bad:
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": [model[0].weight]})
    return {"model": model, "optimizer": optimizer}


@twin("NS203", "info", "0.bias", "1 frozen parameter")
def frozen(bad: bool) -> dict[str, Any]:
    model = mlp()
    model[0].bias.requires_grad_(not bad)
    return {"model": model, "optimizer": adam(model)}


@twin("NS204", "error", "optimizer", "none of the model's 4 trainable ones")
def of_another_model(bad: bool) -> dict[str, Any]:
    model = mlp()
    return {"model": model, "optimizer": adam(mlp() if bad else model)}


@twin("NS205", "warning", "1.weight", "without a gradient on this batch: 1.weight, 1.bias")
def unused(bad: bool) -> dict[str, Any]:
    model = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])
    return {"model": model, "batch": data()[0], "forward": lambda m, x: (m[0](x) + (0 if bad else m[1](x))).sum()}


@twin("NS205", "error", "weight", "2 trainable parameters without a gradient")
def cut_off(bad: bool) -> dict[str, Any]:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        return (out.detach().requires_grad_() if bad else out).sum()

    return {"model": nn.Linear(8, 3), "batch": data()[0], "forward": forward}


@twin("NS206", "warning", "fc.weight", "is exactly 0")
def zero_gradient(bad: bool) -> dict[str, Any]:
    return computing(lambda x: x * (0.0 if bad else 1.0))


@twin("NS206", "info", "0.weight", "a layer or gain that starts at 0 follows")
def zero_gradient_before_a_zero_layer(bad: bool) -> dict[str, Any]:
    return last_layer_that_starts_at_zero(bad)


@twin("NS207", "info", "embedding.weight", "is also head.weight")
def tied(bad: bool) -> dict[str, Any]:
    return {"model": Tied(tie=bad)}


@twin("NS208", "error", "1.weight", "0.weight on cpu, 1.weight on meta")
def two_devices(bad: bool) -> dict[str, Any]:
    return {"model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta" if bad else "cpu"))}


@twin("NS209", "warning", "Sequential", "model.training is False")
def evaluating(bad: bool) -> dict[str, Any]:
    return {"model": mlp().train(not bad)}


@twin("NS210", "warning", "1", "one sample")
def norm_of_one(bad: bool) -> dict[str, Any]:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(3))
    model(torch.randn(2, 1, 6, 6))
    n = 1 if bad else 4
    return {"model": model, "batch": (torch.rand(n, 1, 6, 6), torch.randint(0, 3, (n,))), "loss_fn": F.cross_entropy}


# --- settings of the optimizer ---------------------------------------------------------------------------------------


@twin("NS301", "error", "optimizer.param_groups[0]", "eps=1e-08 is 0 in float16, the dtype of 0.weight")
def small_eps(bad: bool) -> dict[str, Any]:
    model = mlp().half()
    return {"model": model, "optimizer": adam(model, eps=1e-8 if bad else 1e-4)}


@twin("NS302", "warning", "optimizer.param_groups[0]", "lr=0.1; usual for AdamW is 1e-07 to 0.02")
def high_rate(bad: bool) -> dict[str, Any]:
    model = mlp()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1 if bad else 1e-3)}


@twin("NS302", "warning", "optimizer.param_groups[0]", "lr=1e-09")
def low_rate(bad: bool) -> dict[str, Any]:
    model = mlp()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1e-9 if bad else 0.1)}


@twin("NS303", "warning", "2.weight", "times its norm")
def large_update(bad: bool) -> dict[str, Any]:
    model = mlp()
    return classify(model, optimizer=torch.optim.SGD(model.parameters(), lr=100.0 if bad else 0.1))


@twin("NS304", "warning", "0.weight", "the rest is rounded away")
def lost_update(bad: bool) -> dict[str, Any]:
    model = mlp().bfloat16()
    batch = data()[0].bfloat16(), data()[1]
    return classify(model, optimizer=adam(model, lr=1e-7 if bad else 1e-3)) | {"batch": batch}


@twin("NS305", "warning", "optimizer.param_groups[0]", "says that the model is trained")
def fine_tuning(bad: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model, batch = mlp(), data()
    optimizer = adam(model, lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
    return classify(model, optimizer=adam(model, lr=1e-2 if bad else 1e-5)) | {"batch": batch}


@twin("NS306", "info", "optimizer", "recurrent layers")
def unclipped_recurrent(bad: bool) -> dict[str, Any]:
    model = nn.LSTM(4, 4)
    optimizer = adam(model)
    return {"model": model, "optimizer": optimizer if bad else nanscan.wrap(optimizer, model, clip_norm=1.0)}


@twin("NS306", "info", "optimizer", "4 attention layers")
def unclipped_transformer(bad: bool) -> dict[str, Any]:
    model = attention(4 if bad else 2)
    return {"model": model, "optimizer": adam(model)}


@twin("NS307", "info", "optimizer", "Adam, and no scheduler is given")
def no_warm_up(bad: bool) -> dict[str, Any]:
    model = attention()
    optimizer = adam(model)
    scheduler = None if bad else torch.optim.lr_scheduler.LinearLR(optimizer, 0.01)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


@twin("NS307", "info", "scheduler", "starts at its highest rate")
def no_warm_up_in_the_schedule(bad: bool) -> dict[str, Any]:
    model = attention()
    optimizer = adam(model)
    kind = torch.optim.lr_scheduler
    scheduler = kind.CosineAnnealingLR(optimizer, 10) if bad else kind.OneCycleLR(optimizer, 1e-3, 100)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


@twin("NS308", "info", "optimizer.param_groups[0]", "weight_decay=0.01 on 2 norm or bias parameters: 0.bias, 2.bias")
def decayed_biases(bad: bool) -> dict[str, Any]:
    model = mlp()
    decayed, others = [model[0].weight, model[2].weight], [model[0].bias, model[2].bias]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters() if bad else groups)}


# --- precision -------------------------------------------------------------------------------------------------------


@twin("NS601", "warning", "scaler", "autocast_dtype is float16")
def half_without_scaler(bad: bool) -> dict[str, Any]:
    return {"model": mlp(), "autocast_dtype": torch.float16, "scaler": None if bad else torch.amp.GradScaler("cpu")}


@twin("NS602", "warning", "scaler", "autocast_dtype is bfloat16")
def scaler_with_bfloat16(bad: bool) -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", enabled=bad)
    return {"model": mlp(), "autocast_dtype": torch.bfloat16, "scaler": scaler}


@twin("NS603", "error", "0.weight", "4 trainable float16 parameters")
def half_parameters_with_scaler(bad: bool) -> dict[str, Any]:
    return {"model": mlp().half() if bad else mlp(), "scaler": torch.amp.GradScaler("cpu")}


@twin("NS604", "warning", "0.weight", "rounded away")
def half_parameters(bad: bool) -> dict[str, Any]:
    return {"model": mlp().half() if bad else mlp()}


# --- checkpoints -----------------------------------------------------------------------------------------------------


@twin("NS801", "info", "model[0].lock", "RLock")
def lock_in_the_model(bad: bool) -> dict[str, Any]:
    model = mlp()
    if bad:
        model[0].lock = threading.RLock()
    return {"model": model}


@twin("NS802", "info", "scheduler", "left out by state_dict()")
def lambda_in_the_scheduler(bad: bool) -> dict[str, Any]:
    model = mlp()
    optimizer = adam(model)
    kind = torch.optim.lr_scheduler
    scheduler = kind.LambdaLR(optimizer, lambda step: 1.0) if bad else kind.StepLR(optimizer, 10)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}
