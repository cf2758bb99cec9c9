"""A default device (`torch.set_default_device`, `with torch.device`) is for the user's tensors, not for our own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import nanscan
from tests.guarded import NAN

_MAKERS = frozenset(
    {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros"}
)


def made_anywhere(source: str) -> list[int]:
    """The lines of calls such as `torch.empty(...)` that don't say on which device."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _MAKERS
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]


def test_every_tensor_of_its_own_says_its_device():
    """On a default device "cuda" a pinned buffer without one is an error, and a number costs a wait for the GPU."""
    assert made_anywhere("torch.empty(3, pin_memory=True)\ntorch.zeros(2, device='cpu')") == [1]
    found = {
        str(path): lines
        for path in Path(nanscan.__file__).parent.rglob("*.py")
        if "preflight_checks" not in path.parts and "demo" not in path.parts and "bench" not in path.parts
        if (lines := made_anywhere(path.read_text()))
    }
    assert found == {}


@pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")
@pytest.mark.parametrize("clip", [1.0, nanscan.AdaptiveClip("zclip"), nanscan.AdaptiveClip("autoclip")], ids=str)
def test_steps_and_checkpoints_work_whatever_the_default_device_is(clip, tmp_path):
    model = nn.Linear(2, 1)
    optimizer = nanscan.wrap(torch.optim.AdamW(model.parameters(), fused=True), model, clip_norm=clip, on_spike="warn")
    good, bad = torch.ones(3, 2), torch.full((3, 2), NAN)
    with torch.device("meta"), nanscan.CheckpointManager(tmp_path, background=False) as manager:
        for inputs in (good, bad, good):
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.observe(loss.item())
            optimizer.step()
        assert optimizer.skipped_steps == 1
        assert nanscan.clip_grad_norm_(model.parameters(), 0.1, norm_type=3).device.type == "cpu"
        manager.save(3, model=model, optimizer=optimizer)
        assert manager.restore(model=model, optimizer=optimizer).step == 3
    assert nanscan.scan(model).finite
