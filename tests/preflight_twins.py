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


# --- the first pass --------------------------------------------------------------------------------------------------


@twin("NS401", "error", "Sequential", "RuntimeError: mat1 and mat2")
def wrong_shape(bad: bool) -> dict[str, Any]:
    return classify(mlp()) | {"batch": data(inputs=9 if bad else 8)}


@twin("NS402", "error", "loss", "has shape [16]")
def loss_of_each_sample(bad: bool) -> dict[str, Any]:
    return classify(mlp()) | {"loss_fn": nn.CrossEntropyLoss(reduction="none" if bad else "mean")}


@twin("NS402", "error", "loss", "is a float, not a tensor")
def loss_as_a_number(bad: bool) -> dict[str, Any]:
    return {"model": mlp(), "batch": data(), "forward": lambda m, b: m(b[0]).sum().item() if bad else m(b[0]).sum()}


@twin("NS403", "error", "loss", "does not require a gradient")
def detached_loss(bad: bool) -> dict[str, Any]:
    return {"model": mlp(), "batch": data(), "forward": lambda m, b: m(b[0]).detach().sum() if bad else m(b[0]).sum()}


@twin("NS404", "error", "model", "loss: is nan on the given batch")
def nan_loss(bad: bool) -> dict[str, Any]:
    return computing(lambda x: (x - 100).sqrt() if bad else (x.abs() + 1).sqrt())


@twin("NS405", "error", "model", "fc.weight: its gradient and of 1 more is NaN or Inf; the loss is finite")
def nan_gradient(bad: bool) -> dict[str, Any]:
    return computing(lambda x: (x * (0 if bad else 1) + (0 if bad else 9)).sqrt())


@twin("NS406", "warning", "loss", "at the start; ln(3) = 1.099")
def high_first_loss(bad: bool) -> dict[str, Any]:
    model = mlp()
    model[2].weight.data *= 100 if bad else 1
    return classify(model)


@twin("NS406", "warning", "loss", "at the start; ln(2) = 0.6931")
def high_first_binary_loss(bad: bool) -> dict[str, Any]:
    model = mlp(outputs=1)
    model[2].weight.data *= 100 if bad else 1
    batch = data()[0], torch.randint(0, 2, (16, 1)).float()
    return {"model": model, "batch": batch, "loss_fn": F.binary_cross_entropy_with_logits}


@twin("NS407", "warning", "loss", "sum to 1 over 3 classes")
def softmax_twice(bad: bool) -> dict[str, Any]:
    return classify(nn.Sequential(*mlp(), *([nn.Softmax(-1)] if bad else [])))


@twin("NS408", "warning", "loss", "gets the output of a sigmoid")
def sigmoid_twice(bad: bool) -> dict[str, Any]:
    model = nn.Sequential(*mlp(outputs=1), *([nn.Sigmoid()] if bad else []))
    batch = data()[0], torch.randint(0, 2, (16, 1)).float()
    return {"model": model, "batch": batch, "loss_fn": nn.BCEWithLogitsLoss()}


@twin("NS409", "warning", "1", "of the outputs of tanh are saturated")
def saturated(bad: bool) -> dict[str, Any]:
    model = mlp(act=nn.Tanh)
    model[0].weight.data *= 100 if bad else 1
    return classify(model)


@twin("NS410", "warning", "1", "of the outputs of ReLU are 0")
def dead(bad: bool) -> dict[str, Any]:
    model = mlp()
    model[0].bias.data += -100 if bad else 0
    return classify(model)


@twin("NS411", "warning", "8", "outputs up to")
def exploding(bad: bool) -> dict[str, Any]:
    model = mlp(depth=8)
    for layer in model[::2]:
        layer.weight.data *= 100 if bad else 1
    return classify(model)


@twin("NS411", "warning", "6", "only, after")
def vanishing_activations(bad: bool) -> dict[str, Any]:
    model = mlp(depth=8)
    for layer in model[::2]:
        nn.init.zeros_(layer.bias)
        layer.weight.data *= 0.01 if bad else 2
    return classify(model)


@twin("NS412", "warning", "0.weight", "it vanishes on the way back")
def vanishing(bad: bool) -> dict[str, Any]:
    return classify(mlp(depth=20, act=nn.Sigmoid) if bad else mlp(depth=4, act=nn.Sigmoid))


