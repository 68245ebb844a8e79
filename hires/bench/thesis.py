"""Predicts the ratios of throughputs that the thesis published, with a model of its machine.

Each ratio, on up to 128 GPUs, is predicted with plans of our own for the same network, image, batch
and number of GPUs, simulated with a roofline model of the device, which is calibrated on one number
that the thesis publishes itself.

Source:
    "The thesis" is the one whose layouts hires implements (MPI4DL); figures and tables are cited
    by its own numbers. Its hardware is :mod:`hires.plan.simulation.published_machine`.
"""

from __future__ import annotations

import functools
import json
import math
from typing import Any

from hires.bench.contestants import bench_data
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.precisions import INT8
from hires.core.published import TABLE_2_1, TABLE_2_1_RUN, numbers_of
from hires.nets.trace import trace_config
from hires.plan.graph import Graph
from hires.plan.partition import layer_starts
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.plan.simulation.costs import Device, Roofline
from hires.plan.simulation.published_machine import CLUSTER, calibrated
from hires.plan.simulation.simulate import simulate


def with_published(row: dict[str, Any], layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns a row with what the text gives for its figure or table of chapter 2.

    A row of another chapter states its own number, or none.
    """
    figure, precision = row["where"].removeprefix("Fig. "), row.get("precision", "fp32")
    if row["where"] == "Table 2.1":
        return {**row, "published": TABLE_2_1[precision][0]}
    tiles = math.prod(layouts.get(row.get("layout", ""), {}).get("parallel", {}).get("tiles", [1]))
    places = {(image, n) for image in (None, row.get("image")) for n in (None, tiles)}
    for one in numbers_of(figure):
        if one.precision == precision and (one.image, one.tiles) in places:
            return {**row, "published": one.value}
    return row


_DATA = bench_data("thesis.yaml")
# What the thesis calls ResNet101 is MPI4DL's network of depth 110 (n=12).
NETWORKS: dict[str, dict[str, Any]] = {"resnet": TABLE_2_1_RUN["model"], **_DATA["networks"]}
LAYOUTS: dict[str, dict[str, Any]] = _DATA["layouts"]
RATIOS: list[dict[str, Any]] = [with_published(row, LAYOUTS) for row in _DATA["ratios"]]
"""Everything that is predicted; ``base`` and ``layout`` are keys of LAYOUTS."""
MEANING: str = _DATA["meaning"]
"""How to read the table."""
BOUND = 1.3
"""Factor between predicted and published above which a row is a question."""

# Table 2.1: "ResNet101" on one A100, inference of 256x256 images, batches of 64.
CALIBRATION_IMAGE, CALIBRATION_BATCH = TABLE_2_1_RUN["image"], TABLE_2_1_RUN["batch"]
EAGER: dict[str, Any] = {"engine": {"fuse": "off"}}
"""The thesis measured PyTorch in eager mode, which joins no operators."""
# A plan of int8 needs scales; `hires sweep experiment=fig2.4` predicts it.
PUBLISHED_IMG_PER_S = {name: row[1] for name, row in TABLE_2_1.items() if name != INT8}


def predict(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row of RATIOS as images per second, predicted and published.

    Each of its hypotheses is predicted as the row with the keys that the hypothesis changes.
    """
    asked = [{**row, **changed} for changed in row.get("hypotheses", ())]
    return {**_predicted(row), "hypotheses": [_predicted(hypothesis) for hypothesis in asked]}


def factor_off(row: dict[str, Any]) -> float:
    """Returns by what factor a predicted row and the published ratio differ, 1 or more."""
    predicted, published = row["predicted"], row["published"]
    return 1.0 if published is None else max(predicted / published, published / predicted)


def _predicted(row: dict[str, Any]) -> dict[str, Any]:
    task = row.get("task", "train")
    sides = {side: _side(row, side, task) for side in ("base", "layout")}
    return {
        **{key: row[key] for key in ("what", "where", "image", "batch")},
        "model": row["network"],
        "task": task,
        "precision": sides["layout"]["precision"],
        **sides,
        "predicted": sides["layout"]["images_per_s"] / sides["base"]["images_per_s"],
        "published": row.get("published"),
        "says": row.get("says", row["reading"]),
    }


def _side(row: dict[str, Any], side: str, task: str) -> dict[str, Any]:
    """Returns one side of a ratio, simulated; ``base_KEY`` of a row is the base's own ``KEY``."""

    def own(key: str, default: Any = None) -> Any:
        both = row.get(key, default)
        return row.get(f"base_{key}", both) if side == "base" else both

    layout, batch, precision = LAYOUTS[row[side]], own("batch"), own("precision", "fp32")
    sizes = {"model": NETWORKS[row["network"]], "image": row["image"], "batch": batch, **EAGER}
    _, plan = planned(layout, task, precision, **sizes)
    step = simulate(plan, Roofline(plan, device(precision)), CLUSTER)
    return {
        "name": layout["name"],
        "parallel": layout["parallel"],
        "precision": precision,
        "gpus": plan.world,
        "step_s": step.step_s,
        "images_per_s": batch / step.step_s,
        "bubble": step.bubble,
    }


@functools.cache
def device(precision: str) -> Device:
    """Returns the device on which the model infers as fast as the thesis measured."""
    plan = calibration_plan(precision)
    return calibrated(plan, CALIBRATION_BATCH, PUBLISHED_IMG_PER_S[precision])


def calibration_plan(precision: str) -> Plan:
    """Returns the plan of Table 2.1."""
    sizes = {"image": CALIBRATION_IMAGE, "batch": CALIBRATION_BATCH, **EAGER}
    return planned(LAYOUTS["single"], "infer", precision, model=NETWORKS["resnet"], **sizes)[1]


def planned(
    layout: dict[str, Any], task: str, precision: str, **keys: Any
) -> tuple[RunConfig, Plan]:
    """Returns config and plan of a layout for a model, image and batch, and other keys."""
    values = {**keys, "task": {"name": task}, "precision": {"name": precision}}
    config = from_dict({**values, "parallel": layout["parallel"]})
    samples = config.batch // config.parallel.pieces
    graph = _graph(json.dumps({**values, "batch": samples}))
    cut = layout.get("cut")
    if cut == "head":
        config.parallel.balance = [len(layer_starts(graph)) - 1, 1]
    elif cut == "modules":
        config.parallel.balance = equal_modules(graph, config.parallel.stages)
    plan = make_plan(config, graph)
    plan.require_ok()
    return config, plan


def equal_modules(graph: Graph, num_stages: int) -> list[int]:
    """Returns the layers of each stage where every stage has as many modules of the network.

    It is the default cut of MPI4DL: blocks of a ResNet, cells of an AmoebaNet; the last stage has
    the rest.
    """
    modules = [module_of(graph, start) for start in layer_starts(graph)]
    order = list(dict.fromkeys(modules))
    each = len(order) // num_stages
    stages = [min(order.index(module) // each, num_stages - 1) for module in modules]
    return [stages.count(stage) for stage in range(num_stages)]


def module_of(graph: Graph, start: int) -> str:
    """Returns a layer's path up to its first number: ``cells.3`` of ``cells.3.operations.1.0``."""
    parts = graph.nodes[start].layer.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:1])


@functools.cache
def _graph(config: str) -> Graph:
    """Returns the graph of a config in JSON; networks are traced once."""
    return trace_config(from_dict(json.loads(config)))
