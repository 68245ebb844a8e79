"""Measures what cuDNN holds beside the maps of a convolution, in both orders of their dimensions.

    one copy of input and output      cuDNN brings the maps into another order: "copies"
    9 x 64 / (64 + 16) = 7.2 of it    it writes the 3x3 windows as columns: "columns"

The convolution is that of MPI4DL's widest maps, which decides how its memory is explained
(:mod:`hires.bench.thesis_memory`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

WIDTH_IN, WIDTH, SIDE = 64, 16, 1024


def workspace_share(in_hires: bool, gpu: Any = torch.cuda, device: str = "cuda") -> float:
    """Returns the workspace of one 3x3 convolution in fp32 as a share of its input and output.

    Maps and cuDNN's options are those of hires, or those of plain torch. ``gpu`` has the counters
    of the device's memory.
    """
    order = torch.channels_last if in_hires else torch.contiguous_format
    # As an engine's device sets them, and torch's defaults.
    options = {"deterministic": in_hires, "allow_tf32": not in_hires}
    with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, **options):
        x = torch.ones(1, WIDTH_IN, SIDE, SIDE, device=device).contiguous(memory_format=order)
        weight = torch.ones(WIDTH, WIDTH_IN, 3, 3, device=device).contiguous(memory_format=order)
        F.conv2d(x, weight, padding=1)  # cuDNN chooses its algorithm, and loads kernels
        gpu.synchronize()
        gpu.reset_peak_memory_stats()
        before = gpu.memory_allocated()
        made = F.conv2d(x, weight, padding=1)
        gpu.synchronize()
        taken = gpu.max_memory_allocated() - before - made.nbytes
    return float(taken / (x.nbytes + made.nbytes))
