"""The parameter shapes that are measured: three synthetic sets, and three models written out from their architectures.

Only shapes matter to a scan, so no model library is needed. The element totals are those the models are known by
(ResNet-50: 25.557 M, BERT-base: 109.48 M, GPT-2 small: 124.44 M), and ``tests/test_bench.py`` holds the lists to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["WORKLOADS", "Shape", "Workload", "workload"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """One row of the tables: a name, a title and the shapes of its parameters.

    Example:
        >>> workload("mlp").tensors, workload("mlp").elements
        (16, 132096)
    """

    name: str
    title: str
    shapes: tuple[Shape, ...]

    @property
    def tensors(self) -> int:
        return len(self.shapes)

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


def thousand_small() -> list[Shape]:
    """1,000 vectors of 64: all overhead, hardly any memory."""
    return [(64,)] * 1000


def lora() -> list[Shape]:
    """480 low-rank factors of 16 × 768, as a LoRA fine-tuning run has them (23.6 MB in fp32)."""
    return [(16, 768)] * 480


def mlp() -> list[Shape]:
    """Eight linear layers of 128 × 128 with bias: 16 tensors, 132 k elements."""
    return [shape for _ in range(8) for shape in _linear(128, 128)]


def resnet50() -> list[Shape]:
    """He et al. 2015, table 1, 50 layers, 1,000 classes, as in torchvision: 161 tensors."""
    shapes = [*_convolution(3, 64, 7)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += _bottleneck(channels, width, shortcut=block == 0)
            channels = 4 * width
    return [*shapes, *_linear(channels, 1000)]


def bert_base(width: int = 768, layers: int = 12, vocabulary: int = 30_522, positions: int = 512) -> list[Shape]:
    """Devlin et al. 2018, base, uncased, with the pooler: 199 tensors."""
    shapes: list[Shape] = [(vocabulary, width), (positions, width), (2, width), *_norm(width)]
    for _ in range(layers):
        shapes += 4 * _linear(width, width) + _norm(width)  # query, key, value, output
        shapes += _linear(width, 4 * width) + _linear(4 * width, width) + _norm(width)
    return shapes + _linear(width, width)


def gpt2_small(width: int = 768, layers: int = 12, vocabulary: int = 50_257, positions: int = 1024) -> list[Shape]:
    """Radford et al. 2019, 117M as published (124 M counted), head tied to the embedding: 148 tensors."""
    shapes: list[Shape] = [(vocabulary, width), (positions, width)]
    for _ in range(layers):
        shapes += _norm(width) + [(width, 3 * width), (3 * width,), (width, width), (width,)]
        shapes += _norm(width) + [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return shapes + _norm(width)


def _linear(inputs: int, outputs: int) -> list[Shape]:
    return [(outputs, inputs), (outputs,)]


def _norm(width: int) -> list[Shape]:
    return [(width,), (width,)]


def _convolution(inputs: int, outputs: int, kernel: int) -> list[Shape]:
    """A convolution without bias and the batch norm that follows it."""
    return [(outputs, inputs, kernel, kernel), *_norm(outputs)]


def _bottleneck(inputs: int, width: int, shortcut: bool) -> list[Shape]:
    shapes = _convolution(inputs, width, 1) + _convolution(width, width, 3) + _convolution(width, 4 * width, 1)
    return shapes + (_convolution(inputs, 4 * width, 1) if shortcut else [])


def _make(name: str, title: str, shapes: Callable[[], list[Shape]]) -> Workload:
    return Workload(name, title, tuple(shapes()))


WORKLOADS: dict[str, Workload] = {
    row.name: row
    for row in (
        _make("small", "1,000 × 64", thousand_small),
        _make("lora", "LoRA-like", lora),
        _make("mlp", "small MLP", mlp),
        _make("resnet50", "ResNet-50", resnet50),
        _make("bert", "BERT-base", bert_base),
        _make("gpt2", "GPT-2-small", gpt2_small),
    )
}


def workload(name: str) -> Workload:
    """The row of that name.

    Raises:
        ValueError: there is no such row; the message names those there are.

    Example:
        >>> workload("gpt2").tensors
        148
    """
    if name not in WORKLOADS:
        raise ValueError(f"there is no benchmark row {name!r}: use one of {', '.join(WORKLOADS)}.")
    return WORKLOADS[name]
