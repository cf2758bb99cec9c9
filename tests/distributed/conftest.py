"""The processes, started once for each world size that is needed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


class Worlds(dict[int, Ranks]):
    """Starts the processes of a size when they are asked for."""

    def __missing__(self, size: int) -> Ranks:
        self[size] = Ranks(size, "tests.distributed.scenarios")
        return self[size]


@pytest.fixture(scope="session")
def worlds() -> Iterator[dict[int, Ranks]]:
    """World size -> its processes."""
    started = Worlds()
    yield started
    for ranks in started.values():
        ranks.close()
