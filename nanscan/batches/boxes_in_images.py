"""Bounding boxes held against the image of the same sample: outside it, or larger than it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from nanscan.batches.fields import Field, Placed
from nanscan.batches.problem import BatchProblem
from nanscan.batches.question import Answers, Question
from nanscan.batches.spec import BatchSpec

__all__ = ["ask_boxes"]

_CHANNELS = (1, 3, 4)
_OTHER_SIZE = ("size", "scale", "ratio", "shape", "pad")  # in a name: the boxes may be of another size of the image
_BEYOND = 1.05  # of the image's size; rounding and augmentation lead a little way over its border


def ask_boxes(readable: Sequence[Placed], spec: BatchSpec) -> list[Question]:
    """For targets as torchvision has them: a dict of `boxes` (corners, in pixels) and `labels` per sample, and images.

    Boxes without area are another finding, and those of other names may be of the image as it was before.
    """
    return [
        Question(i, partial(_answer, size), partial(_judge, field, size), (0, 0))
        for i, field in readable
        if field.role == "box" and field.name == "boxes" and not field.batched and len(field.shape) == 2
        if (size := _image_size(field, readable)) is not None
    ]


def _image_size(box: Field, readable: Sequence[Placed]) -> tuple[int, int] | None:
    """Height and width; None where none, or more than one, may be meant."""
    beside = [field for _, field in readable if field.steps[:-1] == box.steps[:-1]]
    names = [field.name.lower() for field in beside]
    if "labels" not in names or any(word in name for name in names for word in _OTHER_SIZE):
        return None
    sizes = {size for _, field in readable for size in _sizes(field, box)}
    return sizes.pop() if len(sizes) == 1 else None


def _sizes(field: Field, box: Field) -> Iterator[tuple[int, int]]:
    """The size of the image if `field` is that of the sample of `box`."""
    if field.role not in ("image", "input"):
        return
    own = field.steps[:-1] == box.steps[:-1]  # in the same dict
    outer, sample = box.steps[:-3], box.steps[-2:-1]  # batch["targets"][3]["boxes"]: batch, 3
    listed = len(box.steps) > 2 and field.steps[:-2] == outer and field.steps[-1:] == sample
    if not field.batched and len(field.shape) == 3 and (own or listed):
        yield from _height_width(field.shape)
    elif field.batched and len(field.shape) == 4 and len(box.steps) > 2 and field.steps[:-1] == outer:
        yield from _height_width(field.shape[1:])


def _height_width(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    first, last = shape[0] in _CHANNELS, shape[-1] in _CHANNELS
    if first != last:
        yield (shape[1], shape[2]) if first else (shape[0], shape[1])


def _outside(size: tuple[int, int], boxes: Tensor) -> tuple[Tensor, Tensor]:
    """bool `(boxes,)`: those that lie outside, and those that reach far beyond the border."""
    height, width = size
    x, y, right, low = boxes.unbind(-1)
    has_area = (right > x) & (low > y)
    outside = ((x >= width) | (y >= height)) & has_area
    return outside, ((right > _BEYOND * width + 1) | (low > _BEYOND * height + 1)) & has_area & ~outside


def _answer(size: tuple[int, int], boxes: Tensor) -> tuple[Tensor | float]:
    if boxes.is_cpu:  # one operator tells that all is well
        x, y, right, low = boxes.amax(0).tolist()
        if x < size[1] >= right and y < size[0] >= low:
            return (0.0,)
    outside, beyond = _outside(size, boxes)
    return ((outside | beyond).sum(),)


def _judge(field: Field, size: tuple[int, int], boxes: Tensor, told: Answers) -> list[BatchProblem]:
    outside, beyond = _outside(size, boxes)
    bad = outside if bool(outside.any()) else beyond
    count, index, path, within = field.first(bad)
    numbers = ", ".join(f"{number:g}" for number in boxes[index].tolist())
    where = "outside its" if bad is outside else "beyond the border of its"
    reason = (
        f"{field.name}: box {list(index)} is ({numbers}), {where} "
        f"image of height {size[0]} and width {size[1]}; {count} of {len(boxes)} bad. Resize, crop and flip boxes "
        "together with their image, and drop those that a crop has cut off"
    )
    severity = "error" if bad is outside else "warning"
    return [BatchProblem(path, reason, count, within, severity, "box", field.field)]  # type: ignore[arg-type]
