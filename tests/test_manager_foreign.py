"""Files that another program wrote, given to `restore(path=…)`; models that have nothing to save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import nanscan
from nanscan import CheckpointManager, CheckpointWarning, CorruptCheckpoint


@pytest.mark.parametrize("name", ["global_step", "global_steps", "iteration", "iter"])
@pytest.mark.filterwarnings("ignore::nanscan.CheckpointWarning")
def test_the_step_of_another_programs_file_is_taken_under_its_usual_names(tmp_path: Path, name: str) -> None:
    model = nn.Linear(2, 1)
    torch.save({"state_dict": model.state_dict(), name: 700, "epoch": 3}, tmp_path / "theirs.ckpt")
    restored = CheckpointManager(tmp_path / "own").restore(model=model, path=tmp_path / "theirs.ckpt")
    assert restored is not None
    assert (restored.step, restored.epoch, restored.extra) == (700, 3, {name: 700})


def test_a_file_without_a_known_part_is_told_by_its_own_name_with_what_it_has(tmp_path: Path) -> None:
    source, model, path = nn.Linear(2, 1), nn.Linear(2, 1), tmp_path / "theirs.ckpt"
    torch.save({"teacher": source.state_dict(), "loss": 0.5}, path)
    with pytest.raises(CorruptCheckpoint) as caught:
        CheckpointManager(tmp_path / "own").restore(model=model, path=path)
    said = str(caught.value)
    assert str(path) in said and "'teacher', 'loss'" in said and str(tmp_path / "own") not in said
    advice = "model.load_state_dict(nanscan.load(path)['teacher'])"
    assert advice in said
    eval(advice, {"model": model, "nanscan": nanscan, "path": path})
    assert torch.equal(model.weight, source.weight)


@pytest.mark.parametrize(
    ("model", "words"),
    [(nn.Linear(2, 2, device="meta"), "on the meta device"), (nn.LazyLinear(2), "give the model one batch")],
    ids=["meta", "lazy"],
)
@pytest.mark.parametrize("background", [False, True])
def test_a_model_without_values_is_refused_by_name(
    tmp_path: Path, model: nn.Module, words: str, background: bool
) -> None:
    with CheckpointManager(tmp_path, background=background) as manager:
        with pytest.raises(nanscan.CheckpointError, match=rf"model\['weight'\].*{words}"):
            manager.save(1, model=model)
        assert manager.checkpoints() == []


def test_a_file_that_was_saved_after_the_run_had_diverged_is_passed_over_for_the_good_one(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model.register_buffer("mask", torch.tensor([0.0, float("-inf")]))  # of no concern
    good = model.weight.detach().clone()
    for step in (1, 2, 3):
        if step == 2:
            optimizer.state[model.bias]["exp_avg"].fill_(float("nan"))
        if step == 3:
            nn.init.constant_(model.weight, float("nan"))
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, tmp_path / f"step-{step:08d}.pt")
    with pytest.warns(CheckpointWarning) as said:
        restored = CheckpointManager(tmp_path).restore(model=model, optimizer=optimizer)
    assert restored is not None and restored.step == 1 and torch.equal(model.weight, good)
    assert [item.path.name for item in restored.passed_over] == ["step-00000003.pt", "step-00000002.pt"]
    assert 'model["weight"]' in restored.passed_over[0].reason and "exp_avg" in restored.passed_over[1].reason
    assert len([one for one in said if "is passed over" in str(one.message)]) == 2
    with pytest.warns(CheckpointWarning, match="holds NaN, and is restored as it was named"):
        CheckpointManager(tmp_path).restore(model=model, path=tmp_path / "step-00000003.pt")
    again = CheckpointManager(tmp_path, check_finite=False).restore(model=model, optimizer=optimizer)
    assert again is not None and again.step == 3
