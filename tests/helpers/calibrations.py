"""A calibration of a machine of three cores that was never measured."""

from __future__ import annotations

from hires.plan.operators.operator_facts import BATCH_NORM, CONV
from hires.plan.simulation.machine_calibration import (
    Calibration,
    Links,
    Machine,
    Overheads,
    Sample,
)
from hires.plan.simulation.node_work import NodeWork


def conv_work(pixels: float, back: bool = False) -> NodeWork:
    """Returns the work of a 3x3 convolution of 8 channels to 8."""
    work = pixels * 2 * 9 * 64
    sizes = pixels, 8, 8, 9, 1, 1
    return NodeWork("conv2d", CONV, back, True, "float32", work, pixels * 64, sizes)


def norm_work(pixels: float) -> NodeWork:
    """Returns the work of a batch norm of 8 channels."""
    sizes = 8 * pixels, 8
    return NodeWork("batch_norm", BATCH_NORM, False, True, "float32", 0, pixels * 64, sizes)


CALIBRATION = Calibration(
    machine=Machine("a cpu", 3, "2.13", "0.1"),
    time="2031-02-03T04:05:06+00:00",
    samples=[
        Sample(conv_work(2**10), 1, 1e-3),
        Sample(conv_work(2**14), 1, 12e-3),
        Sample(conv_work(2**10, back=True), 1, 3e-3),
        Sample(norm_work(2**12), 1, 1e-3),
        Sample(norm_work(2**12), 3, 2e-3),
    ],
    flops_per_s={"float32": 50e9},
    bytes_per_s=10e9,
    busy_bytes_per_s=5e9,
    links=Links(1e-4, 1e9, 2e-4, 0.5e9),
    overheads=Overheads(1e-5, 1e-3, 1e-3, 5e9),
)
