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
from hires.plan.gradient_sums import sums_of
from hires.plan.groups import groups
from hires.plan.ownership import publications
from hires.plan.plan import Finding, Plan
from hires.plan.program import events
from hires.plan.proof.explain import prove_each
from hires.plan.proof.step_order import Proof, prove_merged
from hires.plan.rank_kinds import replicas_apart, translated_kinds
from hires.plan.traffic import backends_of_plan

SHOWN = 8
"""Most problems that become findings."""


@dataclass
class Verdict:
    """The proof of a whole plan."""

    backends: list[str]
    """Those that carry its messages."""
    proof: Proof
    messages: int
    """Of all replicas, one step."""
    collectives: int
    seconds: float
    """Time that the proof took."""

    @property
    def text(self) -> str:
        """The answer, without the reasons."""
        count = len(self.proof.problems)
        if count:
            return f"{count} problem{'s' if count > 1 else ''}"
        return f"deadlock-free, {self.messages} messages and {self.collectives} collectives a step"

    @property
    def findings(self) -> list[Finding]:
        """The first problems, as errors."""
        return [Finding("error", "parallel", text) for text in self.proof.problems[:SHOWN]]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for ``hires plan --prove --json``."""
        return {
            "backends": self.backends,
            "ok": not self.proof.problems,
            "messages": self.messages,
            "collectives": self.collectives,
            "seconds": self.seconds,
            "problems": self.proof.problems,
        }


def judged(plan: Plan) -> Verdict:
    """Returns the verdict on one step of a plan, after the creation of its groups.

    Replicas do the same and meet in the gradient groups only, at the end of the step, so one stands
    for all that nodes divide alike; the groups are cut down to its ranks.
    """
    # Every replica does the same, but all meet in the sums of gradients, and agree on the update.
    joint = sum(
        len(sums_of(plan, stage.index)) + len(publications(plan, stage.index))
        for stage in plan.stages
    )
    joint += plan.scales_loss + plan.clips_gradients
    joint = joint if plan.num_replicas > 1 else 0
    began = time.perf_counter()
    with _without_cycles():
        proofs = [_proof_of(plan, first) for first in replicas_apart(plan)]
    proof = next((one for one in proofs if one.problems), proofs[0])
    took = time.perf_counter() - began
    collectives = (proof.num_collectives - joint) * plan.num_replicas + joint
    messages = proof.num_messages * plan.num_replicas
    return Verdict(backends_of_plan(plan), proof, messages, collectives, took)


def _proof_of(plan: Plan, first: int) -> Proof:
    """Returns the proof of the replica that begins with a rank."""
    ranks = range(first, first + plan.ranks_per_replica)
    members = [[rank for rank in group if rank in ranks] for group in groups(plan)]

    def begun() -> list[Iterator[Event]]:
        return [
            chain(creation(members, rank), (e for e in events(plan, rank) if e.role != ALONE))
            for rank in ranks
        ]

    kinds = None if first else translated_kinds(plan)
    proof = prove_merged(begun(), members, kinds, first)
    return proof or prove_each([[*program] for program in begun()], members, first)


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
