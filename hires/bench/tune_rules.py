"""Turns measured medians into the rules of a tuning table: which route, up to which size.

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
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hires.bench.message_noise import noise_of
from hires.bench.message_sweep import TABLE_NAMES, Row
from hires.bench.messages import BARRIER, MESSAGES
from hires.plan.routes import MESSAGE, OWN, Route, parse_route
from hires.plan.table_rules import ONE_ROUTE, Case, TuningRule, dtype_class
from hires.plan.tuning_table import Point, TuningTable

LEAST_MARGIN = 0.02
"""Gain below which no route is changed, however quiet the machine is."""
MARGIN_OF_NOISE = 2.0
"""Margin over the noise of the medians."""


class Series(NamedTuple):
    """The medians of one operation on some ranks, by size."""

    operation: str
    ranks: int
    ranks_per_node: int
    device: str
    dtype_class: str
    sizes: Sequence[int]
    medians: Sequence[Mapping[str, float]]
    """Route -> seconds, at each size."""


def case_of(row: Row) -> Case:
    """Returns the case of a measured row."""
    measured: str = row["operation"]
    name = TABLE_NAMES.get(measured, measured)
    kind, num_bytes = dtype_class(name, row["dtype"]), 0 if name == BARRIER else row["bytes"]
    ranks, near = row["ranks"], min(row["ranks"], row["ranks_per_node"])
    if measured in MESSAGES:  # between the first and the last rank
        ranks, near = 2, 1 + (near == ranks)
    return Case(name, ranks, near, row["device"], kind, num_bytes)


def measured_routes(row: Row) -> dict[str, float]:
    """Returns the medians of a row's routes, whose results were right."""
    return {
        way: one["p50_s"]
        for way, one in row["ways"].items()
        if one.get("p50_s") and not one["wrong"] and not way.startswith("raw:") and way != "table"
    }


def series_of(rows: Sequence[Row]) -> list[Series]:
    """Returns rows as series of ascending sizes, in the order in which they were measured."""
    cells: dict[tuple[str, int, int, str, str], dict[int, dict[str, float]]] = defaultdict(dict)
    for row in rows:
        case, routes = case_of(row), measured_routes(row)
        if row["blocking"] and routes:
            # Messages of larger worlds are of two ranks, too: those of the first one count.
            cells[case[:5]].setdefault(case.num_bytes, routes)
    return [
        Series(*key, sorted(sizes), [sizes[size] for size in sorted(sizes)])
        for key, sizes in cells.items()
    ]


def choose(medians: Sequence[Mapping[str, float]], margin: float) -> list[str]:
    """Returns the route of each size: the path of least cost, see the module's docstring."""
    # best[route]: the cost of the cheapest path that ends here with this route, and that path
    best: dict[str, tuple[float, list[str]]] = {}
    for measured in medians:
        least = min(measured.values())
        behind = {route: math.log(seconds / least) for route, seconds in measured.items()}
        fresh: dict[str, tuple[float, list[str]]] = {}
        for route, cost in behind.items():
            before = [
                (total + margin * (other != route), path) for other, (total, path) in best.items()
            ]
            total, path = min(before, key=lambda one: one[0], default=(0.0, []))
            fresh[route] = total + cost, [*path, route]
        best = fresh
    return min(best.values(), key=lambda one: one[0])[1] if best else []


def choose_one(medians: Sequence[Mapping[str, float]]) -> str:
    """Returns the route of the least sum over all sizes, of those measured at the most sizes."""
    measured = [way for one in medians for way in one]
    most = max(measured.count(way) for way in measured)
    whole = [way for way in dict.fromkeys(measured) if measured.count(way) == most]
    return min(whole, key=lambda way: sum(one.get(way, 0.0) for one in medians))


