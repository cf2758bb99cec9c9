"""The demo: one real fault, one seed, trained twice: in plain PyTorch and guarded by nanscan.

The data are the 1,797 handwritten digits that scikit-learn ships. Nothing is planted: the loss averages the
cross-entropy per class and then over the classes, and now and then a batch holds no sample of some class: 0/0.
"""

from nanscan.demo.cost import Cost, measure_cost
from nanscan.demo.data import Digits, load_digits
from nanscan.demo.run import DemoResult, RunResult, run_demo

__all__ = ["Cost", "DemoResult", "Digits", "RunResult", "load_digits", "measure_cost", "run_demo"]
