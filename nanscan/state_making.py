"""Steps that are none: torch.distributed.checkpoint takes one with zeros, so that an optimizer has a state to load."""

from __future__ import annotations

import sys

import torch

__all__ = ["only_makes_state"]

_NAME = "_init_optim_state"
_NEAREST = 8  # frames: a scheduler's wrapper and torch's hooks may lie between


def only_makes_state(optimizer: torch.optim.Optimizer) -> bool:
    """True if the present `optimizer.step()` was called by `get_state_dict` or `set_state_dict` of PyTorch.

    They give an optimizer without a state gradients of 0 and a learning rate of 0 and let it step once: no step of the
    run, whose weights do not move. Only an optimizer without a state costs a look at the stack.

    >>> only_makes_state(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    False
    """
    if optimizer.state:
        return False
    frame = sys._getframe(1).f_back
    for _ in range(_NEAREST):
        if frame is None:
            return False
        if frame.f_code.co_name == _NAME and frame.f_globals.get("__name__", "").startswith("torch."):
            return True
        frame = frame.f_back
    return False
