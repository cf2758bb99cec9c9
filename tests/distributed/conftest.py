"""The processes, started once for each world size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def worlds() -> Iterator[dict[int, Ranks]]:
    """World size -> its processes."""
    started = {size: Ranks(size, "tests.distributed.scenarios") for size in (2, 4)}
    yield started
    for ranks in started.values():
        ranks.close()