@twin("NS412", "warning", "0.weight", "it explodes on the way back")
def exploding_gradients(bad: bool) -> dict[str, Any]:
    scale = 100.0 if bad else 1.0

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        for layer in model:  # type: ignore[attr-defined]
            x = layer(x)
            x = scale * x - ((scale - 1) * x).detach()  # the same values, larger gradients
        return x.sum()

    return {"model": mlp(depth=5), "batch": data()[0], "forward": forward}


# --- the batch -------------------------------------------------------------------------------------------------------


@twin("NS501", "error", "batch[0][3]", "has 1 NaN of 8")
def nan_in_data(bad: bool) -> dict[str, Any]:
    batch = data()
    if bad:
        batch[0][3, 1] = float("nan")
    return {"model": mlp(), "batch": batch}


@twin("NS502", "error", "batch[1][2]", "sample 2 has 5, allowed 0..2")
def label_too_large(bad: bool) -> dict[str, Any]:
    batch = data()
    batch[1][2] = 5 if bad else 2
    return {"model": nn.Sequential(*mlp()), "batch": batch}


@twin("NS502", "error", "loss", "target is 3, allowed are 0..2 and -100 (at [4]; 1 of 16 bad)")
def label_too_large_for_the_loss(bad: bool) -> dict[str, Any]:
    inputs, targets = data()
    targets[4] = 3 if bad else -100
    model = nn.ModuleDict({"one": nn.Linear(8, 3), "two": nn.Linear(8, 5)})
    return {
        "model": model,
        "batch": {"x": inputs, "kind": targets},
        "forward": lambda m, b: F.cross_entropy(m["one"](b["x"]), b["kind"]) + m["two"](b["x"]).mean(),
    }


@twin("NS503", "error", "users", "row -1 of a table with rows 0..9 (at [0]; 1 of 4 bad)")
def row_that_is_not_there(bad: bool) -> dict[str, Any]:
    model = nn.ModuleDict({"users": nn.Embedding(10, 4), "films": nn.Embedding(20, 4)})
    batch = {"user": torch.tensor([-1 if bad else 0, 1, 2, 3]), "film": torch.arange(4)}
    return {
        "model": model,
        "batch": batch,
        "forward": lambda m, b: (m["users"](b["user"]) * m["films"](b["film"])).sum(),
    }


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos, self.head = nn.Embedding(10, 16), nn.Embedding(4, 16), nn.Linear(16, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.tok(ids) + self.pos(torch.arange(ids.shape[1])))


@twin("NS503", "error", "batch[0][1]", "10")
def token_too_large(bad: bool) -> dict[str, Any]:
    tokens = torch.randint(0, 10, (3, 4))
    tokens[1, 2] = 10 if bad else 9
    return {"model": Tokens(), "batch": (tokens, torch.randint(0, 10, (3, 4)))}


@twin("NS504", "error", "batch[0]", "6 > 4 positions")
def too_long(bad: bool) -> dict[str, Any]:
    length = 6 if bad else 4
    return {"model": Tokens(), "batch": (torch.randint(0, 10, (3, length)), torch.randint(0, 10, (3, length)))}


@twin("NS505", "warning", "batch[0]", "255")
def unscaled_images(bad: bool) -> dict[str, Any]:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    images = torch.randint(0, 256, (4, 3, 8, 8)).float()
    images[0, 0, 0, :2] = torch.tensor([0.0, 255.0])
    return {"model": model, "batch": (images / (1 if bad else 255), torch.randint(0, 3, (4,)))}


@twin("NS506", "warning", "batch[0][2]", "constant")
def constant_image(bad: bool) -> dict[str, Any]:
    images = torch.rand(4, 3, 8, 8)
    if bad:
        images[2] = 0.5
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    return {"model": model, "batch": (images, torch.randint(0, 3, (4,)))}


@twin("NS507", "error", 'batch["attention_mask"][1]', "")
def everything_masked(bad: bool) -> dict[str, Any]:
    mask = torch.ones(3, 5, dtype=torch.long)
    mask[1] = 0 if bad else 1
    batch = {"input_ids": torch.randint(0, 10, (3, 5)), "attention_mask": mask}
    return {"model": nn.Embedding(10, 4), "batch": batch, "forward": lambda m, b: m(b["input_ids"]).sum()}


