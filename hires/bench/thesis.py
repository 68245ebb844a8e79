"""Predicts the ratios of throughputs that the thesis published, with a model of its machine.

The published numbers are ratios of throughputs on up to 128 GPUs. Each is predicted with plans of
our own for the same network, image, batch and number of GPUs, by simulating them with a roofline
model of the device. The device is calibrated on one number that the thesis publishes itself.

Source:
    "The thesis" is the one whose layouts hires implements (MPI4DL); figures and tables are cited
    by its own numbers. Its hardware (sections 2.4 and 3.5): NVIDIA A100 40 GB, two in a node,
    nodes connected by Mellanox HDR InfiniBand, 200 Gbit/s.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from hires.bench.contestants import bench_data
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import PlanError
from hires.nets.trace import trace_config
from hires.plan.graph import Graph
from hires.plan.partition import layer_starts
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.plan.simulation.costs import Device, Roofline
from hires.plan.simulation.simulate import Link, Network, Simulation, simulate

_DATA = bench_data("thesis.yaml")
NETWORKS: dict[str, dict[str, Any]] = _DATA["networks"]

# Table 2.1: ResNet-101 on one A100, inference of 256x256 images, batches of 64.
CALIBRATION_IMAGE, CALIBRATION_BATCH = 256, 64
PUBLISHED_IMG_PER_S = {"fp32": 145.22, "bf16": 226.12}

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

CANNOT = """\
Such a model shows which ratios follow from the schedule, the volume of computation and the messages
alone. It has no out-of-memory, no cuDNN choice of algorithm, no slow small kernels of deep layers
on small tiles, no contention beyond one message per link, and nothing of how the thesis's code
stages and synchronises its halos and sends. Where a published ratio is far from the predicted one,
the cause lies there, or in what the text leaves open (network size, GPUs, cuts, images per copy),
and not in the layout; where the two agree, it may still be chance."""


@dataclass(frozen=True)
class ThesisLayout:
    """One side of a ratio."""

    name: str
    parallel: dict[str, Any]
    only_head: bool = False
    """Whether the last of two stages is the classifier alone (thesis Figure 3.9)."""


@dataclass(frozen=True)
class ThesisRatio:
    """A ratio of throughputs of two layouts."""

    what: str
    where: str
    network: str
    """A key of :data:`NETWORKS`."""
    image: int
    batch: int
    base: ThesisLayout
    layout: ThesisLayout
    published: float | None = None
    """None: the thesis only mentions the layouts."""
    task: str = "train"
    precision: str = "fp32"
    base_batch: int | None = None
    """Images a step of the other side, if not as many."""
    note: str = ""


def thesis_ratios() -> list[ThesisRatio]:
    """Returns everything that is predicted, as ``thesis.yaml`` lists it."""
    layouts = {name: ThesisLayout(**layout) for name, layout in _DATA["layouts"].items()}
    return [
        ThesisRatio(**{**row, **{side: layouts[row[side]] for side in ("base", "layout")}})
        for row in _DATA["ratios"]
    ]


@dataclass
class Predictor:
    """Predicts rows; networks are traced and the device is calibrated once."""

    graphs: dict[str, Graph] = field(default_factory=dict)
    devices: dict[str, Device] = field(default_factory=dict)

    def predict(self, row: ThesisRatio) -> dict[str, Any]:
        """Returns a row's ratio of images per second, predicted and published.

        Raises:
            PlanError: a layout cannot cut the network.
        """
        base_batch = row.base_batch or row.batch
        base_plan, base = self._simulated(row, row.base, base_batch)
        plan, found = self._simulated(row, row.layout, row.batch)
        ratio = (row.batch / found.step_s) / (base_batch / base.step_s)
        return {
            "what": row.what,
            "where": row.where,
            "model": row.network,
            "image": row.image,
            "batch": row.batch,
            "task": row.task,
            "precision": row.precision,
            "base": _side(row.base, base_plan, base, base_batch),
            "layout": _side(row.layout, plan, found, row.batch),
            "predicted": ratio,
            "published": row.published,
            "note": row.note,
        }

    def device(self, precision: str) -> Device:
        """Returns the device on which the model infers as fast as the thesis measured.

        Bisection on the speed of the arithmetic, since memory and launches take time of their own.
        """
        if precision not in self.devices:
            plan = self.calibration_plan(precision)
            wanted_s = CALIBRATION_BATCH / PUBLISHED_IMG_PER_S[precision]
            low, high = 1e9, 1e18
            for _ in range(BISECTIONS):
                middle = (low * high) ** 0.5
                slow = simulate(plan, Roofline(plan, _device(middle))).step_s > wanted_s
                low, high = (middle, high) if slow else (low, middle)
            self.devices[precision] = _device(high)
        return self.devices[precision]

    def calibration_plan(self, precision: str) -> Plan:
        """Returns the plan of Table 2.1."""
        batch = CALIBRATION_BATCH
        config = _config(NETWORKS["resnet"], CALIBRATION_IMAGE, batch, "infer", precision, {})
        return make_plan(config, self._graph(config))

    def _simulated(
        self, row: ThesisRatio, layout: ThesisLayout, batch: int
    ) -> tuple[Plan, Simulation]:
        """Returns one side's plan and its simulated step."""
        parallel = dict(layout.parallel)
        config = _config(NETWORKS[row.network], row.image, batch, row.task, row.precision, parallel)
        graph = self._graph(config)
        if layout.only_head:
            parallel["balance"] = [len(layer_starts(graph)) - 1, 1]
            config = _config(
                NETWORKS[row.network], row.image, batch, row.task, row.precision, parallel
            )
        plan = make_plan(config, graph)
        if not plan.ok:
            errors = [finding.text for finding in plan.findings if finding.severity == "error"]
            raise PlanError(f"{row.what}, {layout.name}: {'; '.join(errors)}")
        costs = Roofline(plan, self.device(row.precision))
        return plan, simulate(plan, costs, CLUSTER)

    def _graph(self, config: RunConfig) -> Graph:
        """Returns the network of a config, traced for one microbatch."""
        samples = config.batch // config.parallel.pieces
        key = json.dumps(
            [dataclasses.asdict(config.model), config.image, samples, config.task.name]
        )
        if key not in self.graphs:
            self.graphs[key] = trace_config(config)
        return self.graphs[key]


def _device(flops_per_s: float) -> Device:
    """Returns an A100 of some speed."""
    return Device(flops_per_s, MEMORY_BYTES_PER_S, LAUNCH_S)


def _config(
    model: dict[str, Any],
    image: int,
    batch: int,
    task: str,
    precision: str,
    parallel: dict[str, Any],
) -> RunConfig:
    """Returns the config of one side."""
    return from_dict(
        {
            "model": model,
            "image": image,
            "batch": batch,
            "task": {"name": task},
            "precision": {"name": precision},
            "parallel": parallel,
        }
    )


def _side(layout: ThesisLayout, plan: Plan, found: Simulation, batch: int) -> dict[str, Any]:
    """Returns one side of a ratio as plain values."""
    return {
        "name": layout.name,
        "parallel": layout.parallel,
        "gpus": plan.world,
        "step_s": found.step_s,
        "images_per_s": batch / found.step_s,
        "bubble": found.bubble,
    }
