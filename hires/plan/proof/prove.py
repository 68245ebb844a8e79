"""Proves a plan: its programs run on the abstract machine before any rank starts."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from hires.plan.event import Event
from hires.plan.gradient_sums import sums_of
from hires.plan.groups import groups
from hires.plan.message_routes import backends_of_plan
from hires.plan.ownership import publications
from hires.plan.plan import Finding, Plan
from hires.plan.program import AHEAD, JOINED, events
from hires.plan.proof.common_order import SEMANTICS as ORDERED
from hires.plan.proof.common_order import prove_in_order
from hires.plan.proof.explain import Explanation
from hires.plan.proof.machine import Proof
from hires.plan.proof.semantics import MACHINES, MAILBOXES, RENDEZVOUS, ROUTES, SEPARATE, STREAMS
from hires.plan.rank_kinds import translated_kinds

BACKENDS = {
    "gloo": (RENDEZVOUS, MAILBOXES),
    "mpi": (RENDEZVOUS, MAILBOXES),
    "nccl": (SEPARATE,),
    "shm": (RENDEZVOUS, MAILBOXES),
}
"""How messages meet where one backend carries all of them, or all but small halos."""

WAYS = (
    (ROUTES, AHEAD),
    (RENDEZVOUS, AHEAD),
    (MAILBOXES, AHEAD),
    (SEPARATE, AHEAD),
    (STREAMS, JOINED),
    (STREAMS, AHEAD),
)
"""Semantics and orders of posting that ``hires plan --prove`` tries. The engine posts ahead by the
plan's routes; the others show why a stream-ordered backend needs a communicator for each way."""

SHOWN = 8
"""Most problems that become findings."""


@dataclass
class Verdict:
    """The proof of a whole plan under one semantics and one order of posting."""

    semantics: str
    order: str
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

    def to_dict(self, plan: Plan) -> dict[str, Any]:
        """Returns plain values, for ``hires plan --prove --json``."""
        return {
            "semantics": self.semantics,
            "order": self.order,
            "backends": backends_of_plan(plan)
            if self.semantics == ROUTES
            else [name for name, kinds in BACKENDS.items() if self.semantics in kinds],
            "decides": self.semantics in deciding_semantics(plan) and self.order == AHEAD,
            "ok": not self.proof.problems,
            "messages": self.messages,
            "collectives": self.collectives,
            "seconds": self.seconds,
            "problems": self.proof.problems,
        }


def deciding_semantics(plan: Plan) -> tuple[str, ...]:
    """Returns under which semantics a plan must be right.

    Its routes are what runs. Where ranks turn out to have no memory in common when they start, the
    messages of that fall back to the plan's own backend, and these must be right, too.
    """
    return ROUTES, BACKENDS[plan.backend][0]


def judged(plan: Plan, ways: Sequence[tuple[str, str]] = WAYS) -> Iterator[Verdict]:
    """Yields the verdict on one step of a plan, after the creation of its groups.

    Replicas do the same and meet in the gradient groups only, at the end of the step, so the first
    one stands for all; their groups are cut down to its ranks.
    """
    ranks = range(plan.ranks_per_replica)
    members = [[rank for rank in group if rank in ranks] for group in groups(plan)]

    def begun(order: str) -> list[Iterator[Event]]:
        return [chain(creation(members, r), events(plan, r, order)) for r in ranks]

    @functools.cache
    def proof_in_order(order: str) -> Proof | None:
        return prove_in_order(begun(order), members, translated_kinds(plan))

    @functools.cache
    def programs(order: str) -> list[list[Event]]:
        return [[*program] for program in begun(order)]

    # Every replica does the same, but all meet in the sums of gradients, and agree on the update.
    joint = sum(
        len(sums_of(plan, stage.index)) + len(publications(plan, stage.index))
        for stage in plan.stages
    )
    joint += plan.scales_loss + plan.clips_gradients
    joint = joint if plan.num_replicas > 1 else 0
    for semantics, order in ways:
        began = time.perf_counter()
        with _without_cycles():
            proof = proof_in_order(order) if semantics in ORDERED else None
            proof = proof or run_machine(programs(order), members, semantics)
        took = time.perf_counter() - began
        collectives = (proof.num_collectives - joint) * plan.num_replicas + joint
        messages = proof.num_messages * plan.num_replicas
        yield Verdict(semantics, order, proof, messages, collectives, took)


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


def run_machine(
    programs: list[list[Event]], members: list[list[int]], semantics: str = RENDEZVOUS
) -> Proof:
    """Runs one list of events per rank; takes time in proportion to their number.

    The proof has no ``problems`` if every rank reaches its end with every message received.
    """
    machine = MACHINES[semantics](programs, members)
    machine.run()
    machine.proof.problems += Explanation(machine).problems()
    return machine.proof


def verify(plan: Plan) -> list[Finding]:
    """Returns the findings of the proofs and sets the plan's verdict.

    Under each semantics that decides a problem is an error, under others a note.
    """
    own = deciding_semantics(plan)
    kinds = dict.fromkeys([*own, *itertools.chain.from_iterable(BACKENDS.values())])
    verdicts = judged(plan, [(kind, AHEAD) for kind in kinds])
    for verdict in itertools.islice(verdicts, len(own)):
        plan.verdict = verdict.text
        if verdict.proof.problems:
            return [Finding("error", "parallel", text) for text in verdict.proof.problems[:SHOWN]]
    findings = []
    for verdict in verdicts:
        backends = [name for name, ways in BACKENDS.items() if verdict.semantics in ways]
        for text in verdict.proof.problems[:1]:
            text = f"{' and '.join(backends)} could not run it: {text}"
            findings.append(Finding("note", "comm.backend", text))
    return findings


def creation(members: list[list[int]], rank: int) -> Iterator[Event]:
    """Yields the groups that a rank creates before the first step, in their order."""
    for index, ranks in enumerate(members):
        if rank in ranks and len(ranks) > 1:
            yield Event("create", index, 0, what=f"the creation of group {index}")
