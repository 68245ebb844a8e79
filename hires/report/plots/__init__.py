"""Plots of a report: each file draws one or more and registers them under ``@plot``."""

from hires.report.plots import (  # noqa: F401
    choice_front,
    confusion_maps,
    learning_curve,
    loss_curves,
    memory_bars,
    message_costs,
    predicted_maps,
    rank_maps,
    steps,
    throughput,
)
