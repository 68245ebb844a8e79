"""Quantised networks in one process: scales from one run in float, tiles as threads."""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hires.core.config.run_config import from_dict
from hires.engine.build import place_tensors
from hires.engine.derived_tensors import DerivedTensors
from hires.nets.trace import trace
from hires.parallel.compile_node import compile_node
from hires.parallel.context import Context
from hires.parallel.cursor import Cursor
from hires.parallel.stage import StageModule
from hires.plan.graph import INPUT, Graph, Node
from hires.plan.operators.formulas import unfused
from hires.plan.operators.operator_facts import facts_of
from hires.plan.passes.int8 import params_digest, quantised
from hires.plan.passes.int8_state import Quantiser
from hires.plan.passes.rewriting import rewritten
from hires.plan.plan import Plan
from hires.plan.rules import TILED
from hires.plan.tiling import own_rects
from hires.quant.affine import LAST, Affine, affine_of
from hires.quant.scales import Scales, write_scales
from tests.helpers.simulated_tiles import FUSED, Gathers, laid_out
from tests.helpers.small_nets8 import SIZES, network

IN_FLOAT = from_dict({"task": {"name": "infer"}, "precision": {"name": "fp32"}})
"""An inference whose network the passes fuse, before it is quantised."""


class QuantisedNet:
    """A network, fused and quantised by the ranges of its values for one batch."""

    def __init__(
        self,
        net: nn.Module,
        x: Tensor,
        kept: Mapping[str, str] | None = None,
        linear: str = "static",
        largest: int = 127,
    ) -> None:
        torch.manual_seed(0)
        self.net, self.x = net.eval(), x.contiguous(memory_format=torch.channels_last)
        self.own = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        self.float_graph = rewritten(IN_FLOAT, trace(net, list(x.shape), False))
        self.float_values = self.run(self.float_graph)[0]
        self.affines = {
            name: affine_of(float(value.min()), float(value.max()))
            for name, value in self.float_values.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        self.graph = quantised(self.float_graph, self.affines, kept or {}, linear, largest)
        self.kept, self._largest = kept or {}, largest

    @property
    def kinds(self) -> collections.Counter[str]:
        """How often each operator stands in the quantised network."""
        return collections.Counter(node.kind for node in self.graph.nodes)

    def run(self, graph: Graph, grid: tuple[int, int] = (1, 1), fuse: int = FUSED) -> list[Any]:
        """Returns all values of each tile, by name; tiles get the pixels of the image they need."""
        graph, stage = laid_out(graph, grid, fuse)
        tiles = range(stage.num_tiles)
        plan = Plan(graph, [stage], [], 1, 1, False, "float32", [["F0"]] * stage.num_tiles)
        meeting, shared = threading.Barrier(stage.num_tiles), dict[int, Tensor]()
        group = SimpleNamespace(ranks=list(tiles), shared=None)

        def run_tile(tile: int) -> dict[str, Any]:
            cursor = Gathers(tile, meeting, shared)
            for op in stage.comm:
                cursor.elements[op.node].append(op.elements)
            context = Context(plan, tile, collections.defaultdict(lambda: group), cursor)  # type: ignore[arg-type]
            derived = DerivedTensors([context], self.own).tensors
            place_tensors(derived, torch.float32, graph)
            tensors = {**self.own, **derived}
            r0, r1, c0, c1 = context.extent(INPUT)
            values: dict[str, Any] = {INPUT: self.x[:, :, r0:r1, c0:c1]}
            with torch.no_grad():
                for node in graph.nodes:
                    values[node.name] = compile_node(node, context, tensors)(dict(values))
                    value = values[node.name]
                    if isinstance(value, Tensor) and node.shape is not None:
                        wanted = "uint8" if value.dtype == torch.uint8 else "float32"
                        assert node.dtype == wanted, (node.name, node.dtype, value.dtype)
            return values

        def guarded(tile: int) -> dict[str, Any]:
            try:
                return run_tile(tile)
            except BaseException:
                meeting.abort()
                raise

        with ThreadPoolExecutor(stage.num_tiles) as pool:
            futures = [pool.submit(guarded, tile) for tile in tiles]
            errors = [f.exception() for f in futures if f.exception() is not None]
            for error in errors:
                if not isinstance(error, threading.BrokenBarrierError):
                    raise error  # type: ignore[misc]
            self.layout, self.stage = stage.layout, stage
            return [future.result() for future in futures]

    @torch.no_grad()
    def output_of_stage(self) -> Tensor:
        """Returns the output as ranks compute it, which write some values over others."""
        graph, stage = laid_out(self.graph, (1, 1))
        plan = Plan(graph, [stage], [], 1, 1, False, "float32", [["F0"]])
        group: Any = SimpleNamespace(ranks=[0], shared=None)
        context = Context(plan, 0, collections.defaultdict(lambda: group), Cursor([], {}))
        derived = DerivedTensors([context], self.own).tensors
        place_tensors(derived, torch.float32, graph)
        module = StageModule(context, {**self.own, **derived})
        return module.forward({INPUT: self.x})[graph.output]  # type: ignore[no-any-return]

    def output(self, grid: tuple[int, int] = (1, 1), fuse: int = FUSED) -> Tensor:
        """Returns the quantised network's output, put together from tiles."""
        made = self.run(self.graph, grid, fuse)
        name, shape = self.graph.output, self.graph.shape(self.graph.output)
        parts = [values[name] for values in made]
        if self.layout[name] != TILED:
            assert all(torch.equal(parts[0], part) for part in parts), "tiles differ"
            return parts[0]  # type: ignore[no-any-return]
        whole = torch.full(shape, torch.nan)
        for part, (r0, r1, c0, c1) in zip(parts, own_rects(shape[2:], grid), strict=True):
            whole[:, :, r0:r1, c0:c1] = part
        return whole

    def scales(self) -> Scales:
        """Returns what a calibration would find."""
        ranges = {name: (one.real(0), one.real(LAST)) for name, one in self.affines.items()}
        facts = params_digest(self.float_graph), "min_max", len(self.x)
        return Scales(*facts, self.affines, ranges)

    def write(self, path: Path) -> None:
        """Writes the scales as a calibration would."""
        write_scales(path, self.scales())

    def layer_errors(self) -> dict[str, float]:
        """Returns by how many steps each value differs from a layer in float64, at most.

        Each layer reads what the numbers of its inputs stand for, and weights that were rounded to
        8 bits and back. Values that are computed as real numbers are relative to their largest.
        """
        made = self.run(self.graph)[0]
        maker = Quantiser(self.float_graph, self.affines, self.kept)
        maker.run()
        real: dict[str, Any] = {INPUT: self.x.double()}
        for name in made.keys() - {INPUT}:
            real[name] = made[name].double()
        for name, numbers in maker.numbers.items():
            inner = numbers.name if numbers.name in made else f"{numbers.name}.quantized"
            real[name] = (made[inner].double() - numbers.affine.zero_point) * numbers.affine.scale
        graph, stage = laid_out(self.float_graph, (1, 1))
        plan = Plan(graph, [stage], [], 1, 1, False, "float64", [["F0"]])
        group: Any = SimpleNamespace(ranks=[0], shared=None)
        context = Context(plan, 0, collections.defaultdict(lambda: group), Gathers(0, None, {}))  # type: ignore[arg-type]
        tensors = {n: t.double() for n, t in self.own.items()}
        tensors |= DerivedTensors([context], self.own).tensors
        errors: dict[str, float] = {}
        for node in graph.nodes:
            if node.name not in made or node.name in self.graph.kept:
                continue
            held = self._rounded_weights(node, tensors)
            sums = maker.numbers.get(f"{node.name}.sum")
            if sums is not None:  # rounded before an activation, too
                bare = dataclasses.replace(node, args={**node.args, "activation": None})
                with torch.no_grad():
                    y = compile_node(bare, context, held)(dict(real))
                errors[sums.name] = _steps(y, sums.affine, made[sums.name])
                op, args = unfused(node.args["activation"], {"value": sums.name})
                node = dataclasses.replace(node, op=f"{op}.default", args=args)
            with torch.no_grad():
                y = compile_node(node, context, held)(dict(real))
            numbers = maker.numbers.get(node.name)
            if numbers is None or numbers.name != node.name:  # computed as real numbers
                errors[node.name] = float((y - made[node.name]).abs().max() / y.abs().max())
                continue
            inner = f"{node.name}.quantized" if node.name == graph.output else node.name
            errors[node.name] = _steps(y, numbers.affine, made[inner])
        return errors

    def _rounded_weights(self, node: Node, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        held = {name: tensor.detach().double() for name, tensor in tensors.items()}
        facts = facts_of(node.kind)
        if facts.multiplies and node.name not in self.graph.kept:
            name = node.args["weight"]["param"]
            weight = held[name]
            if facts.weight_channels:  # (C, K / groups, ...): a scale for each output channel
                apart = weight.view(node.args["groups"], -1, *weight.shape[1:])
                scale = apart.abs().amax((1, 3, 4), keepdim=True) / self._largest
                held[name] = ((apart / scale).round() * scale).view(weight.shape)
            else:
                scale = weight.abs().amax([*range(1, weight.dim())], keepdim=True) / self._largest
                held[name] = (weight / scale).round() * scale
        return held


@functools.cache
def small_quantised(name: str, largest: int = 127) -> QuantisedNet:
    """Returns a small network of every operator with a rule, for two random images of its size."""
    torch.manual_seed(2)
    net = network(name, SIZES[name])
    return QuantisedNet(net, torch.rand(2, 3, *SIZES[name]), largest=largest)


def _steps(y: Tensor, affine: Affine, numbers: Tensor) -> float:
    # By how many steps numbers differ from those of real ones, at most.
    expected = (y / affine.scale).round() + affine.zero_point
    return float((expected.clamp(0, LAST) - numbers.double()).abs().max())
