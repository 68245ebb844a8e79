"""Reads the rules of a tuning table, and matches messages to them.

A rule is a box: an interval of ranks, of ranks per node and of bytes, and sets of operations,
devices and classes of types. Of several that hold a message the first one decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from hires.core.errors import ConfigError
from hires.core.registry import offer
from hires.core.units import parse_size
from hires.plan.routes import (
    CHANNEL,
    DIRECT,
    FLAT,
    MESSAGE,
    SEGMENTED,
    Route,
    exact_size,
    parse_route,
)

RULED = (
    "send", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce",
    "gather", "scatter", "barrier",
)  # fmt: skip
"""``send`` stands for both sides of a message."""
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
ONE_ROUTE = ("all_to_all", "gather", "scatter")
"""Operations whose ranks may have a size each, which no rank has of all: one route for all."""
DEVICES = ("cpu", "cuda")
DTYPES = {
    "float": ("float32", "float64", "complex64", "complex128"),
    "half": ("float16", "bfloat16"),
    "integer": ("int64", "int32", "int16", "int8", "uint8", "bool"),
    "bytes": (),
}
"""Class -> types; operations that do not reduce move ``bytes``."""
CARRIES = {
    SEGMENTED: ("all_reduce", "reduce", "broadcast", "all_gather"),
    DIRECT: RULED[1:-1],  # all but messages and barriers
    **dict.fromkeys((MESSAGE, CHANNEL), ("send",)),
    FLAT: ("all_reduce",),
}
"""Algorithm -> operations; one that is not listed has all of them."""
ALL = "all"
"""Ranks per node of a group that lies on one node."""
KEYS = ("operation", "ranks", "ranks_per_node", "device", "dtype", "bytes", "route", "note")

Interval = tuple[float, float]
"""Least and most, both included; the most may be infinite."""
ANY: Interval = (0, math.inf)


def dtype_class(operation: str, dtype: str) -> str:
    """Returns the class of a type in an operation, as ``float32`` or ``torch.float32``."""
    if operation not in REDUCING:
        return "bytes"
    name = dtype.removeprefix("torch.")
    return next((kind for kind, names in DTYPES.items() if name in names), "bytes")


class Case(NamedTuple):
    """The facts of a message by which a table chooses: they are the same on all its ranks."""

    operation: str
    ranks: int
    ranks_per_node: int
    device: str
    dtype_class: str
    num_bytes: int
    """Of a collective those that a rank contributes."""


class TuningRule(NamedTuple):
    """A box of cases, and their route. Empty sets hold everything."""

    route: Route
    operations: tuple[str, ...] = ()
    ranks: Interval = ANY
    ranks_per_node: Interval | None = ANY
    """None: as many as there are ranks."""
    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    num_bytes: Interval = ANY
    note: str = ""

    def holds(self, case: Case) -> bool:
        """Whether the rule decides for a case, if none before it does."""
        near = self.ranks_per_node
        if near is None:
            fits = case.ranks_per_node >= case.ranks
        else:
            fits = near[0] <= case.ranks_per_node <= near[1]
        return (
            fits
            and (not self.operations or case.operation in self.operations)
            and self.ranks[0] <= case.ranks <= self.ranks[1]
            and (not self.devices or case.device in self.devices)
            and (not self.dtypes or case.dtype_class in self.dtypes)
            and self.num_bytes[0] <= case.num_bytes <= self.num_bytes[1]
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the values that :func:`parse_rule` reads."""
        values: dict[str, Any] = {}
        for key, names in (
            ("operation", self.operations),
            ("device", self.devices),
            ("dtype", self.dtypes),
        ):
            if names:
                values[key] = names[0] if len(names) == 1 else [*names]
        if self.ranks != ANY:
            values["ranks"] = _interval_text(self.ranks)
        if self.ranks_per_node != ANY:
            near = self.ranks_per_node
            values["ranks_per_node"] = ALL if near is None else _interval_text(near)
        if self.num_bytes != ANY:
            values["bytes"] = _interval_text(self.num_bytes, exact_size)
        values = {key: values[key] for key in KEYS if key in values} | {"route": str(self.route)}
        return values | ({"note": self.note} if self.note else {})


