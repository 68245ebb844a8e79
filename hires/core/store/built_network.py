"""Describes what a network of the user's holds once it is built, so that a difference is seen.

Its source and the files that Python opened for it do not say everything: a library in C may read a
file, a function may read a variable of the environment. What was built shows them all: the graph,
and every parameter and buffer with a digest of its numbers.

    one machine       digests are compared                      a changed bit is another network
    two machines      two sums of each tensor are compared      the last bits of first values differ

So it is no part of a run's name, unless a run of that name was built otherwise (rundir.run_path).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hires.core.errors import ConfigError

ROUNDING = 1e-4
"""Difference of two sums, relative to the norm, that machines may have: first values go through
``erfinv``, ``cos`` or a QR decomposition, which each processor rounds in its own way."""
_SHOWN = 3


class BuiltTensor(NamedTuple):
    """A parameter or buffer with the first values that the network gave it."""

    facts: str
    """Type, shape and strides, and whether it trains."""
    sha256: str
    """16 digits of that of its numbers."""
    mixed: float
    """Sum of its numbers, each with a factor of its place."""
    norm: float

    def is_close(self, other: BuiltTensor) -> bool:
        """Whether two tensors are equal but for rounding."""
        if self.facts != other.facts or self.sha256 == other.sha256:
            return self.facts == other.facts
        pairs = (self.mixed, other.mixed), (self.norm, other.norm)
        return all(abs(a - b) <= ROUNDING * self.norm for a, b in pairs)


@dataclass(frozen=True)
class BuiltNetwork:
    """The tensors of a network, and what was traced of it."""

    machine: str
    """What decides how numbers are rounded."""
    graph: str
    """Digest of its operations."""
    tensors: Mapping[str, BuiltTensor]
    """By name."""
    constants: Mapping[str, BuiltTensor] = field(default_factory=dict)
    """Those of its operations, by name."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BuiltNetwork:
        """Returns the network that plain values describe; raises ConfigError."""
        try:
            tensors, constants = (
                {
                    str(name): BuiltTensor(str(facts), str(sha256), float(mixed), float(norm))
                    for name, (facts, sha256, mixed, norm) in held.items()
                }
                for held in (values["tensors"], values.get("constants") or {})
            )
            return cls(str(values["machine"]), str(values["graph"]), tensors, constants)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"a description of a network is damaged: {error}") from None

    @property
    def digest(self) -> str:
        """16 digits that differ where a bit does."""
        held = [self.tensors, self.constants]
        bits = [{n: [t.facts, t.sha256] for n, t in one.items()} for one in held]
        text = json.dumps([self.graph, *bits], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def other_tensors(self, other: BuiltNetwork, exact: bool = False) -> list[str]:
        """Returns the names of tensors that differ by more than two machines may.

        With ``exact`` two of one machine may not differ at all.
        """
        return _others(self.tensors, other.tensors, exact and self.machine == other.machine)

    def other_operations(self, other: BuiltNetwork) -> bool:
        """Whether operations differ, or their constants by more than two machines may."""
        exact = self.machine == other.machine
        return self.graph != other.graph or bool(_others(self.constants, other.constants, exact))


def built_changes(old: BuiltNetwork | None, new: BuiltNetwork | None) -> str | None:
    """Returns in words what was built otherwise; None if nothing was, or one was not recorded."""
    if old is None or new is None:
        return None
    names = new.other_tensors(old, exact=True)
    if names:
        return f"{tensors_named(names)} of the network changed"
    return "an operation of the network changed" if new.other_operations(old) else None


def tensors_named(names: list[str]) -> str:
    """Returns some tensors in words: ``the first values of conv1.weight and 3 more``."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"the first values of {', '.join(names[:_SHOWN])}{more}"


def _others(
    ours: Mapping[str, BuiltTensor], theirs: Mapping[str, BuiltTensor], exact: bool
) -> list[str]:
    pairs = ((n, ours.get(n), theirs.get(n)) for n in dict.fromkeys([*ours, *theirs]))
    return [n for n, a, b in pairs if a is None or b is None or not _same(a, b, exact)]


def _same(one: BuiltTensor, other: BuiltTensor, exact: bool) -> bool:
    if exact:
        return (one.facts, one.sha256) == (other.facts, other.sha256)
    return one.is_close(other)
