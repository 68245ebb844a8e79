"""Builds an engine for each region of a rank, or reads it from the user's cache.

    region --> torch.export --> key of graph, weights, shapes, precision, versions and GPU
                                 |- ~/.cache/hires/engines/KEY.engine is whole      read
                                 '- else                                            built and kept

So a second run, another rank with the same stage, and both directions of gems read what one rank
has built. What the library cannot build runs node by node, with a warning that has the cause.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.export import ExportedProgram

import hires
from hires.core.config.run_config import RunConfig
from hires.engine.build import RankEngine
from hires.engine.engine_files import built_engine, engine_key
from hires.engine.region_calls import Compilation, Input, RegionCall, blank, calls_of
from hires.engine.region_export import RegionModule, entering, exported, leaving, program_facts
from hires.engine.tensorrt_library import Run, TensorRT
from hires.parallel.compiled_region import CompiledRegion
from hires.parallel.context import Context
from hires.parallel.stage import StageModule

log = logging.getLogger(__name__)

Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


class Library(Protocol):
    """What builds and runs engines: :class:`hires.engine.tensorrt_library.TensorRT`."""

    name: str

    def facts(self) -> dict[str, Any]:
        """Returns what an engine depends on beside its graph, as plain values."""

    def build(self, program: ExportedProgram, inputs: Sequence[Tensor]) -> bytes:
        """Returns an engine as its file holds it."""

    def load(self, data: bytes, outputs: Sequence[Tensor]) -> Run:
        """Returns the function that it computes, whose values are like ``outputs``."""


@dataclass
class EngineBuild(Compilation):
    """What was built on one rank, as ``metrics.jsonl`` has it."""

    engines: list[dict[str, Any]] = field(default_factory=list)
    """Of each engine: ``key`` (the name of its file), ``region`` (first and last node), ``state``
    (``built`` or ``read``), ``bytes`` and ``seconds``."""


class RegionEngines:
    """The engines of a region, one for each shape and type of its inputs."""

    def __init__(self, region: CompiledRegion) -> None:
        self._span = region.span
        self._runs: dict[Shapes, Run] = {}
        self._missed = set[Shapes]()

    def add(self, inputs: Sequence[Tensor], run: Run) -> None:
        """Keeps what computes inputs of these shapes and types."""
        self._runs[_shapes_of(inputs)] = run

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...] | None:
        """Returns the region's outputs; None: it has no engine for such inputs."""
        shapes = _shapes_of(inputs)
        run = self._runs.get(shapes)
        if run is None:
            if shapes not in self._missed:
                self._missed.add(shapes)
                log.warning("%s has no engine for %s, and runs node by node", self._span, shapes)
            return None
        return tuple(map(leaving, run(*map(entering, inputs))))


def build_engines(
    engine: RankEngine,
    config: RunConfig,
    library: Library | None = None,
    folder: Path | None = None,
    calls: Mapping[tuple[int, int], Sequence[RegionCall]] | None = None,
) -> EngineBuild:
    """Gives each region of a rank its engines; ``compile_s`` is left to the caller.

    ``library`` is TensorRT if it is None, ``folder`` that of the files, if not the usual one, and
    ``calls`` are those of a step, if they are not to be rehearsed.
    """
    library = library or TensorRT(engine.device.torch, config.precision.name == "tf32")
    facts = {
        "hires": hires.__version__,
        "torch": str(torch.__version__),
        "precision": config.precision.name,
        "library": library.name,
        **library.facts(),
    }
    calls, made = calls or calls_of(engine, config), EngineBuild(0.0, 0, 0)
    for direction, module in enumerate(engine.modules):
        for number, region in enumerate(module.regions):
            made.regions += 1
            own = calls.get((direction, number), [])
            try:
                place = engine.contexts[direction], folder
                made.engines += _build(region, own, module, library, facts, *place)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of any class: the library's own, torch's, the system's
                region.give_up(error, library.name)
                made.failed += 1
    return made


def _build(
    region: CompiledRegion,
    calls: Sequence[RegionCall],
    module: StageModule,
    library: Library,
    facts: dict[str, Any],
    context: Context,
    folder: Path | None,
) -> list[dict[str, Any]]:
    engines, notes = RegionEngines(region), []
    for call in calls:
        began_s = time.perf_counter()
        if not all(isinstance(one, Input) for one in call.inputs):
            raise TypeError("it reads a list of tensors, and an engine reads tensors only")
        given = [blank(one, context.device) for one in call.inputs]
        inputs = [entering(one).detach() for one in given]
        exact = RegionModule(region, context, module.tensors)
        program = exported(exact, inputs)
        outputs = _outputs(program)
        key = engine_key({**facts, **program_facts(program, inputs)})

        def build(program: ExportedProgram = program, inputs: list[Tensor] = inputs) -> bytes:
            return library.build(program, inputs)

        kept = built_engine(key, build, folder)
        engines.add(given, library.load(kept.data, outputs))
        note = {
            "key": key,
            "region": region.span,
            "state": "built" if kept.built else "read",
            "bytes": len(kept.data),
            "seconds": round(time.perf_counter() - began_s, 3),
        }
        log.info("%(state)s engine %(key)s of %(region)s in %(seconds).1f s", note)
        notes.append(note)
    region.use(engines)
    return notes


def _outputs(program: ExportedProgram) -> list[Tensor]:
    """Returns tensors without memory, of the shapes and types of a program's outputs."""
    [*_, last] = program.graph.nodes
    values = [node.meta["val"] for node in last.args[0]]
    if not values or not all(isinstance(one, Tensor) for one in values):
        raise TypeError("its values are no tensors")
    return [torch.empty(one.shape, dtype=one.dtype, device="meta") for one in values]


def _shapes_of(tensors: Sequence[Tensor]) -> Shapes:
    return tuple((tuple(one.shape), one.dtype) for one in tensors)
