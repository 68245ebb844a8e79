"""Turns configs into plans with all findings; nothing is started here.

The number of classes is read from the data, the network is traced, the layout is planned and
proved, and its memory is predicted. Points of a sweep share this work: a network is traced once at
each size, and points that differ only in keys that do not decide the plan have one plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import time
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hires.cli import answer_cache
from hires.cli.screens.screen import print_activity
from hires.cli.screens.show_plan import finding_lines
from hires.cli.tracing import TorchProcess
from hires.core.config.run_config import RunConfig, to_dict
from hires.core.errors import ConfigError, HiresError, PlanError, RunError
from hires.core.store import checkpoints
from hires.core.store.naming import run_name
from hires.plan.graph import Graph
from hires.plan.memory import room_of
from hires.plan.partition import layer_starts
from hires.plan.plan import Finding, Plan
from hires.plan.planner import make_plan
from hires.plan.search.advice import offered, would_fit
from hires.plan.search.layout_search import DEADLINE_S, Budget

FORECASTS_S = 100.0
"""Seconds after which no further memory is predicted but what the cache holds: a sweep of a
thousand different layouts would otherwise be planned for as long as it runs."""
UNRELATED = (
    "campaign",
    "results",
    "steps",
    "measure",
    "checkpoint",
    "task.lr",
    "comm.timeout_s",
    "launcher.port",
    "data.path",
    "data.classes",
    "data.length",
    "data.fit",
    "data.shuffle",
)
"""Keys that change neither the network, nor the plan, nor its memory. What is not named here may:
a new key costs time until it is thought about, and no wrong answer. Of ``data.classes`` the config
holds what follows, ``model.classes``."""
_DECIDE = ("image", "model", "data", "parallel", "precision", "comm", "task", "memory", "seed")
"""Parts of the config that may decide the memory together with the plan."""
_DERIVED = ("findings", "verdict", "totals", "memory", "placement")
"""What follows from the rest of a plan."""
_PARTS = ("params_bytes", "grads_bytes", "optimizer_bytes", "activations_bytes", "buffers_bytes")
_MOST_GRAPHS = 128
"""Networks that are kept at the same time; a large one takes some megabytes."""


@dataclasses.dataclass(frozen=True)
class PackedPlan:
    """What a sweep keeps of a plan; thousands of whole ones would fill the memory."""

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


class Planner(contextlib.AbstractContextManager["Planner"]):
    """Plans configs with one process that has torch, which ends with its block."""

    def __init__(self, process: TorchProcess | None = None, forecasts_s: float = math.inf) -> None:
        """Takes what answers for torch, and the seconds for predictions that no cache holds."""
        self._process = TorchProcess() if process is None else process
        self._left_s = forecasts_s
        self._graphs: OrderedDict[str, Graph] = OrderedDict()
        self._plans: dict[str, PackedPlan] = {}
        self.classes: dict[str, int] = {}
        """Number of classes of each data that was looked at."""

    def __exit__(self, *error: Any) -> None:
        self._process.__exit__(*error)

    def plan(self, config: RunConfig, memory: bool = True) -> Plan:
        """Returns the plan of a config, with all findings.

        Args:
            config: as :func:`with_classes` returns it.
            memory: whether the memory of every rank is predicted and compared with what there is;
                a plan that does not fit comes with the changes that would.

        Raises:
            ConfigError: the network cannot be built or traced, or ``checkpoint.resume`` names
                nothing that the run can go on with.
            RunError: the process that has torch failed.
        """
        # A search for what would fit ends in time for an answer within DEADLINE_S.
        deadline_s = time.monotonic() + DEADLINE_S
        self._check_resume(config)
        plan = self._planned(config)
        if memory:
            print_activity("predicting the memory ...")
            self.add_forecast(config, plan, deadline_s)
        print_activity("")
        return plan

    def packed(self, config: RunConfig) -> PackedPlan:
        """Returns the plan of one point of a sweep; raises what :meth:`plan` raises."""
        self._check_resume(config)  # no part of the plan, so it is not in the key
        key = json.dumps(deciding(config), sort_keys=True)
        if key not in self._plans:
            plan = self._planned(config)
            shortage = self.add_memory(config, plan)
            if shortage is not None:
                plan.findings.append(Finding("error", "memory.limit", shortage))
            peaks = [entry["peak_bytes"] for entry in plan.memory]
            everyone = dataclasses.replace(room_of(config), rank_bytes=None)
            self._plans[key] = PackedPlan(
                refusal="; ".join(_texts(plan, "error")),
                warnings=tuple(_texts(plan, "warning")),
                ranks=config.parallel.num_ranks,
                peak_bytes=max(peaks, default=None),
                needs_bytes=everyone.needed(plan) if peaks else 0,
                packed=zlib.compress(json.dumps(plan.to_dict()).encode(), 1) if plan.ok else b"",
            )
        return self._plans[key]

    def add_forecast(self, config: RunConfig, plan: Plan, deadline_s: float | None = None) -> None:
        """Adds the memory of every rank, and an error with what would fit if it does not.

        The search for what would fit ends at ``deadline_s`` on the monotonic clock.
        """
        began_s = time.monotonic()
        shortage = self.add_memory(config, plan)
        if shortage is None:
            return
        print_activity("looking for what would fit ...")
        # A quarter of the time is left for the search, however long the plan itself took.
        deadline_s = began_s + DEADLINE_S if deadline_s is None else deadline_s
        budget = Budget(max(deadline_s, time.monotonic() + DEADLINE_S / 4))

        def predicted(changed: RunConfig) -> Plan | None:
            with contextlib.suppress(HiresError):  # a change that makes no sense here
                # The graph serves as long as the microbatches stay as large.
                same = changed.parallel.pieces == config.parallel.pieces
                other = make_plan(changed, plan.graph if same else self._traced(changed))
                if other.ok:
                    other.memory = self._forecast(changed, other)
                    return other
            return None

        plan.findings.append(would_fit(config, shortage, plan.graph, predicted, budget))

    def add_memory(self, config: RunConfig, plan: Plan) -> str | None:
        """Adds the memory of every rank to a plan, and returns what does not fit, or None.

        A prediction that fails is a warning: the run may go well all the same.
        """
        if not plan.ok:
            return None
        began_s = time.monotonic()
        try:
            plan.memory = self._forecast(config, plan)
        except HiresError as error:
            text = f"the memory of the ranks could not be predicted: {error}"
            plan.findings.append(Finding("warning", "memory", text))
            return None
        finally:
            self._left_s -= time.monotonic() - began_s
        return room_of(config).shortage(config, plan)

    def _planned(self, config: RunConfig) -> Plan:
        """Returns the plan of a config without its memory."""
        graph = self._traced(config)
        return make_plan(config, graph, offered(config, len(layer_starts(graph))))

    def _check_resume(self, config: RunConfig) -> None:
        """Refuses a checkpoint of another run that this one cannot begin with."""
        source = config.checkpoint.source
        if source is None:
            return
        run = Path(config.results) / config.campaign / run_name(config)
        candidates, _ = checkpoints.candidates(run, config)
        others = [one for one in candidates if one.path.parent != run / checkpoints.FOLDER]
        checkpoints.refuse_other_network(others, shapes_of(self._traced(config)), source)

    def _traced(self, config: RunConfig) -> Graph:
        """Returns the graph of the network, which is traced once at each size.

        If it cannot be traced, the error also says what is wrong with the layout.
        """
        key = answer_cache.trace_key(config)
        if key not in self._graphs:
            print_activity("tracing the network ...")
            try:
                self._graphs[key] = self._process.trace(config)
            except ConfigError as error:
                from hires.plan.checks import check_numbers

                others = [f"{f.text} [{f.key}]" for f in [*check_numbers(config), *offered(config)]]
                raise ConfigError("; ".join([str(error), *others])) from None
            if len(self._graphs) > _MOST_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def _forecast(self, config: RunConfig, plan: Plan) -> list[dict[str, int]]:
        """Returns the memory of every rank of a replica, from the user's cache if it is there."""
        values = {key: value for key, value in deciding(config).items() if key in _DECIDE}
        values["memory"].pop("limit")
        facts = {key: value for key, value in plan.to_dict().items() if key not in _DERIVED}
        key = answer_cache.key_of(values, facts)
        memory: list[dict[str, int]] = answer_cache.read("memory", key)
        names = {*_PARTS, "peak_bytes"}
        whole = isinstance(memory, list) and len(memory) == plan.ranks_per_replica
        if not whole or not all(isinstance(one, dict) and set(one) == names for one in memory):
            if self._left_s <= 0:
                raise RunError("the time for it is used up; planning again goes on with the cache")
            memory = self._process.footprint(config, plan)
            answer_cache.write("memory", key, memory)
        return memory


