"""Models the GPUs on which the thesis on MPI4DL measured, so that its numbers can be predicted.

The speed of the arithmetic is the one free number of the model. It is chosen so that the network of
Table 2.1 infers as fast as the table says, in every precision.

Source:
    Sections 2.4 and 3.5 of the thesis: NVIDIA A100 40 GB, two in a node, nodes connected by
    Mellanox HDR InfiniBand, 200 Gbit/s.
"""

from __future__ import annotations

import dataclasses

from hires.core.config.run_config import RunConfig
from hires.core.errors import PlanError
from hires.core.units import GIB
from hires.plan.hardware import CUDA, GLOO
from hires.plan.plan import Plan
from hires.plan.simulation.costs import Device, Roofline
from hires.plan.simulation.simulate import Link, Network, simulate

GPU_BYTES = 40 * GIB
MEMORY_BYTES_PER_S = 0.8 * 1555e9
"""An A100 40 GB has 1555 GB/s (data sheet); element-wise kernels reach some four fifths."""
LAUNCH_S = 10e-6
"""Of one operation of PyTorch in eager mode."""
CLUSTER = Network(
    # NVLink 3 between two A100: 300 GB/s each way; 10 us for a message of a GPU-aware MPI. The text
    # does not say how the two are connected.
    near=Link(10e-6, 0.8 * 300e9),
    # HDR: 25 GB/s each way; 20 us through the host adapter, with the copy's synchronisation.
    far=Link(20e-6, 0.9 * 25e9),
    ranks_per_node=2,
)
BISECTIONS = 60
"""Halvings of the interval that holds the device's speed; far below a float's precision."""
SLOWEST, FASTEST = 1e9, 1e18
"""Ends of that interval, in FLOP/s."""


def calibrated(plan: Plan, images: int, images_per_s: float) -> Device:
    """Returns the device on which a step of ``images`` is as fast as measured.

    Bisection on the speed of the arithmetic, since memory and launches take time of their own.
    PlanError: reading and writing its maps alone takes longer.
    """
    wanted_s = images / images_per_s
    low, high = SLOWEST, FASTEST
    if simulate(plan, Roofline(plan, _device(high))).step_s > wanted_s:
        raise PlanError(
            f"no arithmetic computes {images_per_s:g} images/s of this plan: its memory takes "
            f"longer than {wanted_s:g} s; use a plan of fewer or smaller maps"
        )
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        slow = simulate(plan, Roofline(plan, _device(middle))).step_s > wanted_s
        low, high = (middle, high) if slow else (low, middle)
    return _device(high)


def on_published_machine(config: RunConfig) -> RunConfig:
    """Returns the config of a run with one such GPU for each rank.

    Messages go through the host, as those of MPI do; NCCL would need buffers on each GPU.
    """
    ranks = config.parallel.num_ranks
    gpus = dataclasses.replace(config.cluster, gpus=ranks, gpu_memory=f"{GPU_BYTES // GIB}GiB")
    comm = dataclasses.replace(config.comm, backend=GLOO)
    return dataclasses.replace(config, device=CUDA, cluster=gpus, comm=comm)


def _device(flops_per_s: float) -> Device:
    return Device(flops_per_s, MEMORY_BYTES_PER_S, LAUNCH_S)
