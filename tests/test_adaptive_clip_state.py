"""The guard's own state: a resumed, copied or rolled back run goes on with the same limits, bit for bit."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import nanscan
from nanscan import AdaptiveClip
from tests.guarded import bits, one, step

pytestmark = pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")
every_rule = pytest.mark.parametrize(
    "rule",
    [AdaptiveClip("autoclip"), AdaptiveClip("autoclip", window=20), AdaptiveClip("zclip"), AdaptiveClip("agc")],
    ids=str,
)


def new_run(rule):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, nanscan.wrap(optimizer, model, clip_norm=rule, on_spike="clip")


def train(model, optimizer, steps):
    """Steps that depend on their number alone; the 45th is a spike, the 17th is bad."""
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(8, 4, generator=generator)
        loss = model(inputs).square().mean() * (1e6 if number == 45 else 1.0)
        optimizer.zero_grad()
        optimizer.observe(loss)
        (loss * (float("nan") if number == 17 else 1.0)).backward()
        optimizer.step()


def facts(model, optimizer, last=20):
    told = [(r.step, r.clip_factor, r.clip_limit, r.spike, r.skipped) for r in list(optimizer.history)[-last:]]
    return told, bits(list(model.parameters())), bits(optimizer.guard_state_dict())


@every_rule
def test_a_resumed_run_equals_the_one_that_was_not_interrupted(rule, tmp_path):
    model, optimizer = new_run(rule)
    with nanscan.CheckpointManager(tmp_path) as manager:
        train(model, optimizer, range(40))
        manager.save(40, model=model, optimizer=optimizer)
    train(model, optimizer, range(40, 60))
    assert optimizer.spikes > 0
    resumed, again = new_run(rule)
    with nanscan.CheckpointManager(tmp_path) as manager:
        assert manager.restore(model=resumed, optimizer=again).step == 40
    train(resumed, again, range(40, 60))
    assert facts(resumed, again) == facts(model, optimizer)


@every_rule
def test_the_state_is_plain_and_goes_through_torch_save(rule, tmp_path):
    model, optimizer = new_run(rule)
    train(model, optimizer, range(40))
    torch.save(optimizer.guard_state_dict(), tmp_path / "guard.pt")
    other = new_run(rule)[1]
    other.load_guard_state_dict(torch.load(tmp_path / "guard.pt", weights_only=True))
    assert bits(other.guard_state_dict()) == bits(optimizer.guard_state_dict())
    assert (other.skipped_steps, other.first_skipped_step) == (1, 17)
    assert "clip" not in optimizer.state_dict(), "the optimizer's own state dict stays torch's"


@every_rule
@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"]
)
def test_copies_go_on_like_the_original(rule, way):
    model, optimizer = new_run(rule)
    train(model, optimizer, range(40))
    twin, copied = way((model, optimizer))
    train(model, optimizer, range(40, 60))
    train(twin, copied, range(40, 60))
    assert facts(twin, copied) == facts(model, optimizer)


def test_recovery_puts_the_limits_back_too():
    model, optimizer = new_run(AdaptiveClip("autoclip"))
    train(model, optimizer, range(16))
    recovery = nanscan.Recovery(model, optimizer, snapshot_every=1000, patience=1)
    before = bits({name: optimizer.guard_state_dict()[name] for name in ("clip", "spikes")})
    train(model, optimizer, [16])
    assert not recovery.step()
    train(model, optimizer, [17])
    assert recovery.step()
    assert bits({name: optimizer.guard_state_dict()[name] for name in ("clip", "spikes")}) == before


def test_a_checkpoint_without_a_guards_state_and_one_with_counters_alone_restore(tmp_path):
    model, optimizer = new_run(AdaptiveClip("zclip"))
    train(model, optimizer, range(20))
    with nanscan.CheckpointManager(tmp_path) as manager:
        path = manager.save(20, model=model, optimizer=optimizer)
        manager.flush()
    saved = nanscan.load(path)
    counters = {name: value for name, value in saved["guard"]["counters"].items() if name != "spikes"}
    for former in (None, counters):
        older = {name: value for name, value in saved.items() if name != "guard"}
        nanscan.save(older if former is None else {**older, "guard": former}, path)
        resumed, again = new_run(AdaptiveClip("zclip"))
        with nanscan.CheckpointManager(tmp_path) as manager:
            manager.restore(model=resumed, optimizer=again)
        assert again.skipped_steps == (0 if former is None else 1)
        assert again.guard_state_dict()["clip"]["first"].tolist() == []
    plain = torch.optim.AdamW(resumed.parameters(), lr=1.0)
    plain.load_state_dict(saved["optimizer"])
    assert plain.param_groups[0]["lr"] == 0.05


def test_another_rules_state_is_refused_by_name_and_changes_nothing(tmp_path):
    model, optimizer = new_run(AdaptiveClip("zclip"))
    train(model, optimizer, range(20))
    with nanscan.CheckpointManager(tmp_path) as manager:
        manager.save(20, model=model, optimizer=optimizer)
        manager.flush()
        other_model, other = new_run(AdaptiveClip("autoclip"))
        train(other_model, other, range(3))
        before = facts(other_model, other)
        message = r"clip: it is that of AdaptiveClip\('zclip'\), this optimizer has AdaptiveClip\('autoclip'\)"
        with pytest.raises(nanscan.CheckpointError, match=message):
            manager.restore(model=other_model, optimizer=other)
        assert facts(other_model, other) == before
        with pytest.warns(nanscan.CheckpointWarning, match=message):
            assert manager.restore(model=other_model, optimizer=other, strict=False).step == 20
    assert bits(other_model.state_dict()) == bits(model.state_dict())


def test_a_state_that_is_not_used_is_said():
    model, optimizer = new_run(AdaptiveClip("zclip"))
    train(model, optimizer, range(20))
    weight, plain = one([0.0, 0.0])
    with pytest.warns(UserWarning, match="holds clip and spikes, which this optimizer does not use"):
        plain.load_guard_state_dict(optimizer.guard_state_dict())
    assert plain.skipped_steps == 1
    step(plain, weight, [3.0, 4.0])
    assert plain.last_report.step == 20


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda s: None, TypeError, r"must be a dict from guard_state_dict\(\), got NoneType"),
        (lambda s: {"state": {}, "param_groups": []}, ValueError, r"its keys are state, param_groups"),
        (lambda s: {**s, "version": 2}, ValueError, r"is of version 2, this nanscan reads version 1"),
        (lambda s: {**s, "clip": [1.0]}, ValueError, r"clip must be a dict or None, got list"),
        (lambda s: {**s, "counters": {**s["counters"], "steps": -1}}, ValueError, r"steps must be an int that is not"),
        (lambda s: {**s, "clip": {"rule": "autoclip"}}, ValueError, r"norms must be a 1-dim float tensor, got nothing"),
        (
            lambda s: {**s, "clip": {**s["clip"], "norms": torch.tensor([1.0, float("nan")])}},
            ValueError,
            r"norms holds numbers that are not finite",
        ),
        (lambda s: {**s, "spikes": {"norm": {}, "loss": {}}}, ValueError, r"count must be an int that is not negative"),
    ],
)
def test_a_wrong_state_is_refused_with_what_is_wrong_and_changes_nothing(change, error, message):
    weight, optimizer = one([0.0, 0.0], clip_norm=AdaptiveClip("autoclip"), on_spike="warn")
    step(optimizer, weight, [3.0, 4.0])
    state = optimizer.guard_state_dict()
    with pytest.raises(error, match=message):
        optimizer.load_guard_state_dict(change(state))
    assert bits(optimizer.guard_state_dict()) == bits(state)
