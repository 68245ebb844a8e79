"""Reads the measured seconds of a tuning table: of one route, and the backend of an operation."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping

from hires.plan.routes import MESSAGE, OWN, PLAN_ONLY, Route, parse_route
from hires.plan.tuning_table import Case, TuningRule, TuningTable

Seconds = Mapping[int, float]
"""By bytes."""


def coarse(table: TuningTable) -> TuningTable:
    """Returns a table with one backend for each operation: the best over all sizes.

    That is the backend with the least product of slow-downs over the measured sizes, among those
    that were measured at all of them; without points, that of the first rule. Each carries out its
    own operation.

    Source:
        Anthony et al., "MCR-DL: mix-and-match communication runtime for deep learning", IPDPS 2023.
    """
    boxes: dict[str, tuple[TuningRule, str]] = {}
    for rule in table.rules:
        for operations in [[name] for name in rule.operations] or [[]]:
            box = dataclasses.replace(rule, operations=operations, min_bytes=0, max_bytes=None)
            box = dataclasses.replace(box, route="gloo", note="")
            boxes.setdefault(repr(box), (box, rule.way.backend))
    rules = []
    for box, first in boxes.values():
        form = MESSAGE if box.operations == ["send"] else OWN
        route = Route(_best_measured(table, box) or first, form)
        rules.append(dataclasses.replace(box, route=str(route)))
    return dataclasses.replace(table, rules=rules)


class MeasuredSeconds:
    """The seconds of routes, between the measured sizes and beyond them."""

    def __init__(self, table: TuningTable) -> None:
        self._sizes: dict[tuple[Case, Route], dict[int, float]] = defaultdict(dict)
        for case, route, seconds in table.points:
            self._sizes[case._replace(num_bytes=0), parse_route(route)][case.num_bytes] = seconds

    def seconds(self, case: Case, route: Route) -> float | None:
        """Returns how long a message takes; None if its route was not measured.

        A form that plans alone have, as ``flat``, takes what the backend's own operation does.
        Measured for another number of ranks, it is that of the nearest one. Straight lines lie
        between the logarithms of sizes and seconds; beyond the largest, seconds grow with bytes.
        """
        found = self._sizes.get((case._replace(num_bytes=0), route)) or self._nearest(case, route)
        if found is None and route.algorithm in PLAN_ONLY:
            own = MESSAGE if case.operation == "send" else OWN
            return self.seconds(case, Route(route.backend, own))
        return None if found is None else _interpolated(found, case.num_bytes)

    def _nearest(self, case: Case, route: Route) -> dict[int, float] | None:
        def distance(other: Case) -> float:
            apart = other.same_node != case.same_node
            return 100 * apart + abs(math.log2(other.ranks / case.ranks))

        wanted = case.operation, case.device
        alike = [
            other
            for other, way in self._sizes
            if way == route and (other.operation, other.device) == wanted
        ]
        alike = [other for other in alike if other.dtype_class == case.dtype_class] or alike
        return self._sizes[min(alike, key=distance), route] if alike else None


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


def _best_measured(table: TuningTable, box: TuningRule) -> str | None:
    cases: dict[Case, dict[Route, float]] = defaultdict(dict)
    for case, route, seconds in table.points:
        if box.holds(case):
            cases[case][parse_route(route)] = seconds
    slowdowns: dict[str, list[float]] = defaultdict(list)
    for routes in cases.values():
        own = {r.backend: s for r, s in routes.items() if r.algorithm in (OWN, MESSAGE)}
        for backend, seconds in own.items():
            slowdowns[backend].append(math.log(seconds / min(routes.values())))
    complete = {name: sum(logs) for name, logs in slowdowns.items() if len(logs) == len(cases)}
    return min(complete, key=lambda name: (complete[name], name), default=None)
