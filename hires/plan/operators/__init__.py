"""The table of operators: one entry for each ATen operator holds all that hires relies on.

To add an operator: its entry in the file of its family, its kernel in ``hires.parallel`` if its
tiling needs one (a window, statistics or a reduction), and a test.
"""

from hires.plan.operators import pointwise, reductions, views, windowed

__all__ = ["pointwise", "reductions", "views", "windowed"]
