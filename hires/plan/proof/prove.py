"""Proves a plan before any rank starts: the events of a step have an order in which all end."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from hires.plan.event import ALONE, Event
from hires.plan.groups import groups
from hires.plan.plan import Finding, Plan
from hires.plan.proof.explain import prove_each
from hires.plan.proof.step_order import prove_merged
from hires.plan.rank_kinds import equal_programs, replicas_apart
from hires.plan.traffic import backends_of_plan, calls, counted_events

SHOWN = 8
"""Most problems that become findings."""


@dataclass
class Verdict:
    """The proof of a whole plan."""

    backends: list[str]
    """Those that carry its messages."""
    problems: list[str]
    """Why the events have no such order; nothing: they have one."""
    messages: int
    """Of all replicas, one step."""
    collectives: int
    seconds: float
    """Time that the proof took."""

    @property
    def text(self) -> str:
        """The answer, without the reasons."""
        count = len(self.problems)
        if count:
            return f"{count} problem{'s' if count > 1 else ''}"
        return f"deadlock-free, {self.messages} messages and {self.collectives} collectives a step"

    @property
    def findings(self) -> list[Finding]:
        """The first problems, as errors."""
        return [Finding("error", "parallel", text) for text in self.problems[:SHOWN]]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for ``hires plan --prove --json``."""
        return {
            "backends": self.backends,
            "ok": not self.problems,
            "messages": self.messages,
            "collectives": self.collectives,
            "seconds": self.seconds,
            "problems": self.problems,
        }


def judged(plan: Plan) -> Verdict:
    """Returns the verdict on one step of a plan, after the creation of its groups.

    Replicas do the same and meet in the gradient groups only, at the end of the step, so one stands
    for all that nodes divide alike; the groups are cut down to its ranks.
    """
    began = time.perf_counter()
    with _without_cycles():
        found = (_problems_of(plan, first) for first in replicas_apart(plan))
        problems = next(filter(None, found), [])
    took = time.perf_counter() - began
    counts = {True: 0, False: 0}
    for call, number in calls(plan).items():
        counts[call.operation == "send"] += number // call.num_ranks
    return Verdict(backends_of_plan(plan), problems, counts[True], counts[False], took)


def _problems_of(plan: Plan, first: int) -> list[str]:
    """Returns the problems of the replica that begins with a rank."""
    ranks = range(first, first + plan.ranks_per_replica)
    members = [[rank for rank in group if rank in ranks] for group in groups(plan)]

    def begun() -> list[Iterator[Event]]:
        programs = (counted_events(plan, rank) for rank in ranks)
        return [
            chain(creation(members, rank), (event for event in program if event.role != ALONE))
            for rank, program in zip(ranks, programs, strict=True)
        ]

    if prove_merged(begun(), members, equal_programs(plan, first), first):
        return []
    return prove_each([[*program] for program in begun()], members, first)


@contextlib.contextmanager
def _without_cycles() -> Iterator[None]:
    # A search of Python's for cycles, which events cannot have, would visit all of them.
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def creation(members: list[list[int]], rank: int) -> Iterator[Event]:
    """Yields the groups that a rank creates before the first step, in their order."""
    for index, ranks in enumerate(members):
        if rank in ranks and len(ranks) > 1:
            yield Event("create", index, 0, what=f"the creation of group {index}")
