"""Small scenes made from pictures that scikit-learn ships: handwritten digits, drawn on cut-outs of two photographs.

Classes: 0 background, 1 the digit zero, 2 the digit one, 3 the digit seven, which is small, is in one of five
pictures, and may be covered by what is drawn later, up to its last pixel.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.random import Generator
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor

CLASSES = ("background", "zero", "one", "seven")
COMMON = ((1, 0), (2, 1))  # class, digit
RARE = (3, 7)
RARE_SHARE = 0.22  # of the pictures
SIZE = 32


@dataclass(frozen=True)
class Scenes:
    """Images `(n, 3, 32, 32)` float32 around 0, and masks `(n, 32, 32)` int64 in 0..3, for training and testing."""

    train_images: Tensor
    train_masks: Tensor
    test_images: Tensor
    test_masks: Tensor


def load_scenes(train: int = 320, test: int = 160) -> Scenes:
    """The same scenes at every call; digits of the test scenes are in no training scene."""
    digits = load_digits()
    photos = [photo.astype(np.float32) / 255 for photo in load_sample_images().images]
    split = len(digits.target) * 2 // 3
    halves = []
    for count, seed, part in ((train, 0, slice(split)), (test, 1, slice(split, None))):
        glyphs = {digit: digits.images[part][digits.target[part] == digit] / 16 for digit in (0, 1, 7)}
        halves += draw_scenes(count, glyphs, photos, np.random.default_rng(seed))
    return Scenes(*halves)


def draw_scenes(count: int, glyphs: dict, photos: list, random: Generator) -> tuple[Tensor, Tensor]:
    """So many scenes: images and masks."""
    scenes = [draw_scene(glyphs, photos[random.integers(len(photos))], random) for _ in range(count)]
    images = torch.from_numpy(np.stack([image for image, _ in scenes])).permute(0, 3, 1, 2) - 0.5
    masks = torch.from_numpy(np.stack([mask for _, mask in scenes]))
    return images.contiguous(memory_format=torch.channels_last), masks


def draw_scene(glyphs: dict, photo: np.ndarray, random: Generator) -> tuple[np.ndarray, np.ndarray]:
    """One cut-out of a photograph with one or two large digits; a small seven may lie below them."""
    top, left = (random.integers(length - SIZE) for length in photo.shape[:2])
    image = photo[top : top + SIZE, left : left + SIZE].copy()
    mask = np.zeros((SIZE, SIZE), np.int64)
    if random.random() < RARE_SHARE:
        draw_digit(image, mask, RARE[0], pick(glyphs[RARE[1]], random), int(random.integers(6, 11)), random)
    for _ in range(random.integers(1, 3)):
        label, digit = COMMON[random.integers(len(COMMON))]
        draw_digit(image, mask, label, pick(glyphs[digit], random), int(random.integers(13, 18)), random)
    return image, mask


def pick(glyphs: np.ndarray, random: Generator) -> np.ndarray:
    return glyphs[random.integers(len(glyphs))]


def draw_digit(
    image: np.ndarray, mask: np.ndarray, label: int, glyph: np.ndarray, size: int, random: Generator
) -> None:
    """Enlarge a digit of 8x8 pixels and draw it somewhere, light on dark or dark on light, into image and mask."""
    enlarged = torch.nn.functional.interpolate(torch.from_numpy(glyph)[None, None], (size, size), mode="bilinear")
    ink = enlarged[0, 0].numpy().astype(np.float32)
    top, left = random.integers(SIZE - size + 1, size=2)
    place = (slice(top, top + size), slice(left, left + size))
    darker = image[place].mean() > 0.5
    colour = (random.random(3) / 4 + (0 if darker else 0.75)).astype(np.float32)
    image[place] = image[place] * (1 - ink[..., None]) + colour * ink[..., None]
    mask[place][ink > 0.5] = label


def batches(scenes: Scenes, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch of the training scenes, shuffled; the same seed gives the same batches."""
    order = torch.randperm(len(scenes.train_masks), generator=torch.Generator().manual_seed(seed))
    for chosen in order.split(size):
        yield scenes.train_images[chosen], scenes.train_masks[chosen]
