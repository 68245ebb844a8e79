"""Finds the layers that stay in float so that the output's error keeps a bound (``quant.auto``).

    alone      one layer's weights and values are rounded, no others: its error at the output
    together   all but the k worst are rounded: the smallest k is taken whose error is within bounds

Every error is measured on the first batch, in the run's own layout, as a share of the output's
power. Weights are rounded as ``quant.weights`` stores them. Of a linear layer with dynamic scales
the input is rounded, row by row, in the place of its value; so it is for other readers of it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from hires import comm
from hires.core.config.quant_config import DYNAMIC, INT4, noise_bound
from hires.core.config.run_config import RunConfig
from hires.engine.build import RankEngine
from hires.engine.calibration_values import decibels, fake_quantized, one_step, own_part
from hires.engine.loader import Data
from hires.engine.quantized_tensors import NUMBERS, PACKED, rounded_weight
from hires.parallel.context import Context
from hires.plan.graph import Graph, Node, describe
from hires.plan.operators.operator_facts import facts_of
from hires.plan.passes.int8_tensors import weight_form
from hires.plan.passes.quantise import is_linear
from hires.quant.row_scales import fake_quantized_rows
from hires.quant.scales import Scales

log = logging.getLogger(__name__)


def kept_layers(
    config: RunConfig, engine: RankEngine, source: Data, scales: Scales
) -> dict[str, str]:
    """Returns the layers to keep with their reasons; all ranks call it together."""
    bound = noise_bound(config.quant.auto)
    assert bound is not None
    measure = OutputError(config, engine, source, scales)
    graph = engine.context.plan.graph
    by_row = _by_row(config, graph)
    layers = [
        node
        for node in graph.nodes
        if facts_of(node.kind).multiplies and (node.name in scales.values or node.name in by_row)
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
    return {n: f"quant.auto: {decibels(1.0, alone[n]):.1f} dB alone" for n in worst[:enough]}


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
        self._make = PACKED if config.quant.weights == INT4 else NUMBERS
        self._exact = self._outputs(frozenset())

    def __call__(self, rounded: AbstractSet[str]) -> float:
        """Returns the noise as a share of the output's power, the same on all ranks.

        Of an output that is not finite it is infinite.
        """
        powers = torch.zeros(2, dtype=torch.float64)
        with self._rounded_weights(rounded):
            outputs = self._outputs(rounded)
        for exact, made in zip(self._exact, outputs, strict=True):
            powers += torch.stack([exact.square().sum(), (made - exact).square().sum()])
        comm.all_reduce(powers)
        signal, noise = powers.tolist()
        share = float(noise / signal if signal else noise)
        return share if math.isfinite(share) else math.inf

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
        if name in rounded and name not in self._by_row:
            value.copy_(fake_quantized(value, self._values[name]))
        if name == context.plan.graph.output:
            own = own_part(context, name, value)
            outputs += [] if own is None else [own[0].double().cpu()]
