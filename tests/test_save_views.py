"""A small view of a large tensor is saved without the memory behind it, and views that overlap still do afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nanscan
from nanscan import CheckpointManager
from nanscan.checkpoint.load import verify_file

BIG = torch.arange(1_000_000, dtype=torch.float32)


class Subclass(torch.Tensor):
    pass


def saved(state: Any, folder: Path) -> tuple[Any, int]:
    """What comes back, and the size of the file."""
    path = nanscan.save(state, folder / "last.pt")
    verify_file(path)
    assert torch.load(path).keys() == state.keys()
    return nanscan.load(path), path.stat().st_size


def test_views_come_back_as_they_were_in_a_file_of_their_own_size(tmp_path: Path) -> None:
    grid = BIG.view(1000, 1000)
    weight = nn.Parameter(grid[7, 3:9])
    state: dict[str, Any] = {"row": grid[5], "corner": grid[990:, 996:].T, "one": BIG[999], "empty": BIG[3:3]}
    state |= {"weight": weight, "also": {"weight": weight.data}, "needs grad": BIG[5000:5003].detach().requires_grad_()}
    loaded, size = saved(state, tmp_path)
    assert size < 70_000  # 10 rows lie between the first and the last element of the corner
    for name in ("row", "corner", "one", "weight", "needs grad", "empty"):
        assert torch.equal(loaded[name], state[name]) and loaded[name].stride() == state[name].stride(), name
        assert loaded[name].requires_grad == state[name].requires_grad and type(loaded[name]) is type(state[name])
    assert loaded["also"]["weight"].data_ptr() == loaded["weight"].data_ptr()


def test_views_that_overlap_share_memory_and_a_whole_tensor_keeps_its_own(tmp_path: Path) -> None:
    loaded, size = saved({"a": BIG[10:60], "b": BIG[40:90], "c": BIG[500:510]}, tmp_path)
    loaded["a"][30:] = -1.0
    assert (loaded["b"][:20] == -1).all() and (loaded["b"][20:] == BIG[60:90]).all() and size < 5000
    loaded, size = saved({"whole": BIG, "part": BIG[10:20]}, tmp_path)
    loaded["whole"][10] = -1.0
    assert loaded["part"][0] == -1 and 4_000_000 < size < 4_010_000


@pytest.mark.parametrize(
    "other", [BIG[8:9].as_subclass(Subclass), BIG.clone().to(torch.complex64)[5:7]], ids=["subclass", "dtype"]
)
def test_memory_that_torch_itself_takes_apart_is_saved_as_torch_does(tmp_path: Path, other: torch.Tensor) -> None:
    if type(other) is Subclass:
        with torch.serialization.safe_globals([Subclass]):
            loaded, size = saved({"part": BIG[8:12], "other": other}, tmp_path)
    else:
        loaded, size = saved({"other": other}, tmp_path)
    assert torch.equal(loaded["other"], other) and size > 4_000_000


def test_a_checkpoint_is_as_small_whether_it_is_written_at_once_or_in_the_background(tmp_path: Path) -> None:
    sizes = []
    for background in (False, True):
        with CheckpointManager(tmp_path / str(background), background=background) as manager:
            manager.save(1, extra={"row": BIG[:10]})
        sizes.append(manager.checkpoints()[0].stat().st_size)
    assert max(sizes) < 40_000
