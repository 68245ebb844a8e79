"""Measures routes, and turns the medians into the tuning table of ``comm=mix``.

For one operation on some ranks the route is a path through the sizes. It pays for each size how
far its route is behind the fastest, and for each change of route a margin above the noise, so that
neighbouring sizes do not flap between routes that are equally fast:

    size      4 KiB   8 KiB   16 KiB   32 KiB
    shm       1.00    1.00    1.01     1.60         behind the fastest
    mpi       1.40    1.10    1.00     1.00
    path      shm     shm     shm  |   mpi          one change, for a gain above the margin

Operations whose ranks may have a size each have one route: that of the least sum over the sizes.

Source:
    Viterbi, "Error bounds for convolutional codes", IEEE Trans. Inf. Theory 1967 (the path).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hires.bench.bench_main import BenchTable, Result
from hires.bench.comm_bench import (
    BASELINES,
    TABLE,
    cells_of,
    noise_facts,
    options_of,
    right_ways,
    sweep,
    wrong_rows,
)
from hires.bench.messages import BARRIER, BENCHED, MESSAGES, Row, noise_of
from hires.core.errors import ConfigError
from hires.plan.route_choice import TUNED_FILE
from hires.plan.routes import MESSAGE, OWN, dtype_class, parse_route
from hires.plan.tuning_table import DISTURBED, ONE_ROUTE, Case, Point, TuningRule, TuningTable

LEAST_MARGIN = 0.02  # gain below which no route is changed, however quiet the machine is
MARGIN_OF_NOISE = 2.0  # margin over the noise of the medians
MOST_OF_A_TENTH = 0.5
"""Noise that nine tenths of all medians stay below on a quiet machine: 0.23 on one of two cores."""


class Series(NamedTuple):
    """The medians of one operation on some ranks by size: route -> seconds, at each."""

    case: Case  # of no size
    sizes: Sequence[int]
    medians: Sequence[Mapping[str, float]]


def measure(task: Mapping[str, Any]) -> Iterator[Result]:
    """Yields all rows after each cell, then the table, or why it is refused."""
    options = options_of(task)
    for route in {TABLE, *BASELINES} & {*options.routes}:
        raise ConfigError(f"{route} is no route of hires.comm; leave it out")
    alone = next((route for route in options.routes if ":" not in route), None)
    if alone is None:
        raise ConfigError("a table needs a backend alone, for what no rule has: add gloo or mpi")
    cells = cells_of(options.operations, options.sizes, options.dtypes[:1])
    others = cells_of(options.operations, options.sizes, options.dtypes[1:])
    cells += [cell for cell in others if "reduce" in cell.operation]
    rows: list[Row] = []
    for rows in sweep(options, cells, options.routes):
        yield {"ok": True, "rows": rows}
    yield judged_table(rows, alone, task["noise"], task["force"], task["write"])


def judged_table(rows: list[Row], alone: str, limit: float, force: bool, write: str) -> Result:
    """Returns the result of a whole sweep; ``alone`` is the backend of what no rule has."""
    noise, wrong, table = noise_of(rows), wrong_rows(rows), table_of(rows, alone)
    refused = f"wrong results: {'; '.join(wrong[:3])}" if wrong else ""
    if noise > limit and not refused and not force:
        refused = (
            f"the medians of rounds differ by {100 * noise:.1f} %, more than {100 * limit:g} %: "
            f"other programs disturb the measurement; end them, leave a core for each rank, use "
            f"more --rounds, or --force"
        )
    tenth = noise_of(rows, 0.9)
    text = f"a tenth of all medians of rounds differ by {100 * tenth:.0f} % or more"
    disturbed = text if tenth > MOST_OF_A_TENTH else ""
    state = {"ok": not refused, "refused": refused, "noise": noise, "limit": limit, "rows": rows}
    state |= {"write": write, "disturbed": disturbed}
    return {**state, "table": table.to_dict()}


def finish(folder: Path, result: Result) -> str:
    """Writes the table if it is good; returns how it is used."""
    if result["refused"]:
        return f"no table was written: {result['refused']}"
    machine = f"{result['hardware']['cpu']}, {result['hardware']['cores']} cores"
    origin = {"machine": machine, "date": result["time"], "commit": result["git"] or "unknown"}
    origin |= {"command": result["command"], "noise": round(result["noise"], 4)}
    origin |= {"forced": True} if result["noise"] > result["limit"] else {}
    origin |= {DISTURBED: result["disturbed"]} if result["disturbed"] else {}
    path = Path(result["write"] or folder / TUNED_FILE)
    table = TuningTable.from_dict({**result["table"], "made": origin})
    table.write(path)
    backends = ",".join(table.backends)
    lines = [f"{path}: use it with\n  hires run comm=mix comm.table={path}\n(backends {backends})"]
    if result["disturbed"]:
        remedy = "end other programs and measure again"
        lines.append(f"warning: {result['disturbed']}; the table is marked: {remedy}")
    return "\n".join(lines)


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
    return [BenchTable("Rules", cells, "")]


def facts(result: Result) -> list[str]:
    """Returns what stands above the tables."""
    if "table" not in result:
        return []
    return [
        *noise_facts(result["rows"]),
        f"limit of the noise: {100 * result['limit']:g} %",
        f"a route changes for a gain of {100 * margin_of(result['noise']):.1f} % or more",
        *([f"REFUSED: {result['refused']}"] if result["refused"] else []),
    ]


def case_of(row: Row) -> Case:
    """Returns the case of a measured row."""
    name = BENCHED[row["operation"]].table
    kind, num_bytes = dtype_class(name, row["dtype"]), 0 if name == BARRIER else row["bytes"]
    # Messages are between the first and the last rank.
    ranks = 2 if row["operation"] in MESSAGES else row["ranks"]
    same_node = row["ranks"] <= row["ranks_per_node"]
    return Case(name, ranks, same_node, row["device"], kind, num_bytes)


def measured_routes(row: Row) -> dict[str, float]:
    """Returns the medians of a row's routes, whose results were right."""
    return {name: s for name, s in right_ways(row).items() if name not in (*BASELINES, TABLE)}


