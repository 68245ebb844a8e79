"""Finds what stays in float so that the output's error keeps a bound (``quant.auto``).

    alone      what one operator reads and makes is rounded, nothing else: its error at the output
    itself     the int8 network that keeps the k worst operators is computed: the smallest k within
               the bound

A join of a large map and a small one may be the worst, and only its readers in float, too, read it
unrounded. Every error is measured on the first batch, in the run's own layout, as a share of the
output's power.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from hires.core.config.precision_config import noise_bound
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.data.source import Source
from hires.engine.build import RankEngine
from hires.engine.calibration_values import (
    decibels,
    fake_quantized,
    noise_share,
    one_step,
    own_part,
)
from hires.engine.int8_error import Int8Error, traced_for_int8
from hires.parallel.context import Context
from hires.plan.graph import describe
from hires.plan.passes.int8 import NOTHING, Rounding, Roundings, kept_by_name
from hires.plan.passes.rewriting import rewritten
from hires.quant.row_scales import fake_quantized_rows
from hires.quant.scales import Scales

log = logging.getLogger(__name__)


class AutoChoice(NamedTuple):
    """What ``quant.auto`` has found."""

    kept: dict[str, str]
    """Operators that stay in float, with the reason."""
    auto: dict[str, float]
    """``Scales.auto``; empty: there was nothing to choose from."""
    alone: dict[str, float]
    """``Scales.alone``."""


def kept_layers(
    config: RunConfig, engine: RankEngine, source: Source, scales: Scales
) -> AutoChoice:
    """Returns what to keep in float, besides ``quant.keep``; all ranks call it together.

    RunError: the int8 network cannot be measured in this layout.
    """
    bound, quant = noise_bound(config.quant.auto), config.quant
    assert bound is not None
    traced = traced_for_int8(config)
    graph = rewritten(config, traced)
    try:
        roundings = Roundings(graph, scales.values, kept_by_name(graph, config), quant.linear)
    except ConfigError as error:  # as the quantised run will say
        log.warning("quant.auto cannot choose: %s", error)
        return AutoChoice({}, {}, {})
    exact = _outputs(config, engine, source, NOTHING)
    alone = {
        node.name: noise_share(exact, _outputs(config, engine, source, roundings.alone(node)))
        for node in roundings.operators
    }
    worst = sorted(alone, key=lambda name: -alone[name])
    for name in worst:
        log.info("%s alone: %s", describe(graph.by_name[name]), _text(alone[name]))
    reasons = {name: f"quant.auto: {_text(alone[name])} alone" for name in worst}
    itself = Int8Error(config, engine, source, scales, traced, exact)
    kept, share = enough_kept(itself, reasons, bound)
    left = len(roundings.in_int8(kept))
    facts = {"asked_db": decibels(1.0, bound), "images": float(config.batch)}
    facts |= {"operators": float(left)}
    facts |= {"signal_db": decibels(1.0, share)} if _has_ratio(share) else {}
    log.info("quant.auto: %d of %d operators in 8 bits, %s", left, len(worst), _text(share))
    ratios = {name: decibels(1.0, alone[name]) for name in worst if _has_ratio(alone[name])}
    return AutoChoice(kept, facts, ratios)


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

    few, enough = 0, len(every)
    if within(0):
        enough = 0
    while few < enough:
        k = (few + enough) // 2
        few, enough = (few, k) if within(k) else (k + 1, enough)
    within(enough)
    return dict(every[:enough]), shares[enough]


def _outputs(
    config: RunConfig, engine: RankEngine, source: Source, rounding: Rounding
) -> list[Tensor]:
    """Returns this rank's own parts of the outputs, microbatch after microbatch."""
    outputs: list[Tensor] = []
    for context, module in zip(engine.contexts, engine.modules, strict=True):
        module.watch(functools.partial(_round, context, rounding, outputs))
    one_step(config, engine, source)
    for module in engine.modules:
        module.watch(None)
    return outputs


def _round(
    context: Context, rounding: Rounding, outputs: list[Tensor], name: str, value: Any
) -> None:
    """Rounds a value in place, as its readers then read it, and collects the output's parts."""
    if name in rounding.values:
        value.copy_(fake_quantized(value, rounding.values[name]))
    if name in rounding.rows:  # of what is real numbers again
        value.copy_(fake_quantized_rows(value))
    if name == context.plan.graph.output:
        own = own_part(context, name, value)
        outputs += [] if own is None else [own[0].double().cpu()]
