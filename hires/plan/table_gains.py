"""Weighs a tuning table: one backend for each operation, what mixing gains, what a route costs."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from hires.plan.routes import MESSAGE, OWN, PLAN_ONLY, Route
from hires.plan.table_rules import ANY, Case, Interval, TuningRule
from hires.plan.tuning_table import TuningTable

SIZES: Interval = (4, 2**30)
"""Bytes over which an interval of a rule counts where nothing was measured."""

Seconds = Mapping[int, float]
"""By bytes."""


def coarse(table: TuningTable) -> TuningTable:
    """Returns a table with one backend for each operation: the best over all sizes.

    That is the backend with the least product of slow-downs over the measured sizes, among those
    that were measured at all of them; without points, the one whose rules hold most powers of two.
    Each carries out its own operation.

    Source:
        Anthony et al., "MCR-DL: mix-and-match communication runtime for deep learning", IPDPS 2023.
    """
    boxes: dict[tuple[object, ...], list[TuningRule]] = defaultdict(list)
    for rule in table.rules:
        for operation in rule.operations or ("",):
            own = rule._replace(operations=(operation,) if operation else ())
            boxes[own[1:6]].append(own)
    rules = []
    for box in boxes.values():
        backend = _best_measured(table, box) or _widest(table, box)
        own_form = MESSAGE if box[0].operations == ("send",) else OWN
        rules.append(box[0]._replace(route=Route(backend, own_form), num_bytes=ANY))
    return dataclasses.replace(table, rules=rules)


class Gain(NamedTuple):
    """What a table gains over its best single backend, summed over the measured cases."""

    backend: str
    """The best single one."""
    seconds: float
    """Of one message of each case through the table's routes."""
    alone_s: float
    """The same through the single backend."""

    def __str__(self) -> str:
        """Returns the sentence that screens show."""
        share = 1 - self.seconds / self.alone_s
        if share <= 0:
            return f"mixing gains nothing here: {self.backend} alone is as fast"
        return f"mixing gains {share:.1%} over {self.backend} alone, over all measured cases"


def verdict(table: TuningTable) -> str:
    """Returns in words whether the table mixes, and what it gains; nothing of one not measured."""
    if len(table.backends) == 1:
        return f"mixing gains nothing here: {table.backends[0]} wins everywhere"
    gain = gain_of(table)
    return "" if gain is None else str(gain)


def gain_of(table: TuningTable) -> Gain | None:
    """Returns what a table gains; None if no backend was measured in all cases."""
    cases = _by_case(table)
    chosen = [(table.route(*case), routes) for case, routes in cases.items()]
    if any(route not in routes for route, routes in chosen):
        return None
    alone: dict[str, float] = {}
    for backend in {route.backend for routes in cases.values() for route in routes}:
        own = [
            min((s for r, s in routes.items() if r.backend == backend), default=math.inf)
            for routes in cases.values()
        ]
        alone[backend] = sum(own)
    best = min(alone, key=lambda name: alone[name], default=None)
    if best is None or alone[best] == math.inf:
        return None
    return Gain(best, sum(routes[route] for route, routes in chosen), alone[best])


class MeasuredSeconds:
    """The seconds of routes, between the measured sizes and beyond them."""

    def __init__(self, table: TuningTable) -> None:
        self._sizes: dict[tuple[object, ...], dict[int, float]] = defaultdict(dict)
        for case, route, seconds in table.points:
            key = *case[:5], route
            self._sizes[key][case.num_bytes] = seconds

    def seconds(self, case: Case, route: Route) -> float | None:
        """Returns how long a message takes; None if its route was not measured.

        A form that plans alone have, as ``flat``, takes what the backend's own operation does.
        Measured for another number of ranks, it is that of the nearest one. Straight lines lie
        between the logarithms of sizes and seconds; beyond the largest, seconds grow with bytes.
        """
        found = self._sizes.get((*case[:5], route)) or self._nearest(case, route)
        if found is None and route.algorithm in PLAN_ONLY:
            own = MESSAGE if case.operation == "send" else OWN
            return self.seconds(case, Route(route.backend, own))
        return None if found is None else _interpolated(found, case.num_bytes)

    def _nearest(self, case: Case, route: Route) -> dict[int, float] | None:
        def distance(key: tuple[object, ...]) -> float:
            ranks, near = key[1], key[2]
            assert isinstance(ranks, int)
            assert isinstance(near, int)
            apart = (near < ranks) != (case.ranks_per_node < case.ranks)
            return 100 * apart + abs(math.log2(ranks / case.ranks))

        alike = [k for k in self._sizes if (k[0], k[3], k[5]) == (case[0], case.device, route)]
        alike = [key for key in alike if key[4] == case.dtype_class] or alike
        return self._sizes[min(alike, key=distance)] if alike else None


def _interpolated(sizes: Seconds, num_bytes: int) -> float:
    known = sorted(sizes)
    at = bisect.bisect_left(known, num_bytes)
    if at < len(known) and known[at] == num_bytes:
        return sizes[num_bytes]
    if at == 0:
        return sizes[known[0]]
    if at == len(known):
        return sizes[known[-1]] * num_bytes / known[-1]
    low, high = known[at - 1 : at + 1]
    share = math.log(num_bytes / max(low, 1)) / math.log(high / max(low, 1)) if low else 1.0
    return float(sizes[low] ** (1 - share) * sizes[high] ** share)


def _by_case(table: TuningTable) -> dict[Case, dict[Route, float]]:
    cases: dict[Case, dict[Route, float]] = defaultdict(dict)
    for case, route, seconds in table.points:
        cases[case][route] = seconds
    return cases


def _best_measured(table: TuningTable, box: list[TuningRule]) -> str | None:
    held = {c: r for c, r in _by_case(table).items() if box[0]._replace(num_bytes=ANY).holds(c)}
    losses: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for routes in held.values():
        own = {r.backend: s for r, s in routes.items() if r.algorithm in (OWN, MESSAGE)}
        for backend, seconds in own.items():
            losses[backend] += math.log(seconds / min(routes.values()))
            counts[backend] += 1
    whole = [backend for backend in losses if counts[backend] == len(held)]
    return min(whole, key=lambda name: (losses[name], name), default=None)


def _widest(table: TuningTable, box: Iterable[TuningRule]) -> str:
    octaves: dict[str, float] = defaultdict(float)
    taken: list[Interval] = []
    for rule in box:
        low, high = max(rule.num_bytes[0], SIZES[0]), min(rule.num_bytes[1], SIZES[1])
        octaves[rule.route.backend] += max(0.0, math.log2(max(high, 1) / low))
        taken.append((low, high))
    edges = sorted(taken)
    ends = [(SIZES[0], SIZES[0]), *edges, (SIZES[1], SIZES[1])]
    for (_, before), (after, _) in itertools.pairwise(ends):
        octaves[table.default.backend] += max(0.0, math.log2(max(after, 1) / max(before, 1)))
    return max(octaves, key=lambda name: (octaves[name], name))
