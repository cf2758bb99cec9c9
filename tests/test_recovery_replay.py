"""Bad batches are remembered, and the others come once more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim

import nanscan
from tests.guarded import NAN, bits
from tests.recovery_support import make_batch, make_model, train

pytestmark = pytest.mark.filterwarnings("ignore::nanscan.NonFiniteWarning")


def test_replay_gives_every_good_batch_in_order_and_the_bad_one_once() -> None:
    model = make_model()
    optimizer = optim.Adam(model.parameters())
    recovery = nanscan.Recovery(model, optimizer, snapshot_every=4)
    seen = []
    for number in recovery.replay(range(12)):
        train(model, optimizer, make_batch(number, NAN if number == 6 else None))
        seen.append(number)
        recovery.step()
    assert seen == [0, 1, 2, 3, 4, 5, 6, 4, 5, 7, 8, 9, 10, 11]
    assert recovery.bad_batches == recovery.rollbacks[0].batches == (6,)
    assert recovery.rollbacks[0].to_batch == 3


def test_a_replayed_run_ends_as_one_that_never_met_the_bad_batch() -> None:
    ends = []
    for bad in (NAN, None):
        model = make_model()
        optimizer = optim.Adam(model.parameters())
        recovery = nanscan.Recovery(model, optimizer, snapshot_every=4, lr_backoff=1.0)
        numbers = recovery.replay(range(12)) if bad else [n for n in range(12) if n != 6]
        for number in numbers:
            train(model, optimizer, make_batch(number, bad if number == 6 else None))
            recovery.step()
        ends.append((bits(dict(model.state_dict())), bits(optimizer.state_dict())))
    assert ends[0] == ends[1]


def test_replay_reaches_back_over_the_end_of_an_epoch_of_a_loader() -> None:
    model = make_model()
    optimizer = optim.Adam(model.parameters())
    recovery = nanscan.Recovery(model, optimizer, snapshot_every=3)
    seen: list[list[int]] = []
    for epoch in range(2):
        seen.append([])
        for batch in recovery.replay(iter([10 * epoch + i for i in range(4)])):
            train(model, optimizer, make_batch(batch, NAN if batch == 10 else None))
            seen[-1].append(batch)
            recovery.step()
    assert seen == [[0, 1, 2, 3], [10, 3, 11, 12, 13]]
    assert recovery.bad_batches == (4,)  # numbered over both epochs


def test_replay_with_a_guard_that_raises() -> None:
    model = make_model()
    optimizer = nanscan.wrap(optim.Adam(model.parameters()), model, on_nonfinite="raise")
    recovery = nanscan.Recovery(model, optimizer, snapshot_every=2)
    seen = []
    for number in recovery.replay(range(5)):
        with recovery:
            seen.append(number)
            train(model, optimizer, make_batch(number, NAN if number == 3 else None))
        recovery.step()
    assert seen == [0, 1, 2, 3, 2, 4] and recovery.bad_batches == (3,)


def test_replay_keeps_only_batches_since_the_older_snapshot() -> None:
    model = make_model()
    optimizer = optim.Adam(model.parameters())
    recovery = nanscan.Recovery(model, optimizer, snapshot_every=5)
    most = 0
    for number in recovery.replay(range(60)):
        train(model, optimizer, make_batch(number))
        recovery.step()
        most = max(most, len(recovery._replay._kept))
    assert most <= 10 + 1


def test_the_bad_steps_of_a_run_are_all_to_blame() -> None:
    model = make_model()
    optimizer = nanscan.wrap(optim.Adam(model.parameters()), model)
    recovery = nanscan.Recovery(model, optimizer, patience=2)
    order: Any = ["a", "b", "c", "d"]
    for name in order:
        train(model, optimizer, make_batch(0, NAN if name in "cd" else None))
        recovery.step(batch=name)
    assert recovery.bad_batches == ("c", "d")
    assert recovery.should_skip("c") and not recovery.should_skip("a")


def test_the_step_before_the_first_sign_is_to_blame_for_bad_weights() -> None:
    model = make_model()
    optimizer = nanscan.wrap(optim.Adam(model.parameters()), model)
    recovery = nanscan.Recovery(model, optimizer, snapshot_every=100)
    for name in "abc":
        train(model, optimizer, make_batch(0))
        if name == "b":  # as an update that divides by 0
            optimizer.optimizer.param_groups[0]["lr"] = 1.0
            with torch.no_grad():
                model[0].bias[0] = NAN
        went_back = recovery.step(batch=name)
    assert went_back and recovery.bad_batches == ("b",)


def test_a_loop_with_its_own_positions_goes_back_by_what_is_told() -> None:
    model = make_model()
    optimizer = optim.Adam(model.parameters())
    recovery = nanscan.Recovery(model, optimizer, snapshot_every=3)
    seen, position = [], 0
    while position < 8:
        if recovery.should_skip(position):
            position += 1
            continue
        train(model, optimizer, make_batch(position, NAN if position == 5 else None))
        seen.append(position)
        if recovery.step(batch=position):
            position = recovery.rollbacks[-1].to_batch
        position += 1
    assert seen == [0, 1, 2, 3, 4, 5, 3, 4, 6, 7]
