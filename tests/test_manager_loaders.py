"""A resumed run goes on at the batch where it was, in the order that it would have had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from nanscan import CheckpointManager

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def loader_of(workers: int) -> Any:
    context = "fork" if workers else None
    return StatefulDataLoader(
        list(range(40)), batch_size=4, shuffle=True, num_workers=workers, multiprocessing_context=context
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop_after", [1, 7, 10, 12, 20])
def test_loader_goes_on_where_it_was_and_nothing_draws_from_the_restored_generator(
    tmp_path: Path, workers: int, stop_after: int
) -> None:
    def train(loader: Any, done: int, stop: int, manager: CheckpointManager | None = None) -> list[Any]:
        """Each batch with a draw of the global generator, as a dropout would take one."""
        seen = []
        for epoch in range((done - 1) // 10 if done else 0, 4):
            for batch in loader:
                seen.append((epoch, batch.tolist(), torch.rand(1).item()))
                done += 1
                if manager is not None and done == stop_after:
                    manager.save(done, loader=loader)
                if done == stop:
                    return seen
        return seen

    torch.manual_seed(3)
    with CheckpointManager(tmp_path) as manager:
        wanted = train(loader_of(workers), 0, 25, manager)[stop_after:]
    torch.manual_seed(99)
    loader = loader_of(workers)
    restored = CheckpointManager(tmp_path).restore(loader=loader)
    assert restored is not None
    assert train(loader, stop_after, 25) == wanted


@pytest.mark.parametrize("stop_after", [2, 3])  # in the middle of an epoch and at its end
def test_the_epochs_after_a_resume_are_shuffled_as_they_would_have_been_by_a_loaders_own_generator(
    tmp_path: Path, stop_after: int
) -> None:
    def make(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return StatefulDataLoader(list(range(12)), batch_size=4, shuffle=True, generator=generator)

    first, second = make(1), make(2)
    batches = iter(first)
    for _ in range(stop_after):
        next(batches)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, loader=first)
    wanted = [[batch.tolist() for batch in batches], *([batch.tolist() for batch in first] for _ in range(2))]
    CheckpointManager(tmp_path).restore(loader=second)
    assert [[batch.tolist() for batch in second] for _ in range(3)] == wanted


def test_any_object_with_load_state_dict_is_a_loader(tmp_path: Path) -> None:
    class Position:
        def __init__(self) -> None:
            self.at = 0

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    first, second = Position(), Position()
    first.at = 17
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, loader=first)
    CheckpointManager(tmp_path).restore(loader=second)
    assert second.at == 17
