"""Executes a plan's stage on one rank: tiled operators, the pipeline's passes, gradients."""
