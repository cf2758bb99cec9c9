"""What usually causes a NaN or Inf in an op, and what to do about it: a table of rows, by subject."""

from nanscan.origin.hints.table import hint_for, hint_table

__all__ = ["hint_for", "hint_table"]
