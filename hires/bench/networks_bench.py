"""Compares public networks in several layouts with one process: ``hires bench networks``.

``python -m hires.bench.networks_bench`` makes each network as its library makes it, plans it in
every layout, and runs one step of each on real ranks in float64 beside the plain module. Exit
codes: 0 all equal, 1 some network is refused or differs, 2 bad options.

A network that fails, hangs or needs too much memory is a row with its reason, and stops no other:
every trace and every layout has processes of its own, which a server with all libraries forks.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib.metadata
import itertools
import logging
import math
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from hires.bench.bench_output import Benchmark, BenchTable, Result, Results, option
from hires.bench.compared_step import (
    Settings,
    compare_step,
    config_from,
    limit_memory,
    overrides,
)
from hires.bench.contestants import bench_data
from hires.bench.ranks import preload, run_ranks
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, HiresError
from hires.core.store.reading import read_named_values
from hires.core.units import GIB
from hires.engine.verify_bounds import TOLERANCE
from hires.nets.trace import trace_config
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.plan.rules import GATHER

_DATA = bench_data("networks.yaml")
ONE_MORE = "one more"
"""Heading of the layout that is another one from row to row."""
OWN_KEYS = ("target", "args")
"""Keys of a row that are no keys of the config."""

PIECES = ("replicas", "directions", "microbatches")
"""Keys of a layout whose product is the microbatches of a step."""
LONGEST = 300
"""Characters of a reason in the table."""
Row = dict[str, Any]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NetworksOptions:
    """The options of ``hires bench networks``."""

    overrides: tuple[str, ...] = option(
        (),
        "keys of every config, and `samples` of a microbatch",
        flag="overrides",
        nargs="*",
        metavar="KEY=VALUE",
    )
    only: str = option("*", "patterns of LIBRARY/NAME with commas between, as 'timm/*,*swin*'")
    file: str = option("", "YAML file of other networks, in the form of hires/bench/networks.yaml")
    timeout: float = option(60.0, "seconds for one trace or one layout")
    memory: float = option(5.0, "GiB for one process")


@dataclass(frozen=True)
class BenchedNetwork:
    """A row: a network, and what is run."""

    library: str
    name: str
    settings: Settings
    """Keys of the config but those of the layouts; ``samples`` of a microbatch, the same in every
    layout: one trace serves all."""
    layouts: dict[str, Settings]

    def in_layout(self, keys: Settings) -> Settings:
        """Returns all keys of the config of one layout."""
        settings = {**self.settings, **keys}
        pieces = math.prod(settings.get(f"parallel.{key}", 1) for key in PIECES)
        settings["batch"] = settings.pop("samples") * pieces
        return settings


def measure(options: NetworksOptions) -> Results:
    """Yields all rows after each new one, and whether they are equal."""
    networks = chosen(options)
    preload(_DATA["preload"])
    rows: list[Row] = []
    for network in networks:
        rows.append(compared(network, options.timeout, options.memory))
        yield {"tolerance": TOLERANCE, "ok": all(row["ok"] for row in rows), "rows": rows}
        log.info(
            "network %d of %d: %s/%s, %.0f s, %s",
            *(len(rows), len(networks), network.library, network.name, rows[-1]["seconds"]),
            "equal" if rows[-1]["ok"] else f"not equal in {', '.join(reasons(rows[-1]))}",
        )


def chosen(options: NetworksOptions) -> list[BenchedNetwork]:
    """Returns the rows that the options name; ConfigError: there are none, or their form."""
    data = {**_DATA, **read_named_values(options.file)} if options.file else _DATA
    changed = dict(_override(word) for word in options.overrides)
    patterns, turns = options.only.split(","), itertools.cycle(data["in_turn"].items())
    networks = []
    for library, name, row in _rows(data["networks"], options.file):
        more = {f"{ONE_MORE}: {turn}": layout for turn, layout in itertools.islice(turns, 1)}
        if any(fnmatch.fnmatch(f"{library}/{name}", pattern) for pattern in patterns):
            settings = {**data["every"], **settings_of(row), **changed}
            networks.append(BenchedNetwork(library, name, settings, {**data["layouts"], **more}))
    if not networks:
        raise ConfigError(f"--only {options.only!r} matches no LIBRARY/NAME of the networks")
    return networks


def settings_of(row: dict[str, Any]) -> Settings:
    """Returns the keys of the config that a row of the YAML file gives."""
    own = {key: value for key, value in row.items() if key not in OWN_KEYS}
    args = {f"model.args.{key}": value for key, value in row.get("args", {}).items()}
    return {"model.name": "custom", "model.target": row["target"], **args, **own}


def _rows(networks: Any, file: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields library, name and row of what a YAML file lists; ConfigError: it has another form."""
    for library, named in networks.items() if isinstance(networks, dict) else [("", None)]:
        for name, row in named.items() if isinstance(named, dict) else [("", None)]:
            if not isinstance(row, dict) or "target" not in row:
                raise ConfigError(
                    f"--file {file}: networks.{library}.{name} must be a row as {{target: "
                    f"'package.module:function', args: {{}}}}, not {row!r}"
                )
            yield library, name, row


def _override(word: str) -> tuple[str, Any]:
    key, equals, value = word.partition("=")
    if not equals:
        raise ConfigError(f"{word!r} is no KEY=VALUE, as task.name=infer")
    return key, yaml.safe_load(value)