def series_of(rows: Sequence[Row]) -> list[Series]:
    """Returns rows as series of ascending sizes, in the order in which they were measured."""
    cells: dict[Case, dict[int, dict[str, float]]] = defaultdict(dict)
    for row in rows:
        case, routes = case_of(row), measured_routes(row)
        if routes:
            # Messages of larger worlds are of two ranks, too: those of the first one count.
            cells[case._replace(num_bytes=0)].setdefault(case.num_bytes, routes)
    return [
        Series(case, sizes, [measured[size] for size in sizes])
        for case, measured in cells.items()
        for sizes in [sorted(measured)]
    ]


def choose(medians: Sequence[Mapping[str, float]], margin: float) -> list[str]:
    """Returns the route of each size: the path of least cost, see the module's docstring."""
    # best[route]: the cost of the cheapest path that ends here with this route, and that path
    best: dict[str, tuple[float, list[str]]] = {}
    for measured in medians:
        least = min(measured.values())
        fresh: dict[str, tuple[float, list[str]]] = {}
        for route, seconds in measured.items():
            before = [
                (total + margin * (other != route), path) for other, (total, path) in best.items()
            ]
            total, path = min(before, key=lambda pair: pair[0], default=(0.0, []))
            fresh[route] = total + math.log(seconds / least), [*path, route]
        best = fresh
    return min(best.values(), key=lambda pair: pair[0])[1] if best else []


def choose_one(medians: Sequence[Mapping[str, float]]) -> str:
    """Returns the route of the least sum over all sizes, of those measured at the most sizes."""
    measured = [route for size in medians for route in size]
    most = max(map(measured.count, measured))
    everywhere = [route for route in dict.fromkeys(measured) if measured.count(route) == most]
    return min(everywhere, key=lambda route: sum(size.get(route, 0.0) for size in medians))


def rules_of(series: Sequence[Series], margin: float) -> list[TuningRule]:
    """Returns the rules of all series, without gaps from 0 bytes to any size.

    Rules of a number of ranks hold up to the next that was measured, and beyond the largest. Those
    of the first class of types hold for the classes that were not measured, too.
    """
    first: dict[Case, str] = {}
    for case, *_ in series:
        first.setdefault(case._replace(dtype_class=""), case.dtype_class)

    def is_first(case: Case) -> bool:
        return first[case._replace(dtype_class="")] == case.dtype_class

    rules: list[TuningRule] = []
    for case, sizes, medians in sorted(series, key=lambda one: is_first(one.case)):
        alike = (other for other, *_ in series if other._replace(ranks=case.ranks) == case)
        counts = sorted({other.ranks for other in alike})
        after = counts[counts.index(case.ranks) + 1 :]
        path = choose(medians, margin)
        if case.operation in ONE_ROUTE:
            path = [choose_one(medians)] * len(medians)
        starts = [i for i, route in enumerate(path) if i == 0 or path[i - 1] != route]
        for start, last in zip(starts, [*starts[1:], None], strict=True):
            rule = TuningRule(
                table_route(path[start], case.operation),
                [case.operation],
                min_ranks=0 if case.ranks == counts[0] else case.ranks,
                max_ranks=after[0] - 1 if after else None,
                same_node=case.same_node,
                devices=[case.device],
                dtypes=[] if is_first(case) else [case.dtype_class],
                min_bytes=0 if start == 0 else _middle(sizes[start - 1], sizes[start]) + 1,
                max_bytes=None if last is None else _middle(sizes[last - 1], sizes[last]),
            )
            rules.append(rule)
    return rules


def _middle(low: int, high: int) -> int:
    # The size in the middle of two, as powers of two are counted.
    return math.isqrt(low * high)


def margin_of(noise: float) -> float:
    """Returns the gain below which no route is changed."""
    return max(LEAST_MARGIN, MARGIN_OF_NOISE * noise)


def table_of(rows: Sequence[Row], default: str) -> TuningTable:
    """Returns the table of measured rows; its points keep all medians."""
    points = [
        Point(case, table_route(way, case.operation), seconds)
        for row in rows
        for case in [case_of(row)]
        for way, seconds in measured_routes(row).items()
    ]
    return TuningTable(rules_of(series_of(rows), margin_of(noise_of(rows))), default, points)


def table_route(way: str, operation: str) -> str:
    """Returns the route of a measured way: of messages the library's own is ``message``."""
    route = parse_route(way)
    message = operation == "send" and route.algorithm == OWN
    return str(route._replace(algorithm=MESSAGE) if message else route)
