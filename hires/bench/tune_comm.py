"""Measures routes, and turns the medians into the tuning table of ``comm=mix``.

From one size to the next the route of an operation on some ranks changes only for a gain above the
noise, so that neighbouring sizes do not flap between routes that are equally fast:

    size      4 KiB   8 KiB   16 KiB   32 KiB
    shm       1.00    1.00    1.01     1.60         behind the fastest
    mpi       1.40    1.10    1.00     1.00
    path      shm     shm     shm  |   mpi          one change, for a gain above the margin

Operations whose ranks may have a size each have one route: that of the least sum over the sizes.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hires.bench.bench_main import FORCE, BenchTable, Result, Row, result_of
from hires.bench.comm_bench import (
    BASELINES,
    TABLE,
    cells_of,
    noise_facts,
    noise_share,
    routes_here,
    sweep,
)
from hires.bench.messages import BARRIER, BENCHED, MESSAGES
from hires.core.errors import ConfigError
from hires.plan.route_choice import TUNED_FILE
from hires.plan.routes import MESSAGE, OWN, dtype_class, parse_route
from hires.plan.tuning_table import FORCED, ONE_ROUTE, Case, Point, TuningRule, TuningTable

LEAST_MARGIN = 0.02  # gain below which no route is changed, however quiet the machine is
MARGIN_OF_NOISE = 2.0  # margin over the noise of the medians
Groups = Mapping[str, Sequence[Row]]
Medians = Sequence[Mapping[Any, float]]  # of each size, ascending: route -> seconds


def measure(task: Mapping[str, Any]) -> Iterator[Result]:
    """Yields all rows after each cell, then the table, or why it is refused."""
    routes = task["routes"] or routes_here(task)
    for route in {TABLE, *BASELINES} & {*routes}:
        raise ConfigError(f"{route} is no route of hires.comm; leave it out")
    alone = next((route for route in routes if ":" not in route), None)
    if alone is None:
        raise ConfigError("a table needs a backend alone, for what no rule has: add gloo or mpi")
    first, *others = task["dtypes"]
    cells = cells_of(task["only"], task["sizes"], [first])
    sums = [operation for operation in task["only"] if "reduce" in operation]
    groups: dict[str, list[Row]] = {}
    for groups in sweep(task, [*cells, *cells_of(sums, task["sizes"], others)], routes):
        yield result_of(groups)
    yield judged_table(groups, alone, task["noise"], task["force"])


def judged_table(groups: Groups, alone: str, limit: float, force: bool) -> Result:
    """Returns the result of a whole sweep; ``alone`` is the backend of what no rule has."""
    result, noise = result_of(groups), noise_share(groups)
    margin = max(LEAST_MARGIN, MARGIN_OF_NOISE * noise)
    refused = f"wrong results: {'; '.join(result['wrong'][:3])}" if result["wrong"] else ""
    if noise > limit and not refused and not force:
        refused = (
            f"the medians of rounds differ by {100 * noise:.1f} %, more than {100 * limit:g} %: "
            f"other programs disturb the measurement; end them, leave a core for each rank, or use "
            f"more --rounds. The same command with {FORCE} at its end takes what was measured"
        )
    facts = [
        *noise_facts(groups),
        f"limit of the noise: {100 * limit:g} %",
        f"a route changes for a gain of {100 * margin:.1f} % or more",
        *([f"REFUSED: {refused}"] if refused else []),
    ]
    state = {"ok": not refused, "refused": refused, "noise": noise, "limit": limit, "facts": facts}
    points = points_of(groups)
    table = TuningTable(rules_of(points, margin), alone, points)
    return {**result, **state, "table": table.to_dict()}


def finish(folder: Path, result: Result) -> str:
    """Writes the table if it is good; returns how it is used."""
    if result["refused"]:
        return f"no table was written: {result['refused']}"
    machine = f"{result['hardware']['cpu']}, {result['hardware']['cores']} cores"
    origin = {"machine": machine, "date": result["time"], "commit": result["git"] or "unknown"}
    origin |= {"command": result["command"], "noise": round(result["noise"], 4)}
    origin |= {FORCED: True} if result["noise"] > result["limit"] else {}
    path = folder / TUNED_FILE
    table = TuningTable.from_dict({**result["table"], "made": origin})
    table.write(path)
    backends = ",".join(table.backends)
    return f"{path}: use it with\n  hires run comm=mix comm.table={path}\n(backends {backends})"


def tables(result: Result) -> list[BenchTable]:
    """Returns the rules."""
    rules = result["table"]["rules"] if "table" in result else []
    cells = [
        {
            "operation": ", ".join(rule["operations"]),
            "ranks": f"{rule.get('min_ranks', '')}..{rule.get('max_ranks', '')}",
            "dtype": ", ".join(rule.get("dtypes", ["any"])),
            "bytes": f"{rule.get('min_bytes', '')}..{rule.get('max_bytes', '')}",
            "route": rule["route"],
        }
        for rule in rules
    ]
    return [BenchTable("Rules", cells)]


def case_of(row: Row) -> Case:
    """Returns the case of a measured row."""
    name = BENCHED[row["operation"]].table
    kind, num_bytes = dtype_class(name, row["dtype"]), 0 if name == BARRIER else row["bytes"]
    # Messages are between the first and the last rank.
    ranks = 2 if row["operation"] in MESSAGES else row["ranks"]
    same_node = row["ranks"] <= row["ranks_per_node"]
    return Case(name, ranks, same_node, row["device"], kind, num_bytes)


def points_of(groups: Groups) -> list[Point]:
    """Returns the medians of all routes whose results were right."""
    return [
        Point(case, table_route(row["name"], case.operation), row["step_s"]["median"])
        for rows in groups.values()
        for row in rows
        for case in [case_of(row)]
        if row["ok"] and "step_s" in row and row["name"] not in (*BASELINES, TABLE)
    ]


def choose(medians: Medians, margin: float) -> list[Any]:
    """Returns the route of each size: it changes for a gain of more than the margin."""
    path: list[Any] = []
    for measured in medians:
        fastest = min(measured, key=measured.__getitem__)
        stays = path and measured.get(path[-1], math.inf) <= (1 + margin) * measured[fastest]
        path.append(path[-1] if stays else fastest)
    return path


def choose_one(medians: Medians) -> Any:
    """Returns the route of the least sum over all sizes, of those measured at the most sizes."""
    measured = [route for size in medians for route in size]
    most = max(map(measured.count, measured))
    everywhere = [route for route in dict.fromkeys(measured) if measured.count(route) == most]
    return min(everywhere, key=lambda route: sum(size.get(route, 0.0) for size in medians))


def rules_of(points: Sequence[Point], margin: float) -> list[TuningRule]:
    """Returns the rules, of which the first that holds a message decides.

    A rule holds up to the next number of ranks that was measured, the first one below, too, and up
    to the middle between two sizes. The first class of types is that of all others.
    """
    # Of each case, without a size: the medians by size and route, as they were measured.
    series: dict[Case, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for case, route, seconds in points:
        # Messages of larger worlds are of two ranks, too: those of the first one count.
        series[case._replace(num_bytes=0)][case.num_bytes].setdefault(route, seconds)
    first: dict[Case, Case] = {}
    for case in series:
        first.setdefault(case._replace(dtype_class=""), case)
    rules: list[TuningRule] = []
    for case in sorted(series, key=lambda case: case in first.values()):
        counts = sorted(one.ranks for one in series if one._replace(ranks=case.ranks) == case)
        after = counts[counts.index(case.ranks) + 1 :]
        sizes, medians = zip(*sorted(series[case].items()), strict=True)
        path = choose(medians, margin)
        if case.operation in ONE_ROUTE:
            path = [choose_one(medians)] * len(medians)
        # The middle of two sizes, as powers of two are counted.
        middles = [math.isqrt(low * high) for low, high in itertools.pairwise(sizes)]
        lows, highs = [0, *(middle + 1 for middle in middles)], [*middles, None]
        each = zip(path, lows, highs, strict=True)
        for route, bounds in itertools.groupby(each, key=lambda size: size[0]):
            runs = [*bounds]
            rule = TuningRule(
                route,
                [case.operation],
                min_ranks=0 if case.ranks == counts[0] else case.ranks,
                max_ranks=after[0] - 1 if after else None,
                same_node=case.same_node,
                devices=[case.device],
                dtypes=[] if case in first.values() else [case.dtype_class],
                min_bytes=runs[0][1],
                max_bytes=runs[-1][2],
            )
            rules.append(rule)
    return rules


def table_route(way: str, operation: str) -> str:
    """Returns the route of a measured way: of messages the library's own is ``message``."""
    route = parse_route(way)
    message = operation == "send" and route.algorithm == OWN
    return str(route._replace(algorithm=MESSAGE) if message else route)
