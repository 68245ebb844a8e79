"""Compares engines of TensorRT on a GPU with hires' own kernels.

fp16 and bf16 are compared with one process in float64, within the bound of the precision. In int8
bits differ, so the engine of a whole network is compared with hires' int8 kernels: it may
differ from these by no more than these differ from the network in float. Of stages the losses of
all images are compared in the same way, in place of the outputs.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Sequence
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from hires.bench.gpu_runs import FAMILIES, NotRunError, Runs
from hires.core.config.run_config import EngineConfig, RunConfig
from hires.core.precisions import INT8
from hires.core.ranks.compilers import ENGINE_PACKAGES, TENSORRT
from hires.core.store import file_names, reading
from hires.core.store.rundir import RunDir
from hires.engine.build import RankEngine, named_tensors, placement, whole_model
from hires.engine.derived_tensors import DerivedTensors
from hires.engine.device import open_device, to_host
from hires.engine.footprint import traced
from hires.engine.loader import image_dtype, whole_microbatches
from hires.engine.region_calls import RegionCall, seen
from hires.engine.region_engines import EngineBuild, build_engines
from hires.engine.verify_int8 import alone
from hires.parallel.stage import StageModule
from hires.plan.calibrated_values import params_digest
from hires.plan.graph import INPUT
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.plan.regions import regions_of
from hires.quant.affine import affine_of
from hires.quant.scales import Scales, write_scales

PRECISIONS = ("fp16", "bf16", INT8)
LAYOUTS = ("single", "lp", "pp", "gems")
INFERENCE = {"task": {"name": "infer"}}
ENGINES = {**INFERENCE, "engine": {"compile": TENSORRT}}
EVALUATION = {"task": {"name": "evaluate"}, "steps": 4}
"""One pass over the images of ``BASE``."""


def require_library(device: str) -> None:
    """NotRunError: there is no GPU, or no Torch-TensorRT."""
    if device != "cuda":
        raise NotRunError("no CUDA")
    lacks = [name for name in ENGINE_PACKAGES if util.find_spec(name) is None]
    if lacks:
        raise NotRunError(f"{' and '.join(lacks)} not installed: pip install 'hires[tensorrt]'")


def engines_of_layout(runs: Runs, layout: str, precision: str) -> tuple[bool, str]:
    """Returns whether a layout's engines are exact, and how many were built and read."""
    require_library(runs.device)
    keys: dict[str, Any] = {"precision": {"name": precision}}
    if precision == INT8:
        keys["quant"] = {"scales": str(observed_scales(runs))}
    config = runs.config("tensorrt", FAMILIES[layout], ENGINES, keys)
    if precision == INT8 and layout == "single":
        return compared_numbers(config, runs.config("float", INFERENCE, _in("fp32")))
    if precision == INT8:
        run = runs.run(runs.config("tensorrt", FAMILIES[layout], ENGINES, keys, EVALUATION))
        good, text = as_near(sample_losses(run), *_references(runs))
    else:
        run = runs.freeze(config)
        good, text = runs.compared(run)
    failed, counted = _engines(run)
    return good and not failed, f"{text}; {counted}"


def observed_scales(runs: Runs, *changes: dict[str, Any]) -> Path:
    """Writes the scales of the checks' network, from the ranges of its values for one batch."""
    config = runs.config("ranges", INFERENCE, _in("fp32"), {"device": "cpu"}, *changes)
    return write_observed_scales(config, runs.folder / file_names.SCALES)


