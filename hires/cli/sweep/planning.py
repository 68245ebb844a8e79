"""Plans many points without doing the same work twice.

Points that differ only in keys that do not decide the plan share it, points of one network at one
size share its trace, and one process with torch serves all of them.
"""

from __future__ import annotations

import json
import time
import zlib
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

from hires.cli.compose.plan_keys import deciding
from hires.cli.forecast import add_memory
from hires.cli.prepare import classes_of_data, from_elsewhere, shapes_of, traced, with_classes
from hires.cli.tracing import TorchProcess
from hires.core.config.run_config import RunConfig
from hires.core.store.checkpoints import refuse_other_network
from hires.plan.graph import Graph
from hires.plan.memory import room_of
from hires.plan.partition import layer_starts
from hires.plan.plan import Finding, Plan
from hires.plan.planner import make_plan
from hires.plan.search.advice import offered

FORECASTS_S = 100.0
"""Seconds after which no further memory is predicted but what the cache holds: a sweep of a
thousand different layouts would otherwise be planned for as long as it runs."""
_MOST_GRAPHS = 128
"""Networks that are kept at the same time; a large one takes some megabytes."""


@dataclass(frozen=True)
class Planned:
    """What is kept of a plan; thousands of whole ones would fill the memory."""

    refusal: str
    """All its errors; nothing if it can run."""
    warnings: tuple[str, ...]
    ranks: int
    peak_bytes: int | None
    """Predicted memory of the rank that needs most; None if unknown."""
    needs_bytes: int
    """Predicted memory of all ranks with their libraries; 0 if unknown."""
    packed: bytes = b""
    """``plan.json``, packed; nothing if it cannot run."""

    def facts(self) -> dict[str, Any]:
        """Returns what ``plan.json`` holds."""
        facts: dict[str, Any] = json.loads(zlib.decompress(self.packed))
        return facts


class Planner:
    """Plans the points of one sweep."""

    def __init__(self, process: TorchProcess) -> None:
        """Takes the process that answers for torch."""
        self._process = process
        self._graphs: OrderedDict[str, Graph] = OrderedDict()
        self._plans: dict[str, Planned] = {}
        self._classes: dict[str, int] = {}
        self._spent_s = 0.0

    def with_classes(self, config: RunConfig) -> RunConfig:
        """Returns the config with the classes of its data, which is looked at once.

        Raises:
            ConfigError: the data is missing, or has more classes than the network.
        """
        data = {**vars(config.data), "channels": config.model.channels, "loss": config.loss}
        key = json.dumps(data, sort_keys=True)
        if key not in self._classes:
            self._classes[key] = classes_of_data(config)
        return with_classes(config, self._classes[key])

    def plan(self, config: RunConfig) -> Planned:
        """Returns the plan of a config, as :meth:`with_classes` returns it.

        Raises:
            ConfigError: the network cannot be built or traced, or ``checkpoint.resume`` names
                nothing that the run can go on with.
            RunError: the process that has torch failed.
        """
        source = config.checkpoint.source
        if source is not None:  # no part of the plan, so it is not in the key
            shapes = shapes_of(self._traced(config))
            refuse_other_network(from_elsewhere(config), shapes, source)
        key = json.dumps(deciding(config), sort_keys=True)
        if key not in self._plans:
            self._plans[key] = self._planned(config)
        return self._plans[key]

    def _planned(self, config: RunConfig) -> Planned:
        graph = self._traced(config)
        plan = make_plan(config, graph, offered(config, len(layer_starts(graph))))
        shortage = self._predict(config, plan)
        if shortage is not None:
            plan.findings.append(Finding("error", "memory.limit", shortage))
        errors = [f"{f.text} [{f.key}]" for f in plan.findings if f.severity == "error"]
        warnings = [f"{f.text} [{f.key}]" for f in plan.findings if f.severity == "warning"]
        peaks = [entry["peak_bytes"] for entry in plan.memory]
        everyone = replace(room_of(config), rank_bytes=None)
        return Planned(
            refusal="; ".join(errors),
            warnings=tuple(warnings),
            ranks=config.parallel.num_ranks,
            peak_bytes=max(peaks, default=None),
            needs_bytes=everyone.needed(plan) if peaks else 0,
            packed=zlib.compress(json.dumps(plan.to_dict()).encode(), 1) if plan.ok else b"",
        )

    def _traced(self, config: RunConfig) -> Graph:
        """Returns the graph of a config's network, which is traced once at each size."""
        values = deciding(config)
        samples = max(1, config.batch // config.parallel.pieces)
        decides = [values["model"], values.get("seed"), config.image, samples, config.task.name]
        key = json.dumps(decides, sort_keys=True)
        if key not in self._graphs:
            self._graphs[key] = traced(config, self._process)
            if len(self._graphs) > _MOST_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def _predict(self, config: RunConfig, plan: Plan) -> str | None:
        """Adds the memory while there is time for it, and returns what does not fit."""
        began_s = time.monotonic()
        process = self._process if self._spent_s < FORECASTS_S else None
        shortage = add_memory(config, plan, process)
        self._spent_s += time.monotonic() - began_s
        return shortage
