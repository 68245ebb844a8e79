"""Shows how fast the machine is at the moment: the steps of one network, as plain torch runs them.

Cores of a shared machine are slower at one moment than at another. What is measured beside these
steps is divided by how much longer they take than when the machine was calibrated.
"""

from __future__ import annotations

import time
from typing import Any

from hires.bench.contestants import bench_data
from hires.bench.runners import ModuleSteps, plain_module
from hires.core.config.run_config import RunConfig, from_dict
from hires.engine.loader import whole_microbatches

CHAINS: list[dict[str, Any]] = bench_data("calibration.yaml")["chains"]
PACE = 2
"""Of the networks of a calibration: its maps are larger than caches, and its kernels usual."""


def pace_steps() -> ModuleSteps:
    """Returns the steps that show the pace; a rank runs them by itself."""
    config = chain_config(CHAINS[PACE], "fp32", "train")
    return ModuleSteps(plain_module(config), config, whole_microbatches(config, 0))


class Pace:
    """Times these steps by the clock of this thread."""

    def __init__(self) -> None:
        self.steps = pace_steps()
        self.steps.step()  # prepares kernels

    def step(self) -> float:
        """Runs one step and returns its seconds."""
        begin_s = time.thread_time()
        self.steps.step()
        taken_s = time.thread_time() - begin_s
        self.steps.tidy()
        return taken_s


def chain_config(chain: dict[str, Any], dtype: str, task: str) -> RunConfig:
    """Returns the config of a network of the calibration on one rank."""
    target = "hires.bench.calibration_nets:Chain"
    words = {"words": chain["words"], "classes": 10}
    return from_dict(
        {
            "device": "cpu",
            "image": [chain["image"]] * 2,
            "batch": chain["batch"],
            "steps": 1,
            "model": {"name": "custom", "target": target, "args": words, "classes": 10},
            "data": {"classes": 10, "prefetch": 0},
            "task": {"name": task},
            "precision": {"name": dtype},
            "optimizer": {"lr": 0.0},
            "measure": {"warmup": 0},
        }
    )
