"""Finds the layers that stay in float so that the output's error keeps a bound (``quant.auto``).

    alone      one layer's weights and values are rounded, no others: its error at the output
    together   all but the k worst are rounded: the smallest k is taken whose error is within bounds
    itself     the int8 network that keeps these k is computed; more are kept while it has too much

Every error is measured on the first batch, in the run's own layout, as a share of the output's
power. For the first two, weights are rounded as ``quant.weights`` stores them. Of a linear layer
with dynamic scales the input is rounded, row by row, in the place of its value; so it is for other
readers of it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from hires.core.config.quant_config import DYNAMIC, INT4, noise_bound
from hires.core.config.run_config import RunConfig
from hires.engine.build import RankEngine
from hires.engine.calibration_values import (
    decibels,
    fake_quantized,
    noise_share,
    one_step,
    own_part,
)
from hires.engine.int8_error import Int8Error
from hires.engine.loader import Data
from hires.engine.quantized_tensors import PACKED, WEIGHT_RECIPE, rounded_weight
from hires.parallel.context import Context
from hires.plan.graph import Graph, Node, describe
from hires.plan.operators.operator_facts import facts_of
from hires.plan.passes.int8_scales import kept_by_name
from hires.plan.passes.int8_tensors import weight_form
from hires.plan.passes.quantise import is_linear
from hires.quant.row_scales import fake_quantized_rows
from hires.quant.scales import Scales

log = logging.getLogger(__name__)


def kept_layers(
    config: RunConfig, engine: RankEngine, source: Data, scales: Scales
) -> tuple[dict[str, str], dict[str, float]]:
    """Returns the layers to keep with their reasons, and what the network has with them.

    That is ``Scales.auto``, empty if the int8 network cannot be measured in this layout. Layers of
    ``quant.keep`` are kept anyway. All ranks call it together.
    """
    bound = noise_bound(config.quant.auto)
    assert bound is not None
    measure = OutputError(config, engine, source, scales)
    graph = engine.context.plan.graph
    named = kept_by_name(graph, config)
    layers = [
        node
        for node in graph.nodes
        if facts_of(node.kind).multiplies
        and "param" in node.args["weight"]
        and node.name not in named
    ]
    alone = {node.name: measure({node.name}) for node in layers}
    every = decibels(1.0, measure({*alone}))
    log.info("all layers in 8 bits, weights in %s: %.1f dB", config.quant.weights, every)
    worst = sorted(alone, key=lambda name: -alone[name])
    for node in sorted(layers, key=lambda node: -alone[node.name]):
        log.info("%s alone: %.1f dB", describe(node), decibels(1.0, alone[node.name]))
    # The more layers are kept the smaller is the error; with all of them it is none.
    few, enough = 0, len(worst)
    while few < enough:
        k = (few + enough) // 2
        few, enough = (few, k) if measure({*worst[k:]}) <= bound else (k + 1, enough)
    reasons = {n: f"quant.auto: {decibels(1.0, alone[n]):.1f} dB alone" for n in worst}
    itself = Int8Error(config, engine, source, scales, measure.exact)
    enough, share = enough_kept(itself, reasons, enough, bound)
    facts = {}
    if share is not None:
        asked, signal = decibels(1.0, bound), decibels(1.0, share)
        facts = {"asked_db": asked, "signal_db": signal, "images": float(config.batch)}
        short = f", {asked - signal:.1f} dB less than asked" if share > bound else ""
        log.info("quant.auto: %d of %d layers kept, %.1f dB%s", enough, len(worst), signal, short)
    return dict([*reasons.items()][:enough]), facts


def enough_kept(
    measure: Callable[[Mapping[str, str]], float | None],
    reasons: Mapping[str, str],
    first: int,
    bound: float,
) -> tuple[int, float | None]:
    """Returns how many layers must be kept, the worst first, and the noise that is left then.

    ``measure`` gets those that are kept of ``reasons``, at least the ``first``, and returns the
    noise of the network, or None: then the search ends. With all of them it may be above the bound.
    """
    every, shares = [*reasons.items()], dict[int, float | None]()

    def within(count: int) -> bool:
        shares[count] = share = measure(dict(every[:count]))
        if share is not None:
            log.info("the int8 network, %d layers kept: %.1f dB", count, decibels(1.0, share))
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


def _by_row(config: RunConfig, graph: Graph) -> dict[str, Node]:
    # The layers whose inputs are rounded while they are computed.
    dynamic = config.quant.linear == DYNAMIC
    return {node.name: node for node in graph.nodes if dynamic and is_linear(node)}


class OutputError:
    """Measures what rounding some layers does to the network's output, on the first batch."""

    def __init__(self, config: RunConfig, engine: RankEngine, source: Data, scales: Scales) -> None:
        self._config, self._engine, self._source = config, engine, source
        self._values, self._graph = scales.values, engine.context.plan.graph
        self._by_row = _by_row(config, self._graph)
        self._tensors = {**engine.tensors, **engine.derived.tensors}
        self._make = PACKED if config.quant.weights == INT4 else WEIGHT_RECIPE
        self.exact = self._outputs(frozenset())
        """This rank's own parts of the outputs without any rounding."""

    def __call__(self, rounded: AbstractSet[str]) -> float:
        """Returns the noise as a share of the output's power, the same on all ranks.

        Of an output that is not finite it is infinite.
        """
        with self._rounded_weights(rounded):
            return noise_share(self.exact, self._outputs(rounded))

    def _outputs(self, rounded: AbstractSet[str]) -> list[Tensor]:
        # This rank's own parts, microbatch after microbatch.
        outputs: list[Tensor] = []
        for context, module in zip(self._engine.contexts, self._engine.modules, strict=True):
            module.watch(functools.partial(self._see, context, rounded, outputs))
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
                held.data.copy_(rounded_weight({"make": self._make, **weight_form(node)}, held))
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

    def _see(
        self,
        context: Context,
        rounded: AbstractSet[str],
        outputs: list[Tensor],
        name: str,
        value: Any,
    ) -> None:
        if any(name == self._by_row[layer].inputs[0] for layer in self._by_row.keys() & rounded):
            value.copy_(fake_quantized_rows(value))
        if name in rounded and name in self._values and name not in self._by_row:
            value.copy_(fake_quantized(value, self._values[name]))
        if name == context.plan.graph.output:
            own = own_part(context, name, value)
            outputs += [] if own is None else [own[0].double().cpu()]
