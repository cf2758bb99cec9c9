"""Strided views cut into blocks: every element exactly once, whatever the strides and the size of a block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanscan.errors import CorruptCheckpoint
from nanscan.files.layout import View, row_major

DIMS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 7)), max_size=4)


def places(view: View, limit: int) -> dict[int, int]:
    """Place in memory order -> byte, of every element that the blocks read."""
    found: dict[int, int] = {}
    for block in view.blocks(limit):
        assert max(block.span, block.numel * view.itemsize) <= max(limit, view.itemsize)
        for number, at in enumerate(np.ndindex(*block.sizes)):
            assert block.start + number not in found
            found[block.start + number] = block.offset + sum(i * s for i, s in zip(at, block.strides, strict=True))
    return found


@given(DIMS, st.integers(0, 9), st.integers(1, 40))
def test_blocks_cover_every_stored_element_once_and_say_where_it_is(
    dims: list[tuple[int, int]], offset: int, limit: int
) -> None:
    view = View(tuple(n for n, _ in dims), tuple(2 * s for _, s in dims), 2 * offset, 2)
    found = places(view, 2 * limit)
    assert sorted(found) == list(range(view.numel // view.repeat))
    for place, byte in found.items():
        index = view.index(place)
        assert byte == view.offset + sum(i * s for i, s in zip(index, view.strides, strict=True))
    assert max(found.values()) + view.itemsize == view.end


@given(DIMS, st.data())
def test_first_is_the_row_major_first(dims: list[tuple[int, int]], data: st.DataObject) -> None:
    view = View(tuple(n for n, _ in dims), tuple(s for _, s in dims), 0, 1)
    some = data.draw(st.lists(st.integers(0, view.numel // view.repeat - 1), min_size=1))
    assert view.first(np.array(some, np.int64)) == min(view.index(place) for place in some)


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [((2,), (-4,), 8), ((-1,), (4,), 0), ((2,), (4,), -4), ((1,) * 65, (4,) * 65, 0), ((2**40, 2**40), (4, 4), 0),
     ((2,), (4, 4), 0), ((2**63,), (4,), 0)],
)  # fmt: skip
def test_impossible_views_are_refused(shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> None:
    with pytest.raises(CorruptCheckpoint):
        View(shape, strides, offset, 4)


def test_a_view_that_leaves_its_storage_is_refused_with_both_sizes() -> None:
    with pytest.raises(CorruptCheckpoint, match=r"shape \[3\] reaches to byte 12 of a storage of 8 bytes"):
        row_major((3,), 4).check(8)
