"""The state of another kind of optimizer: refused where it can't be used, noted where it can."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from nanscan import CheckpointError, CheckpointWarning
from nanscan.matching import load_optimizer_state


def stepped(kind: type[torch.optim.Optimizer], **options: float) -> torch.optim.Optimizer:
    weight = nn.Parameter(torch.ones(3))
    optimizer = kind([weight], lr=0.1, **options)  # type: ignore[call-arg]
    weight.sum().backward()
    optimizer.step()
    return optimizer


def test_a_state_that_lacks_what_the_optimizer_needs_is_refused_and_nothing_changes() -> None:
    optimizer = stepped(torch.optim.AdamW)
    before = [dict(state) for state in optimizer.state.values()]
    with pytest.raises(CheckpointError, match="AdamW can't take this state.*step.*Nothing was loaded"):
        load_optimizer_state(optimizer, stepped(torch.optim.SGD, momentum=0.9).state_dict())
    assert [dict(state) for state in optimizer.state.values()] == before
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999) and "momentum" not in optimizer.param_groups[0]


def test_options_of_another_kind_of_optimizer_are_warned_about() -> None:
    with pytest.warns(CheckpointWarning, match="another kind of optimizer: the checkpoint has .*betas.* no .*momentum"):
        load_optimizer_state(stepped(torch.optim.SGD, momentum=0.9), stepped(torch.optim.AdamW).state_dict())


def test_options_that_an_older_torch_or_a_scheduler_makes_the_difference_in_are_no_news() -> None:
    saved = stepped(torch.optim.AdamW).state_dict()
    del saved["param_groups"][0]["decoupled_weight_decay"]
    saved["param_groups"][0]["initial_lr"] = 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_optimizer_state(stepped(torch.optim.AdamW), saved)
