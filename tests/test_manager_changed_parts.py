"""Resuming with parts that were built in another way than those that were saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

import nanscan
from nanscan import CheckpointManager, CheckpointWarning
from tests.guarded import bits

Make = Callable[[torch.optim.Optimizer], Any]


def saved_and_restored(tmp_path: Path, saved: Make, built: Make) -> Any:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with CheckpointManager(tmp_path) as manager:
        manager.save(3, model=model, scheduler=saved(optimizer))
    scheduler = built(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    CheckpointManager(tmp_path).restore(model=model, scheduler=scheduler)
    return scheduler


@pytest.mark.parametrize(
    ("saved", "built", "words"),
    [
        (
            lambda o: schedules.CosineAnnealingLR(o, 5),
            lambda o: schedules.CosineAnnealingLR(o, 50),
            "scheduler was built with T_max=50, the checkpoint has T_max=5: the checkpoint's hold",
        ),
        (
            lambda o: schedules.OneCycleLR(o, 0.1, total_steps=5),
            lambda o: schedules.OneCycleLR(o, 0.1, total_steps=50),
            "total_steps=50.*total_steps=5:",
        ),
        (
            lambda o: schedules.SequentialLR(o, [schedules.ConstantLR(o), schedules.StepLR(o, 2)], [2]),
            lambda o: schedules.SequentialLR(o, [schedules.ConstantLR(o), schedules.StepLR(o, 7)], [3]),
            r"_milestones=\[3\].*_milestones=\[2\].*scheduler\._schedulers\[1\] was built with step_size=7",
        ),
        (
            lambda o: schedules.ChainedScheduler([schedules.ConstantLR(o)]),
            lambda o: schedules.ChainedScheduler([schedules.ConstantLR(o), schedules.StepLR(o, 7)]),
            "built of 2 schedulers, the checkpoint has 1",
        ),
    ],
    ids=["cosine", "one cycle", "sequential", "chained"],
)
def test_settings_of_a_scheduler_that_the_checkpoint_overrules_are_named(
    tmp_path: Path, saved: Make, built: Make, words: str
) -> None:
    with pytest.warns(CheckpointWarning, match=words):
        saved_and_restored(tmp_path, saved, built)


def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.filterwarnings("ignore")
def test_the_way_to_new_settings_that_the_warning_tells_leads_there(tmp_path: Path) -> None:
    def made(optimizer: torch.optim.Optimizer, length: int) -> Any:
        parts = [schedules.LinearLR(optimizer, 0.1, total_iters=2), schedules.CosineAnnealingLR(optimizer, length)]
        return schedules.SequentialLR(optimizer, parts, [2])

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    short = made(optimizer, 10)
    rates(optimizer, short, 4)
    with CheckpointManager(tmp_path) as manager:
        manager.save(4, model=model, optimizer=optimizer, scheduler=short)
    resumed = torch.optim.SGD(model.parameters(), lr=0.1)
    CheckpointManager(tmp_path).restore(model=model, optimizer=resumed)
    for group in resumed.param_groups:
        group["lr"] = group["initial_lr"]
    long = made(resumed, 50)
    for _ in range(4):
        long.step()
    fresh = torch.optim.SGD(model.parameters(), lr=0.1)
    assert rates(resumed, long, 3) == pytest.approx(rates(fresh, made(fresh, 50), 7)[4:])


@pytest.mark.parametrize("name", ["CosineAnnealingWarmRestarts", "MultiStepLR", "ReduceLROnPlateau", "CyclicLR"])
def test_a_scheduler_that_was_built_alike_is_restored_without_a_word(tmp_path: Path, name: str) -> None:
    options: dict[str, tuple[Any, ...]] = {
        "CosineAnnealingWarmRestarts": (2, 2), "MultiStepLR": ([1, 3],), "ReduceLROnPlateau": (),
        "CyclicLR": (0.01, 0.1),
    }  # fmt: skip

    def stepped(optimizer: torch.optim.Optimizer) -> Any:
        scheduler = getattr(schedules, name)(optimizer, *options[name])
        for _ in range(5):
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        return scheduler

    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        saved_and_restored(tmp_path, stepped, lambda o: getattr(schedules, name)(o, *options[name]))


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, nanscan.GradScaler])
def test_a_scaler_that_was_disabled_leaves_an_enabled_one_as_it_is(tmp_path: Path, scaler: Any) -> None:
    model, enabled = nn.Linear(2, 1), scaler("cpu", init_scale=8.0)
    with CheckpointManager(tmp_path) as manager:
        manager.save(3, model=model, scaler=scaler("cpu", enabled=False))
    with pytest.warns(CheckpointWarning, match="not in the checkpoint and left as they are: scaler"):
        restored = CheckpointManager(tmp_path).restore(model=model, scaler=enabled)
    assert restored is not None and restored.missing == ("scaler",) and enabled.get_scale() == 8.0
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        CheckpointManager(tmp_path).restore(model=model, scaler=scaler("cpu", enabled=False))


class Unloadable:
    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, state: Any) -> None:
        raise KeyError("b")


def test_a_part_that_can_not_even_be_put_back_is_one_clear_error(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    with CheckpointManager(tmp_path) as manager:
        manager.save(3, model=model, scheduler=Unloadable())
    before = model.weight.detach().add_(1).clone()
    with (
        pytest.warns(CheckpointWarning, match="could not be put back"),
        pytest.raises(nanscan.CheckpointError, match="scheduler can't be loaded into this Unloadable"),
    ):
        CheckpointManager(tmp_path).restore(model=model, scheduler=Unloadable())
    assert torch.equal(model.weight, before)


def trained(dtype: torch.dtype, kind: Any) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(dtype)
    optimizer = kind(model.parameters())
    for _ in range(2):
        model(torch.rand(4, 3, dtype=dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam, torch.optim.Adafactor, torch.optim.LBFGS])
@pytest.mark.parametrize("now", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("then", [torch.float32, torch.bfloat16])
def test_moments_follow_the_dtype_of_their_parameter_as_in_torch(
    tmp_path: Path, then: torch.dtype, now: torch.dtype, kind: Any
) -> None:
    if kind is torch.optim.LBFGS:  # state of lists, which needs a closure to arise
        model, optimizer = trained(then, torch.optim.Adam)
        optimizer = kind(model.parameters())
        optimizer.state[model.weight].update(old_dirs=[torch.rand(8, dtype=then)], n_iter=3)
    else:
        model, optimizer = trained(then, kind)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=model, optimizer=optimizer)
    ours, theirs = nn.Linear(3, 2).to(now), nn.Linear(3, 2).to(now)
    mine, torchs = kind(ours.parameters()), kind(theirs.parameters())
    CheckpointManager(tmp_path).restore(model=ours, optimizer=mine)
    theirs.load_state_dict(model.state_dict())
    torchs.load_state_dict(optimizer.state_dict())
    for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        for key, wanted in torchs.state[other].items():
            found = mine.state[param][key]
            if key == "mu_product":  # a single number, which torch rounds
                wanted = optimizer.state_dict()["state"][0][key]
            assert bits(found) == bits(wanted), key
    if kind is not torch.optim.LBFGS:
        ours(torch.rand(4, 3, dtype=now)).square().sum().backward()
        mine.step()


def test_moments_that_are_wider_than_their_parameter_stay_so(tmp_path: Path) -> None:
    model, optimizer = trained(torch.bfloat16, torch.optim.SGD)
    for param in model.parameters():
        optimizer.state[param]["momentum_buffer"] = torch.rand(param.shape)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=model, optimizer=optimizer)
    for now in (torch.bfloat16, torch.float16, torch.float32):
        other = nn.Linear(3, 2).to(now)
        resumed = torch.optim.SGD(other.parameters())
        CheckpointManager(tmp_path).restore(model=other, optimizer=resumed)
        for param, former in zip(other.parameters(), model.parameters(), strict=True):
            kept = resumed.state[param]["momentum_buffer"]
            assert bits(kept) == bits(optimizer.state[former]["momentum_buffer"])
