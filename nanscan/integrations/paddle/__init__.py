"""nanscan for PaddlePaddle, without PyTorch: needs paddlepaddle, `pip install 'nanscan[paddle]'`."""

from __future__ import annotations

from nanscan.integrations.versions import require

require("paddle", "3.3", "3.4", extra="paddle")

from nanscan.integrations.paddle.clip import clip_grad_norm_  # noqa: E402
from nanscan.integrations.paddle.guard import GuardedOptimizer, wrap  # noqa: E402

__all__ = ["GuardedOptimizer", "clip_grad_norm_", "wrap"]
