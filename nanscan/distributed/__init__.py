"""One verdict for all ranks: which group decides, what each rank holds, and what they tell each other."""

from nanscan.distributed.agreement import Agreement
from nanscan.distributed.groups import agreement_over, numbered

__all__ = ["Agreement", "agreement_over", "numbered"]
