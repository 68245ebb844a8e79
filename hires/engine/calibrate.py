"""Calibrates: observes what each value of a network is on some images, in any layout.

    step 0        step 1        step 2       batch = 4, quant.images = 10: the last two are computed
    [0 1 2 3]     [4 5 6 7]     [8 9 - -]    and not observed

Each rank observes the pixels that it owns, of the values that its stage makes: halos, and what
tiles compute twice, count once. Then the ranks merge what they have seen, so that all have the same
ranges (:mod:`hires.quant.observers`). A second pass over the first batch measures the noise that
the scales add to every value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hires import comm
from hires.core.config.precision_config import MIN_MAX
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.data.source import Source
from hires.engine.loader import slot_loader
from hires.engine.rank_engine import RankEngine
from hires.parallel.context import Context
from hires.parallel.conversion_kernels import to_map
from hires.parallel.halo import part
from hires.plan.factors import unpack
from hires.plan.graph import INPUT, describe
from hires.plan.operators.operator_facts import facts_of
from hires.plan.passes.int8 import kept_by_name, observed_values, params_digest
from hires.plan.rules import SHARDED, TILED, WHOLE
from hires.quant.affine import LAST, Affine, affine_of
from hires.quant.observers import PIECE, WITH_COUNTS, Observed, num_bytes, reduce_all, scratch
from hires.quant.scales import Scales

POOR_DB = 20.0
"""Signal over noise below which a value is measured with another observer, too."""
GAIN_DB = 6.0
"""By how much that must be better to be recorded."""
NOISE_PIECE = PIECE // 4
"""Numbers whose noise is computed at once: it takes no more memory than observing them."""
Watch = Callable[[str, Tensor, int], None]
"""Gets the name of a value, the part of it that counts here, and the number of its first image."""


class Calibrator:
    """Observes the values of a rank from its making on, until :meth:`scales` or :meth:`close`."""

    def __init__(self, config: RunConfig, engine: RankEngine) -> None:
        self._config, self.engine = config, engine
        self.graph = engine.context.plan.graph
        self.names = observed_values(self.graph)
        counting = config.quant.observer in WITH_COUNTS
        self._observed = {n: Observed(config.quant.images, counting) for n in self.names}
        watch_values(engine, self.names, lambda name, x, i: self._observed[name].add(x, i))

    def close(self) -> None:
        """Observes nothing any more."""
        for module in self.engine.modules:
            module.watch(None)

    def scales(self, source: str = "") -> Scales:
        """Returns what all ranks have found, the same on each; all ranks call it together.

        ``source`` is the digest of what decides them (``hires.quant.scales.calibration_key``).
        A layer of ``quant.keep`` whose value is not finite has no scale. RunError: another value is
        not finite, which is named.
        """
        self.close()
        reduce_all(self._observed, self.names, _reduce)
        quant, ranges, values = self._config.quant, {}, {}
        kept = kept_by_name(self.graph, self._config)
        for name in self.names:
            try:
                ends = self._observed[name].range(quant.observer, quant.percentile)
                values[name] = affine_of(*ends)
                ranges[name] = min(ends[0], 0.0), max(ends[1], 0.0)  # as the scale covers
            except ValueError as error:
                if name in kept:
                    continue
                where, keep = "the images", ""
                if name != INPUT:
                    where = describe(self.graph.by_name[name])
                    keep = f", or keep it in float with quant.keep=[{name}]"
                raise RunError(
                    f"{where} cannot be calibrated: {error}; name the weights of a network that "
                    f"was trained (weights=PATH){keep}"
                ) from None
        facts = params_digest(self.graph), quant.observer, quant.images
        return Scales(*facts, values, ranges, source=source)

    def noise(self, source: Source, values: dict[str, Affine]) -> dict[str, float]:
        """Returns the signal over the noise that its scale adds to each value, in dB.

        It is measured on the first batch; all ranks call it together.
        """
        names = [name for name in self.names if name in values]
        row = {name: k for k, name in enumerate(names)}
        powers = torch.zeros(len(row), 2, dtype=torch.float64)

        def add(name: str, x: Tensor, image: int) -> None:
            for piece in torch.split(x.detach().flatten(), NOISE_PIECE):
                exact = piece.double()
                error = exact - fake_quantized(exact, values[name])
                powers[row[name]] += torch.stack([exact.square().sum(), error.square().sum()]).cpu()

        watch_values(self.engine, names, add)
        one_step(self._config, self.engine, source)
        self.close()
        _reduce(powers, "sum")
        return {name: decibels(*powers[k].tolist()) for name, k in row.items()}

    def min_max_noise(self, source: Source, noise: Mapping[str, float]) -> dict[str, float]:
        """Returns what the noise of the worst values would be with min_max, where it is much less.

        ``noise`` is that of all values as :meth:`noise` measured it; all ranks call it together.
        """
        poor = [name for name, ratio in noise.items() if ratio < POOR_DB]
        if self._config.quant.observer == MIN_MAX or not poor:
            return {}
        values = {name: affine_of(*self._observed[name].range(MIN_MAX, 100.0)) for name in poor}
        other = self.noise(source, values)
        return {name: other[name] for name in poor if other[name] >= noise[name] + GAIN_DB}


def _reduce(tensor: Tensor, how: str) -> None:
    comm.all_reduce(tensor, getattr(comm.ReduceOp, how.upper()))


def watch_values(engine: RankEngine, names: list[str], watch: Watch) -> None:
    """Lets ``watch`` see what a rank computes of some values, each pixel on one rank only."""
    wanted = set(names)

    def show(context: Context, shown: set[str], name: str, value: Any) -> None:
        mine = own_part(context, name, value) if name in shown else None
        if mine is not None:
            watch(name, *mine)

    for context, module in zip(engine.contexts, engine.modules, strict=True):
        shown, plan = wanted & {node.name for node in module.nodes}, context.plan
        readers = (s.index for s in plan.stages for n in plan.nodes(s.index) if INPUT in n.inputs)
        if INPUT in wanted and context.stage.index == next(readers, None):
            shown.add(INPUT)
        module.watch(functools.partial(show, context, shown))


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


def one_step(config: RunConfig, engine: RankEngine, source: Source) -> None:
    """Runs the first batch once more."""
    loaders = [slot_loader(config, c, source, range(1), engine.device) for c in engine.contexts]
    try:
        engine.executor.step(loaders, number=0)
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


def observe_blank(config: RunConfig, engine: RankEngine) -> int:
    """Lets the steps of a calibration allocate what observing their values does.

    Returns the bytes of the host that a rank keeps of all values; another task has none.
    """
    if config.task.name != "calibrate":
        return 0
    counting = config.quant.observer in WITH_COUNTS
    names = observed_values(engine.context.plan.graph)
    watch_values(engine, names, lambda name, x, image: scratch(x, counting))
    return len(names) * num_bytes(config.quant.images, counting)


def rehearse_choice(config: RunConfig, engine: RankEngine, step: Callable[[], object]) -> None:
    """Allocates what ``quant.auto`` does; ``step`` runs a step once more."""
    if config.task.name != "calibrate" or config.quant.auto is None:
        return
    step()
    tensors = {**engine.tensors, **engine.derived.tensors}
    nodes = [node for c in engine.contexts for node in c.plan.nodes(c.stage.index)]
    names = {name for n in nodes if facts_of(n.kind).multiplies for name in n.params}
    weights = [tensors[name] for name in sorted(names & tensors.keys()) if tensors[name].dim() > 1]
    # Of the int8 network: its own weights, their numbers, and these in the order of kernels.
    copies = [torch.empty_like(weight) for weight in weights]
    numbers = [torch.empty_like(weight, dtype=torch.int8) for weight in weights for _ in range(2)]
    del copies, numbers
