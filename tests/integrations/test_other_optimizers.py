"""Optimizers from PyPI under the guard: skipped steps, clipping, checkpoints and copies, whatever state they hold."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bitsandbytes
import lion_pytorch
import prodigyopt
import pytest
import schedulefree
import torch
from torch import Tensor, nn

import nanscan
from tests.guarded import NAN, bits

pytestmark = pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")


@dataclass(frozen=True)
class Kind:
    """One optimizer: how it is made, what is unusual in its state, whether it wants a closure."""

    make: Callable[[list[Tensor]], torch.optim.Optimizer]
    holds: str
    closure: bool = False


KINDS = {
    "bitsandbytes AdamW8bit": Kind(lambda ps: bitsandbytes.optim.AdamW8bit(ps, lr=1e-2, min_8bit_size=1), "absmax1"),
    "bitsandbytes Lion8bit": Kind(lambda ps: bitsandbytes.optim.Lion8bit(ps, lr=1e-3, min_8bit_size=1), "absmax1"),
    "bitsandbytes AdamW": Kind(lambda ps: bitsandbytes.optim.AdamW(ps, lr=1e-2), "state1"),
    "lion-pytorch": Kind(lambda ps: lion_pytorch.Lion(ps, lr=1e-3, weight_decay=0.1), "exp_avg"),
    "schedulefree AdamW": Kind(lambda ps: schedulefree.AdamWScheduleFree(ps, lr=1e-2), "z"),
    "schedulefree SGD": Kind(lambda ps: schedulefree.SGDScheduleFree(ps, lr=1.0), "z"),
    "schedulefree closure": Kind(lambda ps: schedulefree.AdamWScheduleFreeClosure(ps, lr=1e-2), "z", closure=True),
    "prodigyopt": Kind(lambda ps: prodigyopt.Prodigy(ps, weight_decay=0.01), "p0"),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))


class Run:
    """A small regression, trained by a guarded or a bare optimizer."""

    def __init__(self, kind: Kind, *, guarded: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        self.kind = kind
        self.model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
        self.inputs, self.targets = torch.randn(32, 16), 0.3 * torch.randn(32, 16)
        inner = kind.make(list(self.model.parameters()))
        self.optimizer: Any = nanscan.wrap(inner, self.model, **options) if guarded else inner
        self.clip: float | None = None
        self.losses: list[float] = []
        if hasattr(inner, "train"):
            self.optimizer.train()

    def backward(self, bad: bool) -> Tensor:
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(self.inputs), self.targets)
        loss.backward()
        if bad:
            self.model[2].bias.grad[3] = NAN  # type: ignore[union-attr, index]
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.losses.append(loss.item())
        return loss.detach()

    def step(self, bad: bool = False) -> None:
        if self.kind.closure:
            self.optimizer.step(lambda: self.backward(bad))
        else:
            self.backward(bad)
            self.optimizer.step()

    def steps(self, count: int) -> Run:
        for _ in range(count):
            self.step()
        return self

    def whole(self) -> Any:
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        state = [dict(inner.state[p]) for p in self.model.parameters()]
        options = [{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups]
        return bits(list(self.model.parameters())), bits(state), options


@every_kind
def test_training_with_a_nan_step_is_bit_equal_to_one_that_never_had_it(kind: Kind) -> None:
    run, bare = Run(kind).steps(5), Run(kind, guarded=False).steps(5)
    before = run.whole()
    assert kind.holds in run.optimizer.state[run.model[0].weight]
    run.step(bad=True)
    assert run.whole() == before
    assert run.optimizer.step_was_skipped and run.optimizer.last_report.bad[0].name == "2.bias"
    assert run.steps(30).whole() == bare.steps(30).whole()
    assert run.losses[-1] < 0.9 * run.losses[0]
    assert run.optimizer.skipped_steps == 1


@every_kind
def test_nan_in_the_very_first_step_leaves_no_state_behind(kind: Kind) -> None:
    run, bare = Run(kind), Run(kind, guarded=False)
    run.step(bad=True)
    assert run.steps(3).whole() == bare.steps(3).whole()


@every_kind
def test_clipping_is_torchs(kind: Kind) -> None:
    run, bare = Run(kind, clip_norm=0.05), Run(kind, guarded=False)
    bare.clip = 0.05
    run.steps(4)
    bare.steps(4)
    assert run.optimizer.last_report.clip_factor < 1
    for mine, theirs in zip(run.model.parameters(), bare.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=2e-3)


@every_kind
def test_checkpoint_and_state_dict_go_on_bit_for_bit(kind: Kind, tmp_path: Path) -> None:
    run = Run(kind).steps(4)
    run.step(bad=True)
    with nanscan.CheckpointManager(tmp_path, background=False) as manager:
        manager.save(5, model=run.model, optimizer=run.optimizer)
        resumed = Run(kind)
        assert manager.restore(model=resumed.model, optimizer=resumed.optimizer).step == 5  # type: ignore[union-attr]
    assert resumed.whole() == run.whole()
    plain = Run(kind, guarded=False)
    plain.model.load_state_dict(run.model.state_dict())
    plain.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    run.steps(3)
    assert resumed.steps(3).whole() == run.whole()
    assert plain.steps(3).whole() == run.whole()


@every_kind
def test_copies_train_on_alone_with_all_their_options(kind: Kind) -> None:
    run = Run(kind).steps(3)
    for copied in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        twin = copy.copy(run)
        twin.model, twin.optimizer = copied((run.model, run.optimizer))  # type: ignore[no-untyped-call]
        assert twin.whole() == run.whole()
        before = run.whole()
        twin.step(bad=True)
        twin.steps(2)
        assert run.whole() == before
        assert twin.whole() == run.steps(2).whole()


@pytest.mark.parametrize("name", ["bitsandbytes AdamW8bit", "lion-pytorch", "schedulefree closure", "prodigyopt"])
def test_nothing_in_a_guarded_optimizer_is_lost_or_unpicklable(name: str) -> None:
    assert nanscan.find_unpicklable(Run(KINDS[name]).steps(1).optimizer) == []


@every_kind
def test_state_dict_is_all_picklable(kind: Kind) -> None:
    run = Run(kind).steps(2)
    assert nanscan.find_unpicklable(run.optimizer.state_dict()) == []


def test_bare_optimizer_whose_options_torch_does_not_pickle_is_said_to_lose_them() -> None:
    bare = Run(KINDS["lion-pytorch"], guarded=False).optimizer
    (problem,) = nanscan.find_unpicklable({"opt": bare}, name="ckpt")
    assert (problem.path, problem.severity) == ('ckpt["opt"]', "loss")
    assert "_init_lr, decoupled_wd, update_fn would not be saved" in problem.reason and "state_dict" in problem.fix
    bare.lock = threading.Lock()
    (problem,) = nanscan.find_unpicklable(nanscan.wrap(bare))
    assert problem.severity == "loss" and "only: lock would not be saved" in problem.reason


def test_schedule_free_weights_change_over_for_evaluation_and_come_back() -> None:
    run = Run(KINDS["schedulefree AdamW"]).steps(6)
    training = bits(list(run.model.parameters()))
    run.optimizer.eval()
    averaged = bits(list(run.model.parameters()))
    assert averaged != training
    with pytest.raises(Exception, match="train mode"):
        run.step()
    run.optimizer.train()
    run.step(bad=True)
    run.optimizer.eval()
    for mine, before in zip(run.model.parameters(), averaged, strict=True):
        assert mine.shape == before[1]
    run.optimizer.train()
    assert run.optimizer.skipped_steps == 1


def test_dropped_microbatch_and_rollback_with_eight_bit_state(tmp_path: Path) -> None:
    run = Run(KINDS["bitsandbytes AdamW8bit"])
    recovery = nanscan.Recovery(run.model, run.optimizer, snapshot_every=1, patience=2)
    for _ in range(3):
        run.step()
        recovery.step()
    before = run.whole()[:2]
    rolled = []
    for _ in range(2):
        run.step(bad=True)
        rolled.append(recovery.step())
    assert rolled == [False, True]
    assert run.whole()[:2] == before
    for bad in (False, True):
        loss = nn.functional.mse_loss(run.model(run.inputs), run.targets) / 2
        (loss * (NAN if bad else 1.0)).backward()
        run.optimizer.check_microbatch(drop=True)
    run.optimizer.step()
    assert run.optimizer.last_report.dropped == (1,) and not run.optimizer.step_was_skipped
    assert nanscan.scan(run.model).finite
