"""Executes a plan's stage on one rank: tiled operators, the pipeline's passes, gradients."""

from hires.parallel import batch_norms, image_softmax, reductions, sample_norms

__all__ = ["batch_norms", "image_softmax", "reductions", "sample_norms"]