def compared(network: BenchedNetwork, timeout_s: float, memory_gib: float) -> Row:
    """Returns the row of a network: what it is, and each layout's answer."""
    start = time.monotonic()
    row: Row = {"library": network.library, "network": network.name, "layouts": {}}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        row["version"] = importlib.metadata.version(network.library)
    limit = int(memory_gib * GIB)
    try:
        settings = {name: network.in_layout(keys) for name, keys in network.layouts.items()}
        configs = {name: config_from(keys) for name, keys in settings.items()}
        facts, plans = run_ranks(plan_all, 1, timeout_s, configs, limit)
    except HiresError as error:
        facts, plans = {"failure": reason_of(error)}, {}
    for name, plan in plans.items():
        begin = time.monotonic()
        answer = compare_step(configs[name], plan, timeout_s, limit)
        row["layouts"][name] = {
            **answer,
            "gathered": gathered(plan),
            "seconds": time.monotonic() - begin,
            "again": shlex.join(["hires", "verify", *overrides(settings[name])]),
        }
    equal = bool(plans) and all(answer["ok"] for answer in row["layouts"].values())
    return {**row, **facts, "ok": equal, "seconds": time.monotonic() - start}


def plan_all(rank: int, configs: dict[str, RunConfig], limit: int) -> tuple[Row, dict[str, Plan]]:
    """Returns facts about a network, and its plan in each of the configs, which trace alike."""
    limit_memory(limit)
    graph = trace_config(next(iter(configs.values())))
    facts = {
        "parameters": sum(p.num_elements for p in graph.params.values() if p.trainable),
        "nodes": len(graph.nodes),
    }
    return facts, {name: make_plan(config, graph) for name, config in configs.items()}


def gathered(plan: Plan) -> list[str]:
    """Returns the operators that read gathered maps, by name, with how often."""
    names = {node.name for node in plan.graph.nodes if node.kind == GATHER}
    readers = (node.kind for node in plan.graph.nodes if not names.isdisjoint(node.inputs))
    return [f"{kind} x{count}" for kind, count in sorted(Counter(readers).items())]


def reasons(row: Row) -> dict[str, str]:
    """Returns why a network is not equal, by the layouts to which that applies."""
    if "failure" in row:
        return {"all": row["failure"]}
    names: dict[str, list[str]] = {}
    for name, answer in row["layouts"].items():
        if not answer["ok"]:
            names.setdefault(reason_of(answer.get("failure", _difference(answer))), []).append(name)
    return {", ".join(layouts): reason for reason, layouts in names.items()}


def _difference(answer: dict[str, Any]) -> str:
    worst = answer.get("decisive")
    if answer.get("verdict") == "undecided" and worst is not None:
        return f"undecided: float64 itself differs by {worst['noise']:.1e} in {worst['name']}"
    return "it differs"


def reason_of(error: object) -> str:
    """Returns an error in one line of a table: of a traceback, its last one."""
    lines = str(error).strip().splitlines()
    text = lines[-1] if "Traceback" in lines[0] else lines[0]
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _facts(result: Result) -> list[str]:
    rows = result["rows"]
    answers = [answer for row in rows for answer in row["layouts"].values()]
    worst = max((a["max_rel_err"] for a in answers if a["max_rel_err"] is not None), default=0.0)
    equal = sum(row["ok"] for row in rows)
    return [
        f"{equal} of {len(rows)} networks are equal in all layouts, "
        f"{sum(a['ok'] for a in answers)} of {len(answers)} layouts (allowed: "
        f"{result['tolerance']:.0e}); the largest error of all is {worst:.1e}"
    ]


def _tables(result: Result) -> list[BenchTable]:
    names = [name for row in result["rows"] for name in row["layouts"]]
    columns = dict.fromkeys(name.partition(":")[0] for name in names)
    failed = [(row, *reason) for row in result["rows"] for reason in reasons(row).items()]
    return [
        BenchTable("Networks", [_cells(row, [*columns]) for row in result["rows"]]),
        BenchTable(
            "Not equal",
            [
                {"network": f"{row['library']}/{row['network']}", "layout": name, "reason": reason}
                for row, name, reason in failed
            ],
        ),
    ]


def _cells(row: Row, columns: list[str]) -> dict[str, str]:
    cells = {
        "network": f"{row['library']}/{row['network']}",
        "version": row.get("version", "-"),
        "parameters": f"{row['parameters']:,}" if "parameters" in row else "-",
    }
    for name in columns:
        key = next((key for key in row["layouts"] if key.partition(":")[0] == name), name)
        answer = row["layouts"].get(key, {})
        error = answer.get("max_rel_err")
        cells[name] = "-" if error is None else f"{error:.1e}"
        cells[name] += "*" * bool(answer.get("by_noise")) + key.removeprefix(name).replace(":", "")
    whole = {name: None for answer in row["layouts"].values() for name in answer["gathered"]}
    return {**cells, "gathered for": ", ".join(whole) or "-", "seconds": f"{row['seconds']:.0f}"}


BENCHMARK = Benchmark("networks", __doc__, NetworksOptions, measure, _tables, _DATA["note"], _facts)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(BENCHMARK.main(sys.argv[1:]))
