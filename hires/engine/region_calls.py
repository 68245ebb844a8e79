"""Finds with what a step calls the regions of a rank: one step is rehearsed without memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hires.core.config.run_config import RunConfig
from hires.engine.build import RankEngine
from hires.engine.footprint import rehearse
from hires.parallel.context import Context


class Input(NamedTuple):
    """A tensor that a region takes."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool


class RegionCall(NamedTuple):
    """With what a region is called."""

    inputs: tuple[Any, ...]
    """An :class:`Input` for each tensor; a list has a tuple of them."""
    grad: bool
    recomputing: bool
    lowered: torch.dtype | None
    """Type of autocast."""


@dataclass
class Compilation:
    """What was compiled on one rank, as ``metrics.jsonl`` has it."""

    compile_s: float
    regions: int
    failed: int
    """Regions that run node by node."""


def calls_of(engine: RankEngine, config: RunConfig) -> dict[tuple[int, int], list[RegionCall]]:
    """Returns with what a step calls each region, each once, by direction and number."""
    plan, by_region = engine.context.plan, dict[tuple[int, int], dict[RegionCall, None]]()

    def watch(rehearsed: RankEngine) -> None:
        for direction, module in enumerate(rehearsed.modules):
            context = rehearsed.contexts[direction]
            for number, region in enumerate(module.regions):
                calls = by_region.setdefault((direction, number), {})

                def note(
                    values: list[Any],
                    calls: dict[RegionCall, None] = calls,
                    context: Context = context,
                ) -> None:
                    kind = context.device.type
                    low = torch.get_autocast_dtype(kind)
                    lowered = low if torch.is_autocast_enabled(kind) else None
                    grad = torch.is_grad_enabled()
                    calls[RegionCall(seen(values), grad, context.recomputing, lowered)] = None

                region.watch = note

    rehearse(config, plan, engine.context.rank, engine.tensors, watch)
    return {key: [*calls] for key, calls in by_region.items()}


def seen(item: Any) -> Any:
    """Returns what a call shows of its inputs: an :class:`Input` for each tensor."""
    if isinstance(item, Tensor):
        return Input(item.shape, item.stride(), item.dtype, item.requires_grad)
    return tuple(map(seen, item))


def blank(item: Any, device: torch.device) -> Any:
    """Returns zeros, with strides and need of a gradient, as a call has its inputs."""
    if not isinstance(item, Input):
        return [blank(one, device) for one in item]
    made = torch.empty_strided(item.shape, item.strides, dtype=item.dtype, device=device).zero_()
    return made.requires_grad_(item.needs_grad)