def rules_of(series: Sequence[Series], margin: float) -> list[TuningRule]:
    """Returns the rules of all series, without gaps from 0 bytes to any size.

    Rules of a number of ranks hold up to the next that was measured, and beyond the largest. Those
    of the first class of types hold for the classes that were not measured, too.
    """
    rules: list[TuningRule] = []
    for one in sorted(series, key=lambda one: _is_first_class(one, series)):
        ranks = _until_next(one.ranks, sorted({o.ranks for o in series if _alike(o, one)}))
        near = None if _whole(one) else (one.ranks_per_node, one.ranks_per_node)
        classes = () if _is_first_class(one, series) else (one.dtype_class,)
        if one.operation in ONE_ROUTE:
            path = [choose_one(one.medians)] * len(one.medians)
        else:
            path = choose(one.medians, margin)
        starts = [i for i, route in enumerate(path) if i == 0 or path[i - 1] != route]
        for at, start in enumerate(starts):
            last = starts[at + 1] if at + 1 < len(starts) else None
            low = 0 if start == 0 else _middle(one.sizes[start - 1], one.sizes[start]) + 1
            high = math.inf if last is None else _middle(one.sizes[last - 1], one.sizes[last])
            rules.append(
                TuningRule(
                    table_route(path[start], one.operation),
                    (one.operation,),
                    ranks,
                    near,
                    (one.device,),
                    classes,
                    (low, high),
                )
            )
    return rules


def margin_of(noise: float) -> float:
    """Returns the gain below which no route is changed."""
    return max(LEAST_MARGIN, MARGIN_OF_NOISE * noise)


def table_of(rows: Sequence[Row], made: Mapping[str, Any], default: str) -> TuningTable:
    """Returns the table of measured rows; its points keep all medians."""
    margin = margin_of(noise_of(rows))
    points = [
        Point(case, table_route(way, case.operation), seconds)
        for row in rows
        if row["blocking"]
        for case in [case_of(row)]
        for way, seconds in measured_routes(row).items()
    ]
    return TuningTable(rules_of(series_of(rows), margin), Route(default), points, dict(made))


def table_route(way: str, operation: str) -> Route:
    """Returns the route of a measured way: of messages the library's own is ``message``."""
    route = parse_route(way)
    if operation == "send" and route.algorithm == OWN:
        return route._replace(algorithm=MESSAGE)
    return route


def sums(rows: Sequence[Row], table: TuningTable) -> tuple[float, dict[str, float], list[str]]:
    """Returns what the sweep costs by the table, by each backend alone, and the backends in use.

    A backend that lacks a cell is left out, and so is a cell that lacks the table's route.
    """
    plain = [row for row in rows if row["blocking"] and _seconds_by(row, table) is not None]
    mixed, used = 0.0, dict[str, None]()
    alone: dict[str, float] = {}
    shared = set.intersection(*({*measured_routes(row)} for row in plain)) if plain else set()
    for row in plain:
        medians = measured_routes(row)
        mixed += _seconds_by(row, table) or 0.0
        used[table.route(*case_of(row)).backend] = None
        for way in sorted(way for way in shared if ":" not in way):
            alone[way] = alone.get(way, 0.0) + medians[way]
    return mixed, alone, [*used]


def _seconds_by(row: Row, table: TuningTable) -> float | None:
    case = case_of(row)
    route = table.route(*case)
    return next(
        (s for w, s in measured_routes(row).items() if table_route(w, case.operation) == route),
        None,
    )


def _is_first_class(one: Series, series: Sequence[Series]) -> bool:
    alike = (other for other in series if other[:4] == one[:4])
    return next(alike).dtype_class == one.dtype_class


def _alike(some: Series, other: Series) -> bool:
    # Whether only their numbers of ranks differ.
    near = _whole(some) == _whole(other) and (_whole(some) or some[2] == other[2])
    return near and (some.operation, *some[3:5]) == (other.operation, *other[3:5])


def _whole(one: Series) -> bool:
    return one.ranks_per_node >= one.ranks


def _until_next(ranks: int, counts: Sequence[int]) -> tuple[float, float]:
    least = 0 if ranks == counts[0] else ranks
    later = [count for count in counts if count > ranks]
    return least, later[0] - 1 if later else math.inf


def _middle(low: int, high: int) -> int:
    """Returns the size in the middle of two, as powers of two are counted."""
    return math.isqrt(low * high)
