"""The sections of ``benchmarks/gpu_check.py``: each is one function that runs in a process of its own, on a card."""
