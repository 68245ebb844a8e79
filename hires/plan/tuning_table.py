"""The tuning table: which route a message takes, by measured rules, and what routes cost.

A table is a file of JSON (or the same as YAML), which ``hires tune comm`` writes:

    {"format": 1,
     "made": {"machine": "...", "date": "...", "commit": "...", "command": "...", "noise": 0.03},
     "rules": [{"operation": "all_reduce", "ranks": "2..4", "bytes": "..64KiB", "route": "shm"},
               {"operation": "all_reduce", "bytes": "1MiB..", "route": "mpi:segmented:4MiB"}],
     "default": "gloo",
     "points": ["all_reduce 2 2 cpu float 65536 mpi:segmented:4MiB 0.000310"]}

The first rule that holds a message decides, else ``default``, so every message has a route. A point
is what was measured: the case, the route and its median seconds, of the slowest rank.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hires.core.errors import ConfigError
from hires.core.store import reading
from hires.core.store.files import write_atomically
from hires.core.units import listed
from hires.plan.routes import Route
from hires.plan.table_rules import (
    Case,
    TuningRule,
    parse_rule,
    parse_table_route,
)

FORMAT = 1
MOST_RULES, MOST_POINTS = 2000, 10_000
MADE = ("machine", "date", "commit", "command", "noise")
"""Keys of ``made`` that a measured table has: where, when and how; the noise as a share of 1."""
DISTURBED = "disturbed"
"""Key of ``made``: why the medians cannot be trusted, in words."""
_KEYS = ("format", "made", "rules", "default", "points")
_SHOWN = 5


class Point(NamedTuple):
    """A measured case."""

    case: Case
    route: Route
    seconds: float

    def __str__(self) -> str:
        """Returns the text that :func:`_point` reads."""
        return " ".join(map(str, (*self.case, self.route, f"{self.seconds:.9g}")))


@dataclass(frozen=True)
class TuningTable:
    """Rules, what they fall back to, and the measurements that they come from."""

    rules: Sequence[TuningRule]
    default: Route
    points: Sequence[Point] = ()
    made: Mapping[str, Any] = field(default_factory=dict)

    def route(
        self,
        operation: str,
        ranks: int,
        ranks_per_node: int,
        device: str,
        dtype_class: str,
        num_bytes: int,
        possible: Callable[[Route], bool] | None = None,
    ) -> Route:
        """Returns the route of a message, a function of facts that all its ranks share.

        Rules whose route is not ``possible`` are passed over. ``num_bytes``: of a collective those
        that a rank contributes.
        """
        case = Case(operation, ranks, ranks_per_node, device, dtype_class, num_bytes)
        for rule in self.rules:
            if rule.holds(case) and (possible is None or possible(rule.route)):
                return rule.route
        return self.default

    @property
    def routes(self) -> list[Route]:
        """Returns all routes, each once, that of the default first."""
        return [*dict.fromkeys([self.default, *(rule.route for rule in self.rules)])]

    @property
    def backends(self) -> list[str]:
        """Returns the backends of all routes, that of the default first."""
        return [*dict.fromkeys(route.backend for route in self.routes)]

    @property
    def digest(self) -> str:
        """Returns a digest of the rules and the default."""
        values = [rule._replace(note="").to_dict() for rule in self.rules], str(self.default)
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    @staticmethod
    def read(path: str | Path, base: str = "gloo") -> TuningTable:
        """Returns the table of a file; ``base`` is the backend that ``default`` means in it.

        ConfigError: the file, the number of a rule or point, its value, why, and a remedy.
        """
        try:
            values = reading.read_named_values(path)
        except ConfigError as error:
            text = f"{error}; make the table again (`hires tune comm` makes one)"
            raise ConfigError(text) from None
        try:
            return TuningTable.from_dict(values, base)
        except ConfigError as error:
            raise ConfigError(f"tuning table {path}: {error}") from None

    @staticmethod
    def from_dict(values: Mapping[str, Any], base: str = "gloo") -> TuningTable:
        """Returns the table of plain values; ConfigError: all that is wrong, up to five."""
        problems = [f"unknown key {key!r}" for key in values if key not in _KEYS]
        if values.get("format") != FORMAT:
            problems.append(f"format {values.get('format')!r}; this hires reads {FORMAT}")
        rules = _parsed(values.get("rules"), "rule", lambda one: parse_rule(one, base), problems)
        points = _parsed(values.get("points", []), "point", _point, problems)
        for kind, held, most in (("rules", rules, MOST_RULES), ("points", points, MOST_POINTS)):
            if len(held) > most:
                problems.append(f"{len(held)} {kind}, more than {most}; make it coarser")
        default, made = Route(base), values.get("made", {})
        try:
            default = parse_table_route(values.get("default"), base)
        except ConfigError as error:
            problems.append(f'default: {error}; it has the messages of no rule, as "gloo"')
        if not isinstance(made, Mapping):
            problems.append(f"made {made!r:.40} holds no keys and values")
        if problems:
            raise ConfigError(listed(problems, _SHOWN, "; "))
        return TuningTable(rules, default, points, made)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, as a file holds them."""
        return {
            "format": FORMAT,
            "made": dict(self.made),
            "rules": [rule.to_dict() for rule in self.rules],
            "default": str(self.default),
            "points": [str(point) for point in self.points],
        }

    def write(self, path: str | Path) -> None:
        """Writes a file of one line for each rule and point; ConfigError: it could not be read.

        RunError: it cannot be written.
        """
        values = self.to_dict()
        TuningTable.from_dict(values)
        lines = []
        for key, value in values.items():
            if isinstance(value, list) and value:
                inner = ",\n".join(f"  {json.dumps(one)}" for one in value)
                lines.append(f" {json.dumps(key)}: [\n{inner}\n ]")
            else:
                lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
        write_atomically(path, "{\n" + ",\n".join(lines) + "\n}\n", option="another path")


def _parsed(values: Any, kind: str, parse: Callable[[Any], Any], problems: list[str]) -> list[Any]:
    if not isinstance(values, list):
        problems.append(f"{kind}s {values!r:.40} are no list; write {kind}s: [...]")
        return []
    return [*_each(values, kind, parse, problems)]


def _each(
    values: list[Any], kind: str, parse: Callable[[Any], Any], problems: list[str]
) -> Iterator[Any]:
    for number, value in enumerate(values, start=1):
        try:
            yield parse(value)
        except ConfigError as error:
            problems.append(f"{kind} {number}: {error}")


def _point(value: Any) -> Point:
    try:
        operation, ranks, near, device, dtype, num_bytes, route, text = str(value).split()
        case = Case(operation, int(ranks), int(near), device, dtype, int(num_bytes))
        seconds = float(text)
    except ValueError:
        raise ConfigError(
            f"{value!r:.80} is no point; it has operation, ranks, ranks per node, device, dtype "
            f"class, bytes, route and seconds"
        ) from None
    if not 0 < seconds < math.inf or min(case.ranks, case.ranks_per_node, case.num_bytes + 1) < 1:
        raise ConfigError(f"{value!r:.80}: seconds and counts are positive; measure it again")
    names = {"operation": operation, "device": device, "dtype": dtype, "route": str(route)}
    parse_rule(names, route.partition(":")[0])
    return Point(case, parse_table_route(route, "gloo"), seconds)
