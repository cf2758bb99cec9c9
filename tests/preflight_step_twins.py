"""Bad twins and healthy brothers of what `nanscan.preflight` finds in the batch and in the first step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.preflight_twins import classify, computing, data, mlp, twin

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


@twin("NS407", "warning", "loss", "nll_loss gets values up to ")
def log_softmax_forgotten(bad: bool) -> dict[str, Any]:
    return {**classify(nn.Sequential(*mlp(), *([] if bad else [nn.LogSoftmax(-1)]))), "loss_fn": nn.NLLLoss()}


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