def parse_rule(values: Any, base: str) -> TuningRule:
    """Returns the rule of plain values; ``base`` is the backend that ``default`` means.

    ConfigError: a key, name or interval is wrong; the error names a right one.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{values!r:.60} is no rule; write {{operation: ..., route: ...}}")
    for key in values:
        if key not in KEYS:
            raise ConfigError(f"unknown key {key!r}; {offer(str(key), KEYS)}")
    if "route" not in values:
        raise ConfigError("it has no route; add one, as route: gloo")
    near = values.get("ranks_per_node")
    route = parse_table_route(values["route"], base)
    operations = _names(values.get("operation"), "operation", RULED)
    for name in operations:
        if name not in CARRIES.get(route.algorithm, (name,)):
            able = ", ".join(one for one in CARRIES[route.algorithm] if one in RULED)
            raise ConfigError(f"{route.algorithm} does not carry out {name}, only {able}")
        if name in ONE_ROUTE and values.get("bytes") is not None:
            raise ConfigError(
                f"bytes {values['bytes']!r:.60}: the ranks of {name} may have a size each, so that "
                f"one route serves all sizes; leave bytes out, or make the table again"
            )
    return TuningRule(
        route,
        operations,
        _interval(values.get("ranks"), "ranks"),
        None if near == ALL else _interval(near, "ranks_per_node"),
        _names(values.get("device"), "device", DEVICES),
        _names(values.get("dtype"), "dtype", tuple(DTYPES)),
        _interval(values.get("bytes"), "bytes"),
        str(values.get("note", ""))[:200],
    )


def parse_table_route(text: Any, base: str) -> Route:
    """Returns a route whose backend may be ``default``; ConfigError: it is none."""
    if not isinstance(text, str):
        raise ConfigError(f"route {text!r:.60} is no text; write it as mpi:segmented:4MiB")
    first, colon, rest = text.strip().partition(":")
    return parse_route(base + colon + rest if first == "default" else text)


def _names(value: Any, key: str, known: tuple[str, ...]) -> tuple[str, ...]:
    if value is None:
        return ()
    names = value if isinstance(value, list) else [value]
    if not names:
        raise ConfigError(f"{key} is an empty list, which holds nothing; leave the key out for all")
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown {key} {name!r}; {offer(str(name), known)}")
    return tuple(dict.fromkeys(names))


def _interval(value: Any, key: str) -> Interval:
    # ``8``, ``2..8``, ``..64KiB``, ``1MiB..``
    if value is None:
        return ANY
    low, dots, high = str(value).partition("..")
    least, most = _bound(low, key, value, 0), _bound(high, key, value, math.inf)
    if not dots:
        most = least
    if isinstance(value, bool) or not str(value).strip(" .") or least > most:
        raise ConfigError(f"{key} {value!r:.60} holds nothing; write {_EXAMPLES[key]}")
    return least, most


_EXAMPLES = {
    "bytes": "4KiB..1MiB, ..64KiB or 1MiB..",
    "ranks": "4, 2..8 or 16..",
    "ranks_per_node": "4, 2..8 or all",
}


def _bound(text: str, key: str, value: Any, default: float) -> float:
    text = text.strip()
    if not text:
        return default
    if text == "0":
        return 0
    number = parse_size(text)
    if number is None or (key != "bytes" and not text.isdigit()):
        kind = "size" if key == "bytes" else "whole number"
        raise ConfigError(f"{key} {value!r:.60}: {text!r:.40} is no {kind}; {_EXAMPLES[key]}")
    return number


def _interval_text(interval: Interval, text_of: Any = str) -> Any:
    low, high = interval
    if low == high:
        return text_of(int(low))
    return f"{text_of(int(low)) if low else ''}..{text_of(int(high)) if high < math.inf else ''}"
