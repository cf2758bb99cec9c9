"""A guard that decides alone although there are other processes: said once, before their weights can drift apart."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from nanscan import messages

__all__ = ["note_alone"]


def note_alone(guard: Any) -> None:
    """Warn once where a process group exists and nothing has told the guard whether its ranks train one model.

    Args:
        guard: the guarded optimizer; called where a loss is observed, a step is bad or a run goes back, which ranks may
            see differently.
    """
    if guard._agreement is not None or guard._group_given is not None or guard._sharded or guard._alone_said:
        return
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1:
        guard._alone_said = True
        messages.warn(
            f"nanscan: this process decides about its steps alone, although there are {ranks} ranks. If they train one "
            "model, what only one of them sees makes it skip a step that the others take, or go back alone: weights "
            "drift apart. Call nanscan.wrap(optimizer, model) with a model in DistributedDataParallel, or give "
            "process_group=True. Ranks that train on their own: process_group=False. (This is said once.)",
            UserWarning,
        )
