"""Checkpoints that several ranks write and read together, on torch.distributed.checkpoint."""
