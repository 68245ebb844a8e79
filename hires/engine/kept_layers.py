"""Writes the scales of a calibration, and finds what stays in float so that they keep a bound.

    alone      what one operator reads and makes is rounded, nothing else: its error at the output
    itself     the int8 network that keeps the k worst operators is computed: the smallest k within
               the bound (``quant.auto``)

A join of a large map and a small one may be the worst, and only its readers in float, too, read it
unrounded. Every error is measured on the first batch, in the run's own layout, as a share of the
output's power. Errors of layers that are rounded one by one leave out what lies between them (sums,
pools, inputs of kept layers); the network itself leaves out nothing:

    rank 0      traces it once -> graph to all ranks; plans it with the scales -> plan to all ranks
    all ranks   build what a run builds, and compute the first batch
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hires import comm
from hires.core.config.precision_config import INT8, PrecisionConfig, noise_bound
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, HiresError, RunError
from hires.core.store import file_names, frozen
from hires.core.store.files import OPTION
from hires.data.source import Source
from hires.engine.build import build_rank
from hires.engine.calibrate import Calibrator, decibels, fake_quantized, one_step, own_part
from hires.engine.rank_engine import RankEngine
from hires.engine.weights_file import WeightsFile
from hires.nets.trace import trace_config
from hires.parallel.context import Context
from hires.plan.graph import Graph, describe
from hires.plan.passes.int8 import NOTHING, Rounding, Roundings, kept_by_name
from hires.plan.passes.rewriting import rewritten
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.plan.traffic import backends_of_plan
from hires.quant.row_scales import fake_quantized_rows
from hires.quant.scales import Scales, calibration_key, read_scales, write_scales

log = logging.getLogger(__name__)

_UNMEASURED = (
    "quant.auto cannot measure the int8 network in this layout: {}; calibrate with `hires quantize "
    "parallel=single`, and run with quant.scales=FILE"
)


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
            scales = _with_choice(config, calibrator.engine, source, scales)
        except RunError:
            quant = dataclasses.replace(config.quant, auto=None)
            key = calibration_key(dataclasses.replace(config, quant=quant), digests)
            write(dataclasses.replace(scales, source=key))
            raise
    write(scales)


def _with_choice(config: RunConfig, engine: RankEngine, source: Source, scales: Scales) -> Scales:
    # With what to keep in float, besides ``quant.keep``; all ranks call it together. RunError: the
    # int8 network cannot be measured in this layout.
    bound, quant = noise_bound(config.quant.auto), config.quant
    assert bound is not None
    network = _Int8Network(config, engine, source, scales)
    graph = rewritten(config, network.traced)
    try:
        roundings = Roundings(graph, scales.values, kept_by_name(graph, config), quant.linear)
    except ConfigError as error:  # as the quantised run will say
        log.warning("quant.auto cannot choose: %s", error)
        return dataclasses.replace(scales, kept={}, auto={}, alone={})
    exact = _outputs(config, engine, source, NOTHING)
    alone = {
        node.name: _noise_share(exact, _outputs(config, engine, source, roundings.alone(node)))
        for node in roundings.operators
    }
    worst = sorted(alone, key=lambda name: -alone[name])
    for name in worst:
        log.info("%s alone: %s", describe(graph.by_name[name]), _text(alone[name]))
    reasons = {name: f"quant.auto: {_text(alone[name])} alone" for name in worst}
    kept, share = enough_kept(functools.partial(network.noise, exact), reasons, bound)
    left = len(roundings.in_int8(kept))
    facts = {"asked_db": decibels(1.0, bound), "images": float(config.batch)}
    facts |= {"operators": float(left)}
    facts |= {"signal_db": decibels(1.0, share)} if _has_ratio(share) else {}
    log.info("quant.auto: %d of %d operators in 8 bits, %s", left, len(worst), _text(share))
    ratios = {name: decibels(1.0, alone[name]) for name in worst if _has_ratio(alone[name])}
    return dataclasses.replace(scales, kept=kept, auto=facts, alone=ratios)


def _has_ratio(share: float) -> bool:
    # Otherwise decibels() is one of its bounds, and no measurement.
    return 0.0 < share < math.inf


def _text(share: float) -> str:
    if _has_ratio(share):
        return f"{decibels(1.0, share):.1f} dB"
    return "an output that is not finite" if share else "no noise"


def enough_kept(
    measure: Callable[[Mapping[str, str]], float], reasons: Mapping[str, str], bound: float
) -> tuple[dict[str, str], float]:
    """Returns which operators must be kept, the worst first, and the noise that is left then.

    ``measure`` gets those that are kept of ``reasons``, and returns the noise of the network. With
    all of them it may be above the bound.
    """
    every, shares = [*reasons.items()], dict[int, float]()

    def within(count: int) -> bool:
        if count not in shares:
            shares[count] = measure(dict(every[:count]))
            log.info("the int8 network, %d operators kept: %s", count, _text(shares[count]))
        return shares[count] <= bound

    few, enough = 0, 0 if within(0) else len(every)
    while few < enough:
        k = (few + enough) // 2
        few, enough = (few, k) if within(k) else (k + 1, enough)
    within(enough)
    return dict(every[:enough]), shares[enough]


class _Int8Network:
    """What a run with some scales computes, in a calibration's layout; all ranks make it together.

    ``traced`` is the network that it quantises, without the conversions of a layout.
    """

    def __init__(
        self, config: RunConfig, engine: RankEngine, source: Source, scales: Scales
    ) -> None:
        self._engine, self._source, self._scales = engine, source, scales
        self._config = dataclasses.replace(
            config,
            task=dataclasses.replace(config.task, name="infer"),
            precision=PrecisionConfig(INT8),
            quant=dataclasses.replace(config.quant, auto=None),
        )
        is_first = comm.get_rank() == 0
        text = json.dumps(trace_config(self._config).to_dict()) if is_first else ""
        comm.max_all(0, patient=True)  # a trace may need longer than a message
        self.traced = Graph.from_dict(json.loads(comm.broadcast_text(text)))

    def noise(self, exact: list[Tensor], kept: Mapping[str, str]) -> float:
        """Returns its noise, if it keeps these layers, as a share of the output's power.

        ``exact`` are this rank's own parts of the float network's outputs; all ranks call it
        together. RunError: it cannot be measured in this layout.
        """
        text = self._planned(kept) if comm.get_rank() == 0 else ""
        comm.max_all(0, patient=True)  # a plan may need longer than a message
        planned = json.loads(comm.broadcast_text(text))
        if "why" in planned:
            raise RunError(_UNMEASURED.format(planned["why"]))
        file, rank = self._engine.weights, self._engine.context.rank
        weights = None if file is None else WeightsFile(file)
        plan = Plan.from_dict(planned["plan"])
        engine = build_rank(self._config, plan, rank, 0, self._engine.device, weights=weights)
        outputs = _outputs(self._config, engine, self._source, NOTHING)
        engine.close()
        comm.max_all(0)  # a rank that frees a group ends its connections
        for group in engine.context.groups.values():
            comm.destroy_group(group)
        shapes = [[tensor.shape for tensor in some] for some in (outputs, exact)]
        if comm.max_all(int(shapes[0] != shapes[1])):
            raise RunError(_UNMEASURED.format("its output lies on other ranks"))
        return _noise_share(exact, outputs)

    def _planned(self, kept: Mapping[str, str]) -> str:
        # The plan as text, or why there is none.
        with tempfile.TemporaryDirectory(prefix="hires-auto-") as folder:
            path = Path(folder) / file_names.SCALES
            quant = dataclasses.replace(self._config.quant, scales=str(path))
            try:
                write_scales(path, dataclasses.replace(self._scales, kept=kept))
                plan = make_plan(dataclasses.replace(self._config, quant=quant), self.traced)
            except HiresError as error:
                return json.dumps({"why": str(error)})
        # Ranks have joined the backends of the calibration, and no others.
        joined = {*backends_of_plan(self._engine.context.plan)}
        if not plan.ok or not {*backends_of_plan(plan)} <= joined:
            ways = "its messages take other ways than those of the calibration"
            return json.dumps({"why": plan.errors or ways})
        return json.dumps({"plan": plan.to_dict()})


def _noise_share(exact: Sequence[Tensor], noisy: Sequence[Tensor]) -> float:
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


def _outputs(
    config: RunConfig, engine: RankEngine, source: Source, rounding: Rounding
) -> list[Tensor]:
    """Returns this rank's own parts of the outputs, microbatch after microbatch.

    Values are rounded in place, as their readers then read them.
    """
    outputs: list[Tensor] = []

    def watch(context: Context, name: str, value: Any) -> None:
        if name in rounding.values:
            value.copy_(fake_quantized(value, rounding.values[name]))
        if name in rounding.rows:  # of what is real numbers again
            value.copy_(fake_quantized_rows(value))
        if name == context.plan.graph.output:
            mine = own_part(context, name, value)
            outputs.extend([] if mine is None else [mine[0].double().cpu()])

    for context, module in zip(engine.contexts, engine.modules, strict=True):
        module.watch(functools.partial(watch, context))
    one_step(config, engine, source)
    for module in engine.modules:
        module.watch(None)
    return outputs
