"""What is saved loads again: no file is written that `weights_only=True` refuses, and what is left out is said."""

from __future__ import annotations

import collections
import os
import random
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import nn

import nanscan
from nanscan.checkpoint import writer
from nanscan.checkpoint.tensors import Seen, tensors_in
from tests.unpicklable import Untouchable


@pytest.mark.parametrize("value", [b"", 1 << 3000, ..., NotImplemented], ids=lambda value: str(type(value)))
def test_plain_values_that_would_not_load_are_refused_by_path_or_left_out(tmp_path: Path, value: Any) -> None:
    state = {"keep": [1, value], "lost": value}
    with pytest.raises(nanscan.CheckpointError, match=r'state\["lost"\]') as caught:
        nanscan.save(state, tmp_path / "last.pt")
    assert [problem.path for problem in caught.value.problems] == ['state["lost"]']  # type: ignore[attr-defined]
    with pytest.warns(nanscan.CheckpointWarning, match="left 1 value"):
        nanscan.save(state, tmp_path / "last.pt", on_unpicklable="drop")
    assert nanscan.load(tmp_path / "last.pt") == {"keep": [1]}


def test_what_can_not_be_left_out_is_refused_without_a_word_that_it_was(tmp_path: Path) -> None:
    with warnings.catch_warnings(), pytest.raises(nanscan.CheckpointError, match="Untouchable"):
        warnings.simplefilter("error")
        nanscan.save(Untouchable(), tmp_path / "last.pt", on_unpicklable="drop")
    assert list(tmp_path.iterdir()) == []


def test_nesting_beyond_recursion_is_refused_with_its_depth(tmp_path: Path) -> None:
    nested: list[Any] = []
    for _ in range(3000):
        nested = [nested]
    with pytest.raises(nanscan.CheckpointError, match=r'state\["deep"\].*nested 3001 levels deep'):
        nanscan.save({"deep": nested}, tmp_path / "last.pt")


def test_an_object_that_can_not_be_touched_is_named(tmp_path: Path) -> None:
    with pytest.raises(nanscan.CheckpointError, match=r'state\["bad"\]'):
        nanscan.save({"bad": Untouchable(), "w": torch.ones(1)}, tmp_path / "last.pt")


class Unreadable(Mapping[str, Any]):
    """A configuration that still lacks a value, as OmegaConf's do."""

    def __getitem__(self, key: str) -> Any:
        raise LookupError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(["missing"])

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize("value", [os, os.environb, Unreadable()], ids=["module", "bytes as keys", "unreadable"])
def test_what_can_not_be_looked_into_for_tensors_is_refused_by_path_or_left_out(tmp_path: Path, value: Any) -> None:
    state = {"w": torch.ones(1), "config": {"np": value}}
    with pytest.raises(nanscan.CheckpointError, match=r'state\["config"\]\["np"\]'):
        nanscan.save(state, tmp_path / "last.pt")
    with pytest.warns(nanscan.CheckpointWarning, match=r'state\["config"\]\["np"\]'):
        nanscan.save(state, tmp_path / "last.pt", on_unpicklable="drop")
    assert nanscan.load(tmp_path / "last.pt") == {"w": torch.ones(1), "config": {}}


def test_the_functions_that_a_scheduler_leaves_out_are_warned_about(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5)
    with pytest.warns(nanscan.CheckpointWarning, match=r'scheduler\["lr_lambdas"\]\[0\]') as caught:
        nanscan.save({"scheduler": scheduler.state_dict()}, tmp_path / "last.pt")
    assert caught[0].filename == __file__


def test_the_disk_is_told_early_and_a_hint_that_fails_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []

    class Refuses:
        @staticmethod
        def sync_file_range(fd: Any, start: Any, size: Any, flags: Any) -> int:
            begun.append(size.value)
            return -1

    monkeypatch.setattr(writer, "_LIBC", Refuses)
    state = {"w": torch.arange(5_000_000)}
    assert torch.equal(nanscan.load(nanscan.save(state, tmp_path / "a.pt"))["w"], state["w"])
    assert sum(begun) > 30_000_000
    monkeypatch.setattr(writer, "_LIBC", object())  # a system without it
    assert torch.equal(nanscan.load(nanscan.save(state, tmp_path / "a.pt"))["w"], state["w"])


@pytest.mark.parametrize("sizes", [[1] * 3000, [writer.CHUNK - 40, 600, writer.CHUNK, 511, 512, 1, 3 * writer.CHUNK]])
def test_every_piece_has_its_digest_wherever_the_chunks_end(tmp_path: Path, sizes: list[int]) -> None:
    content = random.Random(0).randbytes(sum(sizes))
    with open(tmp_path / "file", "wb") as file:
        written = writer.DigestingWriter(file.fileno())
        at = 0
        for size in sizes:
            assert written.write(content[at : at + size]) == size
            at += size
        written.flush()
    assert (tmp_path / "file").read_bytes() == content
    at = 0
    for size in sizes:
        assert written.digest(at, size) == xxhash.xxh3_128_digest(content[at : at + size])
        at += size


def test_paths_are_written_for_what_holds_tensors_only() -> None:
    """A state may hold a million numbers."""
    pair = collections.namedtuple("Pair", "left right")
    state = {"many": list(range(1000)), "in": [0, pair(1, [2, torch.ones(1)]), {3: (torch.ones(1), 4)}], "n": 1 << 3000}
    seen = Seen()
    assert [found.path for found in tensors_in(state, seen)] == ["in[1].right[1]", "in[2][3][0]"]
    assert seen.huge == [1 << 3000]
