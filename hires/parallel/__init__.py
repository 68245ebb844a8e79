"""Executes a plan's stage on one rank: tiled operators, the pipeline's passes, gradients."""

from hires.parallel import image_softmax, norms, reductions

__all__ = ["image_softmax", "norms", "reductions"]
