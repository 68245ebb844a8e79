"""Turns the depth of a residual network, 9n+2 layers, into its n blocks per group."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hires.core.errors import ConfigError

BY_BLOCKS = ("preact_resnet", "mpi4dl_resnet")
"""Networks of three groups of n blocks, each of three layers, beside the first and last layer."""

DEPTH, N = 50, 12
"""Of a network for which neither is given; none of these networks has that depth."""


def blocks_of(name: str, depth: int, given: Collection[int] = ()) -> int:
    """Returns n; ConfigError: no n has this depth, or ``given``, if any, is another n."""
    n, rest = divmod(depth - 2, 9)
    if n < 1 or rest:
        nearest = [11] if n < 1 else [9 * n + 2, 9 * n + 11]
        depths = " or ".join(f"model.depth={one}" for one in nearest)
        raise ConfigError(f"model.depth={depth}: {name} has 9n+2 layers; use {depths}")
    for other in {*given} - {n}:
        raise ConfigError(
            f"model.depth={depth} is model.n={n} (9n+2), which contradicts model.n={other}; "
            f"give one of the two"
        )
    return n


def settle(model: dict[str, Any], given: Collection[str]) -> None:
    """Turns a depth into n in a section's values; ConfigError: they contradict each other.

    One of the two among the ``given`` keys goes before the other in a file. Runs are named after n,
    and older ones hold a depth that had no effect, so configs are not read in this way.
    """
    if model["name"] not in BY_BLOCKS:
        return
    by_depth, by_n = "model.depth" in given, "model.n" in given
    if by_depth or (model["depth"] != DEPTH and not by_n):
        stated = by_n if by_depth else model["n"] != N
        model["n"] = blocks_of(model["name"], model["depth"], [model["n"]] if stated else [])
    model["depth"] = DEPTH
