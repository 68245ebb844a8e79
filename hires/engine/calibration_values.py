"""Shows the values of a rank while its passes run: what it owns of them, each pixel once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hires import comm
from hires.core.config.run_config import RunConfig
from hires.data.source import Source
from hires.engine.build import RankEngine
from hires.engine.loader import slot_loader
from hires.parallel.context import Context
from hires.parallel.conversion_kernels import to_map
from hires.parallel.halo import part
from hires.plan.factors import unpack
from hires.plan.graph import INPUT
from hires.plan.rules import SHARDED, TILED, WHOLE
from hires.quant.affine import LAST, Affine

Watch = Callable[[str, Tensor, int], None]
"""Gets the name of a value, the part of it that counts here, and the number of its first image."""


def watch_values(engine: RankEngine, names: list[str], watch: Watch) -> None:
    """Lets ``watch`` see what a rank computes of some values, each pixel on one rank only."""
    wanted = set(names)
    for context, module in zip(engine.contexts, engine.modules, strict=True):
        shown = wanted & {node.name for node in module.nodes}
        readers = (s.index for s in context.plan.stages if _reads_images(context, s.index))
        if INPUT in wanted and context.stage.index == next(readers, None):
            shown.add(INPUT)
        module.watch(functools.partial(_show, context, shown, watch))


def one_step(config: RunConfig, engine: RankEngine, source: Source, **options: Any) -> Any:
    """Runs the first batch once more; returns its result."""
    loaders = [slot_loader(config, c, source, range(1), engine.device) for c in engine.contexts]
    try:
        return engine.executor.step(loaders, number=0, **options)
    finally:
        for loader in loaders:
            loader.close()


def fake_quantized(x: Tensor, affine: Affine) -> Tensor:
    """Returns a tensor after rounding to 8-bit integers, in its own type."""
    numbers = (x / affine.scale).round_().add_(affine.zero_point).clamp_(0, LAST)
    return numbers.sub_(affine.zero_point).mul_(affine.scale)


def decibels(signal: float, noise: float) -> float:
    """Returns the ratio of two powers in dB, -200 to 200.

    Without noise, or without any signal, it is 200; where a power is not finite, -200.
    """
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return -200.0
    if not (signal and noise):
        return 200.0
    # Of logarithms: the quotient of two powers may be too large, or too small, for a number.
    return max(-200.0, min(200.0, 10 * (math.log10(signal) - math.log10(noise))))


def noise_share(exact: Sequence[Tensor], noisy: Sequence[Tensor]) -> float:
    """Returns the noise of tensors as a share of the exact ones' power, the same on all ranks.

    All call it together, each with its own parts. Where an element is not finite it is infinite.
    """
    powers = torch.zeros(2, dtype=torch.float64)
    for tensor, other in zip(exact, noisy, strict=True):
        powers += torch.stack([tensor.square().sum(), (other - tensor).square().sum()])
    comm.all_reduce(powers)
    signal, noise = powers.tolist()
    share = float(noise / signal if signal else noise)
    return share if math.isfinite(share) else math.inf


def own_part(context: Context, name: str, value: Tensor) -> tuple[Tensor, int] | None:
    """Returns what this rank owns of a value, and the number of its first image; None: nothing."""
    stage, tile, plan = context.stage, context.tile, context.plan
    batch = plan.pieces * plan.graph.input_shape[0]
    layout = stage.layout.get(name, WHOLE) if name != INPUT else None
    if layout == WHOLE and tile and stage.num_ranks > 1:
        return None  # tile 0 has the same
    shares = layout == SHARDED or (name == INPUT and stage.shards > 1)
    first = context.first_sample + (context.samples[0] if shares else 0)
    if layout == TILED and name in stage.extents:
        extent = context.extent(name)
        if name in stage.factors:
            value = to_map(value, unpack(stage.factors[name]), extent)
        value = part(value, extent, context.own_of(name))
    return value, context.step * batch + first


def _show(context: Context, shown: set[str], watch: Watch, name: str, value: Any) -> None:
    mine = own_part(context, name, value) if name in shown else None
    if mine is not None:
        watch(name, *mine)


def _reads_images(context: Context, stage: int) -> bool:
    return any(INPUT in node.inputs for node in context.plan.nodes(stage))
