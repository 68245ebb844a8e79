"""Executes a plan's stage on one rank: tiled operators, the pipeline's passes, gradients."""

from hires.parallel import reductions, sample_norms

__all__ = ["reductions", "sample_norms"]
