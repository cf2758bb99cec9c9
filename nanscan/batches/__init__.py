"""Batches, before the model sees them: what is wrong, where, and a loader that looks at each one."""

from nanscan.batches.check import check_batch
from nanscan.batches.loader import BadBatchRecord, CheckedLoader
from nanscan.batches.problem import BadBatch, BatchProblem
from nanscan.batches.spec import BatchSpec, FieldSpec

__all__ = ["BadBatch", "BadBatchRecord", "BatchProblem", "BatchSpec", "CheckedLoader", "FieldSpec", "check_batch"]