def planned(config: RunConfig, memory: bool = True) -> Plan:
    """Returns the plan of one config, see :meth:`Planner.plan`."""
    with Planner() as planner:
        return planner.plan(config, memory)


def with_classes(config: RunConfig, seen: dict[str, int] | None = None) -> RunConfig:
    """Returns the config with ``model.classes`` as many as the data has, unless it is set.

    The number of classes of data that was ``seen`` is not looked up again.

    Raises:
        ConfigError: the data folder is missing or unusable, or has more classes than the network.
    """
    seen = {} if seen is None else seen
    data = {**vars(config.data), "channels": config.model.channels, "loss": config.loss}
    key = json.dumps(data, sort_keys=True)
    if key not in seen:
        from hires.data.source import open_data

        seen[key] = open_data(config).num_classes
    num_classes = seen[key]
    classes = config.model.classes or num_classes
    if classes < num_classes and config.target_size is None:
        raise ConfigError(
            f"model.classes={classes} is fewer than the {num_classes} classes of the data; "
            f"leave model.classes out, or set it to {num_classes} or more"
        )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, classes=classes))


def require_feasible(plan: Plan) -> None:
    """Prints warnings and notes; refuses a plan that has errors.

    Raises:
        PlanError: the plan has errors; the message holds all of them.
    """
    others = [finding for finding in plan.findings if finding.severity != "error"]
    for line in finding_lines([dataclasses.asdict(finding) for finding in others]):
        print(line, file=sys.stderr)
    if not plan.ok:
        raise PlanError(f"the layout cannot run: {'; '.join(_texts(plan, 'error'))}")


def deciding(config: RunConfig) -> dict[str, Any]:
    """Returns a config as plain values without the keys that do not decide its plan."""
    values = to_dict(config)
    for key in UNRELATED:
        section, _, name = key.rpartition(".")
        del (values[section] if section else values)[name]
    if config.model.name != "custom":  # a user's function may draw what it builds
        del values["seed"]
    return values


def shapes_of(graph: Graph) -> Mapping[str, list[int]]:
    """Returns the shapes of a network's parameters and buffers, in the order of its layers."""
    names = dict.fromkeys(name for node in graph.nodes for name in node.params)
    return {name: list(graph.params[name].shape) for name in names}


def _texts(plan: Plan, severity: str) -> list[str]:
    return [f"{f.text} [{f.key}]" for f in plan.findings if f.severity == severity]
