"""Calibrates: observes what each value of a network is on some images, in any layout.

    step 0        step 1        step 2       batch = 4, quant.images = 10: the last two are computed
    [0 1 2 3]     [4 5 6 7]     [8 9 - -]    and not observed

Each rank observes the pixels that it owns, of the values that its stage makes: halos, and what
tiles compute twice, count once. Then the ranks merge what they have seen, so that all have the same
ranges (:mod:`hires.quant.observers`), and rank 0 writes the scales of the attempt. A second pass
over the first batch measures the noise that the scales add to every value.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hires import comm
from hires.core.config.precision_config import MIN_MAX
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.store import file_names, frozen
from hires.core.store.files import OPTION
from hires.data.source import Source
from hires.engine.build import RankEngine
from hires.engine.calibration_values import decibels, fake_quantized, one_step, watch_values
from hires.engine.kept_layers import kept_layers
from hires.plan.graph import INPUT, describe
from hires.plan.operators.operator_facts import facts_of
from hires.plan.passes.int8 import kept_by_name, observed_values, params_digest
from hires.quant.affine import Affine, affine_of
from hires.quant.observers import PIECE, WITH_COUNTS, Observed, num_bytes, reduce_all, scratch
from hires.quant.scales import Scales, calibration_key, read_scales, write_scales

POOR_DB = 20.0
"""Signal over noise below which a value is measured with another observer, too."""
GAIN_DB = 6.0
"""By how much that must be better to be recorded."""
NOISE_PIECE = PIECE // 4
"""Numbers whose noise is computed at once: it takes no more memory than observing them."""

log = logging.getLogger(__name__)


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
                both = torch.stack([exact.square().sum(), error.square().sum()])
                powers[row[name]] += both.cpu()

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


def write_calibration(
    calibrator: Calibrator, config: RunConfig, source: Source, run_dir: Path, attempt: int
) -> None:
    """Writes the scales of an attempt whose ranks have taken all steps; all call it together.

    They are those of ``quant.scales`` if that names some: then layers alone are chosen. RunError:
    ``quant.auto`` cannot choose in this layout; the scales without a choice are written, and serve
    a run without ``quant.auto``, or in another layout.
    """
    planned = frozen.read(run_dir)
    digests = {} if planned is None else planned.inputs.digests
    path = file_names.attempt_dir(run_dir, attempt) / file_names.SCALES

    def write(scales: Scales) -> None:
        if comm.get_rank() == 0:
            write_scales(path, scales, OPTION)
            text = "%d values calibrated on %d images: %s"
            log.info(text, len(scales.values), scales.images, path)

    key = calibration_key(config, digests)
    if config.quant.scales is None:
        scales = calibrator.scales(key)
        noise = calibrator.noise(source, dict(scales.values))
        other = calibrator.min_max_noise(source, noise)
        scales = dataclasses.replace(scales, noise=noise, min_max_noise=other)
    else:  # of an earlier calibration
        calibrator.close()
        scales = dataclasses.replace(read_scales(config.quant.scales), source=key)
    if config.quant.auto is not None:
        try:
            choice = kept_layers(config, calibrator.engine, source, scales)
        except RunError:
            quant = dataclasses.replace(config.quant, auto=None)
            key = calibration_key(dataclasses.replace(config, quant=quant), digests)
            write(dataclasses.replace(scales, source=key))
            raise
        scales = dataclasses.replace(scales, **choice._asdict())
    write(scales)


def _reduce(tensor: Tensor, how: str) -> None:
    comm.all_reduce(tensor, getattr(comm.ReduceOp, how.upper()))


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