def write_observed_scales(config: RunConfig, path: Path) -> Path:
    """Writes the scales of a config's network, from the ranges of its values for its first batch.

    The config is of fp32, on the CPU; its images may be smaller than those that are computed then.
    """
    ranges: dict[str, tuple[float, float]] = {}

    def see(name: str, value: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point():
            ranges[name] = (float(value.min()), float(value.max()))

    plan, _ = _outputs(config, see)
    values = {name: affine_of(*ends) for name, ends in ranges.items()}
    facts = params_digest(plan.graph), "min_max", config.batch
    write_scales(path, Scales(*facts, values, ranges))
    return path


def sample_losses(run: RunDir) -> list[float]:
    """Returns the loss of each image of an evaluation that has ended."""
    file = run.attempt_dir / file_names.EVALUATION
    return list(reading.read_json(file)["samples"]["loss"])


def as_near(
    made: Sequence[float], ours: Sequence[float], exact: Sequence[float]
) -> tuple[bool, str]:
    """Returns whether losses are as near to those of hires' int8 as these to those in fp32."""
    off, noise = (
        statistics.fmean(abs(a - b) for a, b in zip(*pair, strict=True))
        for pair in ((made, ours), (ours, exact))
    )
    text = (
        f"losses of engines differ by {off:.2e} from those of hires' int8, and these by "
        f"{noise:.2e} from those in fp32, on average"
    )
    return off <= noise, text


def compared_numbers(
    config: RunConfig, real: RunConfig, folder: Path | None = None, library: Any = None
) -> tuple[bool, str]:
    """Returns whether the engines of one rank are as near to hires' int8 as that is to float.

    ``real`` is the config of the network in fp32. ``folder`` and ``library`` are those of
    :func:`hires.engine.region_engines.build_engines`.
    """
    _, exact = _outputs(dataclasses.replace(real, device="cpu"))
    _, ours = _outputs(config)
    built: list[EngineBuild] = []
    _, made = _outputs(config, built=built, folder=folder, library=library)
    off, noise = (float((a - b).abs().mean()) for a, b in ((made, ours), (ours, exact)))
    text = (
        f"outputs of engines differ by {off:.2e} from hires' int8, and that by {noise:.2e} from "
        f"fp32, on average; {built[0].regions} regions, {built[0].failed} without an engine"
    )
    return off <= noise and not built[0].failed, text


@functools.cache
def _references(runs: Runs) -> tuple[list[float], list[float]]:
    """Returns the losses of all images on one rank, in hires' int8 and in fp32."""
    scales = {"quant": {"scales": str(observed_scales(runs))}}
    ours = runs.config("ours", EVALUATION, _in(INT8), scales)
    exact = runs.config("float", EVALUATION, _in("fp32"))
    return sample_losses(runs.run(ours)), sample_losses(runs.run(exact))


@torch.no_grad()
def _outputs(
    config: RunConfig,
    see: Any = None,
    built: list[EngineBuild] | None = None,
    folder: Path | None = None,
    library: Any = None,
) -> tuple[Plan, Tensor]:
    """Returns the plan of one rank, and its output for the first batch, on the host."""
    off = dataclasses.replace(config, engine=EngineConfig())
    device, plan = open_device(config.device, 0), make_plan(off, traced(off))
    plan.require_ok()
    context = alone(plan)
    context.device = device.torch
    own = {n: device.place(one) for n, one in named_tensors(whole_model(config)).items()}
    derived = DerivedTensors([context], own, placement(image_dtype(config), context.plan.graph))
    regions = [] if built is None else regions_of(context.plan, context.stage)
    module = StageModule(context, {**own, **derived.tensors}, regions)
    module.watch(see)
    images = device.place(whole_microbatches(config, 0)[0][0])
    if built is not None:
        calls = _calls(module, images)
        parts = {"modules": [module], "contexts": [context], "device": device}
        rank = cast(RankEngine, SimpleNamespace(**parts))
        built.append(build_engines(rank, config, library, folder, calls))
    made = module.forward({INPUT: images})
    return plan, to_host(made[plan.graph.output]).float()


def _calls(module: StageModule, images: Tensor) -> dict[tuple[int, int], list[RegionCall]]:
    """Returns with what a pass calls the regions of a stage."""
    calls: dict[tuple[int, int], list[RegionCall]] = {}
    for number, region in enumerate(module.regions):

        def note(values: list[Any], number: int = number) -> None:
            calls[0, number] = [RegionCall(tuple(map(seen, values)), False, False, None)]

        region.watch = note
    module.forward({INPUT: images})
    for region in module.regions:
        region.watch = None
    return calls


def _engines(run: RunDir) -> tuple[int, str]:
    """Returns how many regions of a run have no engine, and what became of all."""
    lines = reading.read_lines(run.attempt_dir / file_names.METRICS)
    compiled = [line for line in lines if line.get("kind") == "compiled"]
    failed = sum(line["failed"] for line in compiled)
    states = [one["state"] for line in compiled for one in line["engines"]]
    counts = f"{states.count('built')} engines built, {states.count('read')} read"
    return failed, f"{counts}, {failed} regions without one"


def _in(precision: str) -> dict[str, Any]:
    return {"precision": {"name": precision}}
