"""What pickling an object would do: every place that can't be saved, loaded or kept, and why."""

from nanscan.pickling.drop import drop_all, drop_unpicklable
from nanscan.pickling.find import find_unpicklable
from nanscan.pickling.problem import PickleProblem

__all__ = ["PickleProblem", "drop_all", "drop_unpicklable", "find_unpicklable"]
