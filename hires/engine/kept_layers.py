"""Finds what stays in float so that the output's error keeps a bound (``quant.auto``).

    alone      one operator is in 8 bits, no others: its error at the output
    together   all but the k worst operators are in 8 bits: the smallest k within the bound
    itself     the int8 network that keeps these k is computed; more are kept while it has too much

An operator in 8 bits rounds its weights, what it reads, and its value: a join of a large map and a
small one may be the worst, and only its readers in float, too, read it unrounded. Every error is
measured on the first batch, in the run's own layout, as a share of the output's power. For the
first two, weights are rounded; what one operator alone reads is
rounded for its other readers, too. Weights of norms, and the sum of a layer before a table, are
rounded in the last step only.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch
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
from hires.engine.quantized_tensors import WEIGHT_RECIPE, rounded_weight
from hires.parallel.context import Context
from hires.plan.graph import Graph, describe
from hires.plan.passes.int8_roundings import NOTHING, Rounding, Roundings
from hires.plan.passes.int8_scales import kept_by_name
from hires.plan.passes.int8_tensors import weight_form
from hires.plan.passes.rewriting import rewritten
from hires.quant.row_scales import fake_quantized_rows
from hires.quant.scales import Scales

log = logging.getLogger(__name__)


class AutoChoice(NamedTuple):
    """What ``quant.auto`` has found."""

    kept: dict[str, str]
    """Operators that stay in float, with the reason."""
    auto: dict[str, float]
    """``Scales.auto``; empty: the int8 network cannot be measured in this layout."""
    alone: dict[str, float]
    """``Scales.alone``."""


def kept_layers(
    config: RunConfig, engine: RankEngine, source: Source, scales: Scales
) -> AutoChoice:
    """Returns what to keep in float, besides ``quant.keep``; all ranks call it together."""
    bound, quant = noise_bound(config.quant.auto), config.quant
    assert bound is not None
    traced = traced_for_int8(config)
    graph = rewritten(config, traced)
    named = kept_by_name(graph, config)
    try:
        roundings = Roundings(graph, scales.values, named, quant.linear)
    except ConfigError as error:  # as the quantised run will say
        log.warning("quant.auto cannot choose: %s", error)
        return AutoChoice({}, {}, {})
    measure = OutputError(config, engine, source, graph)
    alone = {node.name: measure(roundings.alone(node)) for node in roundings.operators}
    log.info("all in 8 bits: %s", _text(measure(roundings.keeping({}))))
    worst = sorted(alone, key=lambda name: -alone[name])
    for name in worst:
        log.info("%s alone: %s", describe(graph.by_name[name]), _text(alone[name]))
    reasons = {name: f"quant.auto: {_text(alone[name])} alone" for name in worst}
    # The more are kept the smaller is the error; with all of them it is none.
    few, enough = 0, len(worst)
    while few < enough:
        k = (few + enough) // 2
        within = measure(roundings.keeping(_first(reasons, k))) <= bound
        few, enough = (few, k) if within else (k + 1, enough)
    itself = Int8Error(config, engine, source, scales, traced, measure.exact)
    enough, share = enough_kept(itself, reasons, enough, bound)
    kept, facts = _first(reasons, enough), {}
    if share is not None:
        left = len(roundings.in_int8(kept))
        facts = {"asked_db": decibels(1.0, bound), "images": float(config.batch)}
        facts |= {"operators": float(left)}
        facts |= {"signal_db": decibels(1.0, share)} if _has_ratio(share) else {}
        log.info("quant.auto: %d of %d operators in 8 bits, %s", left, len(worst), _text(share))
    ratios = {name: decibels(1.0, alone[name]) for name in worst if _has_ratio(alone[name])}
    return AutoChoice(kept, facts, ratios)


def _first(reasons: Mapping[str, str], count: int) -> dict[str, str]:
    return dict([*reasons.items()][:count])


def _has_ratio(share: float) -> bool:
    # Otherwise decibels() is one of its bounds, and no measurement.
    return 0.0 < share < math.inf


def _text(share: float) -> str:
    if _has_ratio(share):
        return f"{decibels(1.0, share):.1f} dB"
    return "an output that is not finite" if share else "no noise"


def enough_kept(
    measure: Callable[[Mapping[str, str]], float | None],
    reasons: Mapping[str, str],
    first: int,
    bound: float,
) -> tuple[int, float | None]:
    """Returns how many operators must be kept, the worst first, and the noise that is left then.

    ``measure`` gets those that are kept of ``reasons``, at least the ``first``, and returns the
    noise of the network, or None: then the search ends. With all of them it may be above the bound.
    """
    every, shares = [*reasons.items()], dict[int, float | None]()

    def within(count: int) -> bool:
        shares[count] = share = measure(dict(every[:count]))
        if share is not None:
            log.info("the int8 network, %d operators kept: %s", count, _text(share))
        return share is None or share <= bound

    if within(first):
        return first, shares[first]
    few, enough = first + 1, len(every)
    while few < enough:
        k = (few + enough) // 2
        few, enough = (few, k) if within(k) else (k + 1, enough)
    enough = min(enough, len(every))
    if enough not in shares:
        within(enough)
    return enough, shares[enough]


class OutputError:
    """Measures what rounding some operators does to the network's output, on the first batch.

    ``graph`` is the network without the conversions of a layout.
    """

    def __init__(self, config: RunConfig, engine: RankEngine, source: Source, graph: Graph) -> None:
        self._config, self._engine, self._source = config, engine, source
        self._graph = graph
        self._tensors = {**engine.tensors, **engine.derived.tensors}
        self.exact = self._outputs(NOTHING)
        """This rank's own parts of the outputs without any rounding."""

    def __call__(self, rounding: Rounding) -> float:
        """Returns the noise as a share of the output's power, the same on all ranks.

        Of an output that is not finite it is infinite.
        """
        with self._rounded_weights(rounding.layers):
            return noise_share(self.exact, self._outputs(rounding))

    def _outputs(self, rounding: Rounding) -> list[Tensor]:
        # This rank's own parts, microbatch after microbatch.
        outputs: list[Tensor] = []
        for context, module in zip(self._engine.contexts, self._engine.modules, strict=True):
            module.watch(functools.partial(_round, context, rounding, outputs))
        one_step(self._config, self._engine, self._source)
        for module in self._engine.modules:
            module.watch(None)
        return outputs

    @contextlib.contextmanager
    def _rounded_weights(self, layers: AbstractSet[str]) -> Iterator[None]:
        exact: dict[str, Tensor] = {}
        for node in map(self._graph.by_name.__getitem__, sorted(layers)):
            weight = node.args["weight"].get("param")
            if weight in self._tensors and weight not in exact:  # else of another rank, or computed
                held = self._tensors[weight]
                exact[weight] = held.detach().clone()
                held.data.copy_(rounded_weight({"make": WEIGHT_RECIPE, **weight_form(node)}, held))
        self._pack()
        try:
            yield
        finally:
            for weight, held in exact.items():
                self._tensors[weight].data.copy_(held)
            self._pack()

    @torch.no_grad()  # kernels of inference refuse weights that may be trained
    def _pack(self) -> None:
        # Fused operators keep their weights in the order of their kernels.
        packers = (packer for context in self._engine.contexts for packer in context.packers)
        packed = (packer.pack() for packer in packers)
        self._engine.packed[:] = [one for one in packed if one is not None]


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
