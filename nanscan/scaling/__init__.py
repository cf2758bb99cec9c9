"""Loss scaling for mixed precision: the gradient scaler, and telling a scale that is too high from a true NaN."""

from __future__ import annotations
