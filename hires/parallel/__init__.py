"""Executes a plan's stage on one rank: tiled operators, the pipeline's passes, gradients."""

from hires.parallel import image_softmax, reductions, sample_norms

__all__ = ["image_softmax", "reductions", "sample_norms"]
