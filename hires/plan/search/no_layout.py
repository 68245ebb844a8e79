"""Explains why a search has no layout to offer, and what would help."""

from __future__ import annotations

import itertools
import time

from hires.core.config.run_config import RunConfig
from hires.core.units import size
from hires.plan.memory import Room
from hires.plan.search.candidates import GivenKeys, nearest_counts, orders, shapes, variants
from hires.plan.search.choice import Choice
from hires.plan.search.estimate import Estimator

MOST_REASONS = 3
"""Reasons that one message has."""
MOST_SHAPES = 64
"""Of each number of ranks that are looked at for one that fits."""
LONGEST_S = 5.0
"""Seconds of that look."""
MOST_TIMES = 16
"""Times the ranks that were asked for, up to which is looked."""


def limit_bytes(room: Room, ranks: int) -> float:
    """Returns the bytes that one of so many ranks may need by its own, its libraries left out."""
    if room.rank_bytes is not None:
        return room.rank_bytes
    if room.machine_bytes is None:
        return float("inf")
    places = room.nodes * max(1, room.devices)
    return room.machine_bytes / -(-ranks // places) - room.libraries_bytes


def none_of(config: RunConfig, layers: int, ranks: int, given: GivenKeys) -> str:
    """Returns why no layout has so many ranks, and which numbers of them have one."""
    near = nearest_counts(config, ranks, layers, config.launcher.offered_ranks, given)
    others = " or ".join(f"ranks={count}" for count in near)
    kept = " ".join(f"{key}={value}" for key, value in sorted(given.values.items()))
    return (
        f"no layout of this network uses ranks={ranks}{f' with the given {kept}' if kept else ''}: "
        f"replicas and microbatches divide batch={config.batch}, tiles cut image={config.height}x"
        f"{config.width}, stages the {layers} layers; use "
        f"{' or '.join(filter(None, (others, kept and 'other keys'))) or 'fewer ranks'}"
    )


def no_plan(choice: Choice) -> str:
    """Returns the reasons for which no layout at all makes a plan, the most frequent first."""
    reasons = "; ".join(reason for reason, _ in choice.reasons.most_common(MOST_REASONS))
    return f"no layout of ranks={choice.ranks} is possible: {reasons}"


def nothing_fits(
    estimator: Estimator, room: Room, choice: Choice, given: GivenKeys, correction: float
) -> str:
    """Returns the least memory that a rank needs, and the fewest ranks that would do.

    ``correction`` is predicted over estimated memory of the layouts that were rehearsed.
    """
    config, ranks = estimator.config, choice.ranks
    limit = limit_bytes(room, ranks)
    if limit <= 0:
        most = int((room.machine_bytes or 0) // max(1, room.libraries_bytes))
        return (
            f"the libraries of ranks={ranks} alone take {size(ranks * room.libraries_bytes)}, and "
            f"the memory has {size(room.machine_bytes or 0)}; use fewer than {most} ranks"
        )
    rehearsed = [option.peak_bytes for option in choice.out if option.rehearsed]
    least = max([choice.least_bytes * correction, *([limit] if not rehearsed else [])])
    least = min([least, *rehearsed]) if rehearsed else least
    given_limit = f"memory.limit={config.memory.limit}"
    if room.rank_bytes is None:
        given_limit = f"{size(limit)} for each rank of {size(room.machine_bytes or 0)}"
    fewest, last = _fewest_ranks(estimator, ranks, room, given, correction)
    more = f"up to ranks={last} none would do: use a smaller image, batch or network"
    if fewest is not None:
        more = f"ranks={fewest} would do, by the estimate"
    return (
        f"no layout of ranks={ranks} fits {given_limit}: the fullest rank needs about "
        f"{size(least)} at the least; {more}"
    )


def _fewest_ranks(
    estimator: Estimator, ranks: int, room: Room, given: GivenKeys, correction: float
) -> tuple[int | None, int]:
    """Returns the fewest ranks with a layout that fits by its estimate, and how many it looked at.

    None: none of these has one. Where ranks share a memory, fewer ranks than were asked for may
    fit, too.
    """
    config, layers = estimator.config, len(estimator.layers)
    first = 1 if room.rank_bytes is None else ranks + 1
    until, last = time.monotonic() + LONGEST_S, ranks
    for count in range(first, min(config.launcher.offered_ranks, MOST_TIMES * ranks) + 1):
        limit = limit_bytes(room, count)
        for shape in itertools.islice(shapes(config, count, layers, given), MOST_SHAPES):
            if time.monotonic() > until:
                return None, last
            for order in orders(config, shape, given):
                for one in variants(config, order, given):
                    if correction * estimator.estimate(one).peak_bytes <= limit:
                        return count, count
        last = count
    return None, last
