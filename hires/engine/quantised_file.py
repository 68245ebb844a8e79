"""Writes the file of a quantised network: every tensor that its nodes read, by name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from hires.core.config.run_config import RunConfig
from hires.engine import tensorfile
from hires.engine.build import filled_tensors, placement
from hires.engine.calibration_values import decibels
from hires.engine.derived_tensors import DerivedTensors
from hires.engine.device import HOST
from hires.engine.finite_tensors import look_of
from hires.engine.loader import image_dtype
from hires.engine.network_files import whole_file
from hires.engine.quantized_tensors import WEIGHT_RECIPE, rounded_weight
from hires.parallel.context import Context
from hires.plan.graph import Graph
from hires.plan.passes.int8_tensors import stored_params
from hires.plan.plan import Plan
from hires.quant.scales import MARK


def write_quantised(config: RunConfig, plan: Plan, path: Path, mark: str) -> dict[str, Any]:
    """Writes a file that is there as a whole or not at all; returns the bytes of its tensors.

    ``weight_noise_db`` is the signal over the noise that rounding adds to each layer's weights.
    ``plan`` is of one process, ``mark`` that of the scales beside the file (``Scales.mark``).
    RunError: the file cannot be written, or the weights not be read.
    """
    context = cast(Context, SimpleNamespace(plan=plan, stage=plan.stages[0], device=HOST))
    tensors = filled_tensors(config, [context])
    before = sum(tensor.nbytes for tensor in tensors.values())
    place = placement(image_dtype(config), plan.graph)
    look = look_of(config, plan.graph)
    derived = DerivedTensors([context], tensors, place, look=look)
    every = {**tensors, **derived.tensors}
    names = sorted(stored_params(plan.graph))
    held = {name: every[name] if name in every else derived.made(name) for name in names}
    for name, tensor in held.items():
        look(name, tensor)
    with whole_file(path, "out=FILE") as hidden:
        tensorfile.write(hidden, held, {MARK: mark})
    after = sum(tensor.nbytes for tensor in held.values())
    noise = _weight_noise(plan.graph, derived, held)
    return {"bytes": after, "float_bytes": before, "weight_noise_db": noise}


def _weight_noise(graph: Graph, derived: DerivedTensors, held: Iterable[str]) -> dict[str, float]:
    # Layer -> signal over noise, of the weights whose integers are held.
    noise = {}
    for name in held:
        recipe = graph.params[name].recipe or {}
        if recipe.get("make") == WEIGHT_RECIPE:
            weight = derived.made(recipe["params"][0]).double()
            error = rounded_weight(recipe, weight) - weight
            powers = (float(one.square().sum()) for one in (weight, error))
            noise[name.rpartition(":")[0]] = decibels(*powers)
    return noise
