"""The table of operators: one entry for each ATen operator holds all that hires relies on."""

from hires.plan.operators import operator_table

__all__ = ["operator_table"]
