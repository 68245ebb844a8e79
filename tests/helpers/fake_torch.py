"""Stands for the process with torch, and answers at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

from hires.core.config.run_config import RunConfig
from hires.plan.graph import Graph
from hires.plan.memory import RankMemory
from hires.plan.plan import Plan

MIB_RANK = RankMemory(1 << 18, 1 << 17, 1 << 17, 1 << 18, 1 << 18)
"""A rank that needs one MiB."""


def fake_torch(
    network: Callable[[RunConfig], Graph],
    memory: Callable[[RunConfig, int], RankMemory] = lambda config, rank: MIB_RANK,
) -> type[Any]:
    """Returns a class in the place of ``TorchProcess``: answers for a config, and for a rank."""

    class FakeTorch(contextlib.nullcontext):
        tensors: ClassVar[dict[str, list[str]]] = {}

        def trace(self, config: RunConfig) -> Graph:
            return network(config)

        def footprint(self, config: RunConfig, plan: Plan) -> list[dict[str, int]]:
            return [memory(config, rank).to_dict() for rank in range(plan.ranks_per_replica)]

        def start(self) -> None:
            """It is there at once."""

        def __enter__(self) -> FakeTorch:
            return self

    return FakeTorch
