"""nanscan for PaddlePaddle, without PyTorch: needs paddlepaddle, `pip install 'nanscan[paddle]'`."""

from __future__ import annotations

from nanscan.integrations.versions import require

require("paddle", "3.3", "3.4", extra="paddle")
