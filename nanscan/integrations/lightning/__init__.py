"""nanscan in Lightning: `NanScanCallback` guards every optimizer of a `Trainer`; needs `nanscan[lightning]`."""

from nanscan.integrations.lightning.callback import NanScanCallback

__all__ = ["NanScanCallback"]
