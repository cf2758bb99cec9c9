"""The networks that the benchmarks run, in plain PyTorch: as people write them, no tricks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["LSTMClassifier", "ResNet18", "SmallGPT", "UNet", "ViT", "gpt_step", "resnet_step"]


class BasicBlock(nn.Module):
    """Two 3 × 3 convolutions around a shortcut."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or width_in != width:
            self.downsample = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += shortcut
        result: Tensor = self.relu(out)
        return result


class ResNet18(nn.Module):
    """ResNet-18 (He et al. 2015), with the stem of the ImageNet version: `(n, 3, h, w)` -> logits `(n, classes)`."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


class Attention(nn.Module):
    """Causal self-attention, written out: `(n, t, width)` -> the same."""

    def __init__(self, width: int, heads: int, positions: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(positions, positions, dtype=torch.bool)))

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = (p.view(n, t, self.heads, -1).transpose(1, 2) for p in self.qkv(x).split(width, 2))
        scores = (q @ k.transpose(-2, -1)) * (k.shape[-1] ** -0.5)
        scores = scores.masked_fill(~self.mask[:t, :t], float("-inf"))
        out: Tensor = self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, t, width))
        return out


class GPTBlock(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int, positions: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, positions)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        result: Tensor = x + self.mlp(self.ln2(x))
        return result


class SmallGPT(nn.Module):
    """A GPT-2 of four layers: tokens `(n, t)` int64 -> logits `(n, t, vocab)`."""

    def __init__(
        self, vocab: int = 256, width: int = 128, heads: int = 4, layers: int = 4, positions: int = 64
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads, positions) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.ln_f(x))
        return logits


def resnet_step(batch: int = 8, size: int = 64) -> tuple[nn.Module, Callable[[], Tensor]]:
    """ResNet-18 and a function that runs forward and backward once on a fixed batch."""
    torch.manual_seed(0)
    model, images, labels = ResNet18(10), torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,))

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        return loss

    return model, step


def gpt_step(batch: int = 4, length: int = 64) -> tuple[nn.Module, Callable[[], Tensor]]:
    """The small GPT and a function that runs forward and backward once on a fixed batch."""
    torch.manual_seed(0)
    model, tokens = SmallGPT(positions=length), torch.randint(0, 256, (batch, length + 1))

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss

    return model, step


class UNet(nn.Module):
    """A U-Net (Ronneberger et al. 2015) of three levels: `(n, channels, h, w)` -> logits `(n, classes, h, w)`."""

    def __init__(self, channels: int = 1, classes: int = 1, width: int = 16) -> None:
        super().__init__()
        self.down1, self.down2 = double_conv(channels, width), double_conv(width, 2 * width)
        self.bottom = double_conv(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.conv2 = double_conv(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.conv1 = double_conv(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        x = self.bottom(F.max_pool2d(two, 2))
        x = self.conv2(torch.cat((self.up2(x), two), 1))
        x = self.conv1(torch.cat((self.up1(x), one), 1))
        logits: Tensor = self.head(x)
        return logits


def double_conv(width_in: int, width: int) -> nn.Sequential:
    """Twice convolution, BatchNorm, ReLU."""
    first = (nn.Conv2d(width_in, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
    return nn.Sequential(*first, nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())


class LSTMClassifier(nn.Module):
    """A bidirectional LSTM over tokens `(n, t)` int64 -> logits `(n, classes)`."""

    def __init__(self, vocab: int = 200, classes: int = 4, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width, padding_idx=0)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2)
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        out, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.fc(out.mean(1))
        return logits


class ViT(nn.Module):
    """A small vision transformer (Dosovitskiy et al. 2020): `(n, 3, size, size)` -> logits `(n, classes)`."""

    def __init__(self, classes: int = 10, size: int = 32, patch: int = 8, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, (size // patch) ** 2 + 1, width))
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), 1) + self.pos_embed
        logits: Tensor = self.head(self.norm(self.encoder(x))[:, 0])
        return logits
