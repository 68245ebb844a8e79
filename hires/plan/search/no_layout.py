"""Explains why a search has no layout to offer, and what would help."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

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
MOST_LOOKED = 5000
"""Layouts that are estimated for it."""
MOST_TIMES = 16
"""Times the ranks that were asked for, up to which is looked."""


def limit_bytes(room: Room, ranks: int) -> float:
    """Returns the bytes that one of so many ranks may need by its own, its libraries left out."""
    own = float("inf") if room.rank_bytes is None else room.rank_bytes
    return min(own, _shared_bytes(room, ranks))


def _shared_bytes(room: Room, ranks: int) -> float:
    """Returns the share of one of so many ranks in the memory of a machine or GPU."""
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


def no_plan(choice: Choice, errors: Iterable[str]) -> str:
    """Returns the reasons for which no layout at all makes a plan, the most frequent first.

    ``errors`` are those of all layouts, each with its reason and what would help.
    """
    remedies = {error.split(";")[0]: error for error in errors}
    reasons = [reason for reason, _ in choice.reasons.most_common(MOST_REASONS)]
    texts = "; ".join(remedies.get(reason, reason) for reason in reasons)
    return f"no layout of ranks={choice.ranks} is possible: {texts}"


def nothing_fits(
    estimator: Estimator, room: Room, choice: Choice, given: GivenKeys, correction: float
) -> str:
    """Returns the least memory that a rank needs, and the fewest ranks that would do.

    ``correction`` is predicted over estimated memory of the layouts that were rehearsed.
    """
    config, ranks = estimator.config, choice.ranks
    limit = limit_bytes(room, ranks)
    if limit <= 0:
        places, own_bytes = room.nodes * max(1, room.devices), room.machine_bytes or 0
        most = places * int(own_bytes // max(1, room.libraries_bytes))
        where = f" each of {places} times" if places > 1 else ""
        remedy = f"use at most {most} ranks" if most else "a rank needs more than that"
        return (
            f"the libraries of ranks={ranks} alone take {size(ranks * room.libraries_bytes)}, and "
            f"the memory has{where} {size(own_bytes)}; {remedy}"
        )
    rehearsed = [option.peak_bytes for option in choice.out if option.rehearsed]
    estimated = choice.least_bytes * correction
    # What was estimated to need less does not fit either, for all that is known.
    least = max(limit, min([estimated, *rehearsed]))
    given_limit = f"memory.limit={config.memory.limit}"
    if room.rank_bytes is None or limit < room.rank_bytes:
        given_limit = f"{size(limit)} for each rank of {size(room.machine_bytes or 0)}"
    fewest, last, all_seen = _fewest_ranks(estimator, ranks, room, given, correction)
    more = f"up to ranks={last} none would do"
    more += "" if all_seen else " (more were not looked at)"
    more += ": use a smaller image, batch or network"
    if fewest is not None:
        more = f"ranks={fewest} would do, by the estimate"
    return (
        f"no layout of ranks={ranks} fits {given_limit}: the fullest rank needs about "
        f"{size(least)} at the least; {more}"
    )


def _fewest_ranks(
    estimator: Estimator, ranks: int, room: Room, given: GivenKeys, correction: float
) -> tuple[int | None, int, bool]:
    """Returns how many ranks have a layout that fits by its estimate, the fewest of them.

    None: there are none. Also up to how many all were looked at, and whether these were all there
    are. Where ranks share a memory, fewer ranks than were asked for may fit, too.
    """
    config, layers = estimator.config, len(estimator.layers)
    looked = 0

    def fits(count: int) -> bool | None:
        """Whether a layout of so many ranks fits; None: too many were looked at to find out."""
        nonlocal looked
        limit = limit_bytes(room, count)
        for shape in itertools.islice(shapes(config, count, layers, given), MOST_SHAPES):
            if looked > MOST_LOOKED:
                return None
            for order in orders(config, shape, given):
                for one in variants(config, order, given):
                    looked += 1
                    if correction * estimator.estimate(one).peak_bytes <= limit:
                        return True
        return False

    most, enough = min(config.launcher.offered_ranks, MOST_TIMES * ranks), None
    # Of a limit for each rank only more ranks need less.
    first, last = (ranks + 1, ranks) if limit_bytes(room, ranks) == room.rank_bytes else (1, 0)
    if first > 1:  # twice as many are quickly found, fewer are looked for then
        doubled = itertools.takewhile(lambda n: n <= most, (ranks << n for n in itertools.count(1)))
        enough = next((count for count in doubled if fits(count)), None)
    for count in range(first, enough or most + 1):
        fitting = fits(count)
        if fitting is None:
            return enough, last, False
        if fitting:
            return count, count, True
        last = count
    return enough, last, True