@twin("NS508", "error", "batch[1]", "16")
def unequal_lengths(bad: bool) -> dict[str, Any]:
    return {"model": mlp(), "batch": (data()[0], data(n=15 if bad else 16)[1])}


@twin("NS509", "warning", "batch", "all 16 samples of the inputs [16, 8] are equal")
def equal_samples(bad: bool) -> dict[str, Any]:
    inputs, targets = data()
    return {"model": mlp(), "batch": (inputs[:1].repeat(16, 1) if bad else inputs, targets)}


@twin("NS510", "info", "batch", "expanded along dimension 1")
def shared_memory(bad: bool) -> dict[str, Any]:
    images = torch.rand(4, 1, 8, 8).expand(4, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    return {"model": model, "batch": (images if bad else images.contiguous(), torch.randint(0, 3, (4,)))}


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


# --- ops that make NaN -----------------------------------------------------------------------------------------------


@twin("NS701", "info", "model", "log of the output of softmax")
def log_of_softmax(bad: bool) -> dict[str, Any]:
    return computing(lambda x: x.softmax(-1).log() if bad else (x.softmax(-1) + 1e-6).log() + x.log_softmax(-1))


@twin("NS701", "warning", "model", "smallest here 0")
def log_of_zero(bad: bool) -> dict[str, Any]:
    return computing(lambda x: x.relu().log().clamp_min(-9) if bad else x.relu().clamp_min(1e-6).log())


@twin("NS702", "info", "model", "square root of the output of sum")
def root_of_squares(bad: bool) -> dict[str, Any]:
    return computing(lambda x: x.pow(2).sum(-1).sqrt() if bad else (x.pow(2).sum(-1) + 1e-6).sqrt())


@twin("NS702", "info", "model", "std without an eps")
def std(bad: bool) -> dict[str, Any]:
    return computing(lambda x: x.std(-1) if bad else (x.var(-1) + 1e-6).sqrt())


@twin("NS703", "info", "model", "division by the output of sum")
def division_by_a_count(bad: bool) -> dict[str, Any]:
    mask = torch.ones(16, 4)
    return computing(lambda x: (x * mask).sum(1) / (mask.sum(1) if bad else mask.sum(1).clamp_min(1)))


@twin("NS703", "info", "model", "division by a norm")
def division_by_a_norm(bad: bool) -> dict[str, Any]:
    return computing(lambda x: x / x.norm(dim=-1, keepdim=True) if bad else F.normalize(x, dim=-1))


@twin("NS703", "info", "model", "division by the output of sum")
def division_by_a_whole_count(bad: bool) -> dict[str, Any]:
    mask = torch.ones(16, 4, dtype=torch.bool)
    return computing(lambda x: (x * mask).sum() / (mask.sum() if bad else mask.sum().clamp(min=1)))


@twin("NS703", "info", "model", "division by the output of a layer")
def reciprocal(bad: bool) -> dict[str, Any]:
    return computing(lambda x: 1 / x if bad else 1 / (1 + x.exp()))


@twin("NS703", "warning", "model", "division by a value without an eps or clamp; smallest here 0")
def division_by_data(bad: bool) -> dict[str, Any]:
    sizes = torch.tensor([0.0 if bad else 1.0, 1.0, 2.0, 3.0])
    return computing(lambda x: (x / sizes).clamp(-9, 9))


@twin("NS704", "info", "model", "without a clamp")
def angle(bad: bool) -> dict[str, Any]:
    return computing(lambda x: x.tanh().acos() if bad else x.clamp(-0.99, 0.99).acos())


@twin("NS705", "info", "model", "power 0.5 of the output of mul")
def fractional_power(bad: bool) -> dict[str, Any]:
    return computing(lambda x: (x * x) ** 0.5 if bad else (x * x + 1e-6) ** 0.5)


@twin("NS706", "warning", "model", "float32 overflows at 88.72")
def large_exp(bad: bool) -> dict[str, Any]:
    return computing(lambda x: (x * 0 + (80.0 if bad else 1.0)).exp() + x)


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
