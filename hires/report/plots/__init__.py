"""Plots of a report: each file draws one or two and registers them under ``@plot``."""

from hires.report.plots import (
    backends,
    largest_image,
    loss_curve,
    memory_bars,
    precision,
    scaling,
    steps,
    throughput,
    tiles,
    traffic_map,
)

__all__ = [
    "backends",
    "largest_image",
    "loss_curve",
    "memory_bars",
    "precision",
    "scaling",
    "steps",
    "throughput",
    "tiles",
    "traffic_map",
]
