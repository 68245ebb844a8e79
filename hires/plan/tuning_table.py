"""The tuning table: which route a message takes, by measured rules, and what routes cost.

A table is a file of JSON (or the same as YAML), which ``hires tune comm`` writes:

    {"format": 2,
     "made": {"machine": "...", "date": "...", "commit": "...", "command": "...", "noise": 0.03},
     "rules": [{"operations": ["all_reduce"], "max_ranks": 4, "max_bytes": 65536, "route": "shm"},
               {"operations": ["all_reduce"], "min_bytes": 1048576, "route": "mpi:segmented:4MiB"}],
     "default": "gloo",
     "points": [[["all_reduce", 2, true, "cpu", "float", 65536], "mpi:segmented:4MiB", 0.00031]]}

The first rule that holds a message decides, else ``default``, so every message has a route. A point
is what was measured: the case, the route and its median seconds, of the slowest rank.

Source:
    Anthony et al., "MCR-DL: mix-and-match communication runtime for deep learning", IPDPS 2023
    (one backend for all sizes of an operation, or one for each size).
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hires.core.config.fields import build, changed_keys
from hires.core.errors import ConfigError
from hires.core.registry import offer
from hires.core.store import reading
from hires.core.store.files import write_atomically
from hires.core.units import listed
from hires.plan.routes import (
    BACKENDS,
    CARRIES,
    DTYPES,
    MESSAGE,
    OPERATIONS,
    OWN,
    PLAN_ONLY,
    Route,
    is_possible,
    parse_route,
)

FORMAT = 2
DEFAULT = "default"
"""In a route of a table: the backend ``comm.backend``."""
DEVICES = ("cpu", "cuda")
ONE_ROUTE = ("all_to_all", "gather", "scatter")
"""Operations whose ranks may have a size each, which no rank has of all: one route for all."""
MADE = ("machine", "date", "commit", "command", "noise")
"""Keys of ``made`` that a measured table has: where, when and how; the noise as a share of 1."""
FORCED = "forced"
"""Key of ``made``: whether the table was written although the machine was busy."""
_SHOWN = 5


class Case(NamedTuple):
    """The facts of a message by which a table chooses: they are the same on all its ranks."""

    operation: str
    ranks: int
    same_node: bool
    """Whether all of them are on one node."""
    device: str
    dtype_class: str
    num_bytes: int
    """Of a collective those that a rank contributes."""


class Point(NamedTuple):
    """A measured case."""

    case: Case
    route: str
    seconds: float


@dataclass(frozen=True)
class TuningRule:
    """A box of cases, and their route. What is left out holds everything."""

    route: str
    operations: list[str] = field(default_factory=list)
    min_ranks: int = 0
    max_ranks: int | None = None
    same_node: bool | None = None
    devices: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    min_bytes: int = 0
    max_bytes: int | None = None
    note: str = ""

    @functools.cached_property
    def way(self) -> Route:
        """The route that its text means."""
        return parse_route(self.route, (*BACKENDS, DEFAULT))

    def holds(self, case: Case) -> bool:
        """Whether the rule decides for a case, if none before it does."""
        return (
            (not self.operations or case.operation in self.operations)
            and self.min_ranks <= case.ranks <= (self.max_ranks or math.inf)
            and self.same_node in (None, case.same_node)
            and (not self.devices or case.device in self.devices)
            and (not self.dtypes or case.dtype_class in self.dtypes)
            and self.min_bytes <= case.num_bytes
            and (self.max_bytes is None or case.num_bytes <= self.max_bytes)
            and case.operation in CARRIES.get(self.way.algorithm, (case.operation,))
            and is_possible(self.way)
        )

    def problems(self) -> Iterator[str]:
        """Yields what is wrong with its names and bounds."""
        for key, names, known in (
            ("operation", self.operations, OPERATIONS),
            ("device", self.devices, DEVICES),
            ("dtype", self.dtypes, tuple(DTYPES)),
        ):
            strange = (one for one in names if one not in known)
            yield from (f"unknown {key} {one!r}; {offer(one, known)}" for one in strange)
        if self.min_bytes or self.max_bytes is not None:
            uneven = (name for name in self.operations if name in ONE_ROUTE)
            for name in uneven:
                yield f"the ranks of {name} may have a size each; leave min_ and max_bytes out"
        try:
            able = CARRIES.get(self.way.algorithm, OPERATIONS)
        except ConfigError as error:
            yield str(error)
            return
        for name in (one for one in self.operations if one not in able):
            yield f"{self.way.algorithm} does not carry out {name}, only {', '.join(able)}"


@dataclass(frozen=True)
class TuningTable:
    """Rules, what they fall back to, and the measurements that they come from."""

    rules: list[TuningRule]
    default: str
    points: list[Point] = field(default_factory=list)
    made: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def route(self, case: Case) -> Route:
        """Returns the route of a message, a function of facts that all its ranks share."""
        return first_route(self.rules, case) or parse_route(self.default)

    @property
    def backends(self) -> list[str]:
        """Returns the backends of all routes, that of the default first."""
        routes = (self.default, *(rule.route for rule in self.rules))
        return [*dict.fromkeys(route.partition(":")[0] for route in routes)]

    @property
    def digest(self) -> str:
        """Returns a digest of the rules and the default."""
        rules = [dataclasses.asdict(dataclasses.replace(rule, note="")) for rule in self.rules]
        text = json.dumps([rules, self.default], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @staticmethod
    def read(path: str | Path, base: str = "gloo") -> TuningTable:
        """Returns a file's table, where ``default`` is ``base``; ConfigError: what is wrong."""
        try:
            return TuningTable.from_dict(reading.read_named_values(path), base)
        except ConfigError as error:
            text = f"tuning table {path}: {error}; `hires tune comm` makes one"
            raise ConfigError(text) from None

    @staticmethod
    def from_dict(values: Mapping[str, Any], base: str = "gloo") -> TuningTable:
        """Returns the table of plain values; ConfigError: all that is wrong, up to five."""
        if values.get("format") != FORMAT:
            raise ConfigError(f"format {values.get('format')!r}; this hires reads {FORMAT}")
        table = build(TuningTable, dict(values))
        if problems := [*table._problems()]:
            raise ConfigError(listed(problems, _SHOWN, "; "))

        def of_base(route: str) -> str:
            return base + route.removeprefix(DEFAULT) if route.startswith(DEFAULT) else route

        rules = [dataclasses.replace(rule, route=of_base(rule.route)) for rule in table.rules]
        return dataclasses.replace(table, rules=rules, default=of_base(table.default))

    def _problems(self) -> Iterator[str]:
        rules = {f"rules[{number}]": rule for number, rule in enumerate(self.rules)}
        rules["default"] = TuningRule(self.default)
        for number, (case, route, seconds) in enumerate(self.points):
            name, lists = f"points[{number}]", ([case.operation], [case.device], [case.dtype_class])
            operations, devices, dtypes = lists
            rules[name] = TuningRule(route, operations, devices=devices, dtypes=dtypes)
            if not 0 < seconds < math.inf or min(case.ranks, case.num_bytes + 1) < 1:
                yield f"{name}: seconds and counts are positive; measure it again"
        for name, rule in rules.items():
            yield from (f"{name}: {problem}" for problem in rule.problems())

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, as a file holds them."""
        rules = [dict(changed_keys(rule)) for rule in self.rules]
        points = [[[*case], route, seconds] for case, route, seconds in self.points]
        return {**vars(self), "rules": rules, "points": points}

    def write(self, path: str | Path) -> None:
        """Writes a file of one line for each rule and point; RunError: it cannot be written."""
        lines = []
        for key, value in self.to_dict().items():
            if isinstance(value, list) and value:
                inner = ",\n".join(f"  {json.dumps(one)}" for one in value)
                lines.append(f" {json.dumps(key)}: [\n{inner}\n ]")
            else:
                lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
        write_atomically(path, "{\n" + ",\n".join(lines) + "\n}\n", option="another path")


def first_route(rules: Iterable[TuningRule], case: Case) -> Route | None:
    """Returns the route of the first rule that holds a case; None: none does."""
    return next((rule.way for rule in rules if rule.holds(case)), None)


Seconds = Mapping[int, float]


def coarse(table: TuningTable) -> TuningTable:
    """Returns a table with one backend for each operation: the best over all sizes.

    That is the backend with the least product of slow-downs over the measured sizes, among those
    that were measured at all of them; without points, that of the first rule. Each carries out its
    own operation.
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

        def distance(other: Case) -> tuple[bool, bool, float]:
            apart = other.same_node != case.same_node
            unlike = other.dtype_class != case.dtype_class
            return unlike, apart, abs(math.log2(other.ranks / case.ranks))

        wanted = case.operation, case.device, route
        alike = [o for o, way in self._sizes if (o.operation, o.device, way) == wanted]
        if alike:
            return _interpolated(self._sizes[min(alike, key=distance), route], case.num_bytes)
        if route.algorithm in PLAN_ONLY:
            own = MESSAGE if case.operation == "send" else OWN
            return self.seconds(case, Route(route.backend, own))
        return None


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
