"""Plots of a report: each file draws one or more and registers them under ``@plot``."""

from hires.report.plots import (  # noqa: F401
    backends,
    loss_curves,
    memory_bars,
    steps,
    throughput,
    tiles,
    traffic_map,
)
