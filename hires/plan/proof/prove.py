"""Proves a plan: its programs run on the abstract machine before any rank starts."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hires.plan.event import Event
from hires.plan.groups import groups, sums_of
from hires.plan.plan import Finding, Plan
from hires.plan.program import AHEAD, JOINED, events
from hires.plan.proof.machine import MAILBOXES, RENDEZVOUS, SEPARATE, STREAMS, run_machine
from hires.plan.proof.rounds import SEMANTICS as ROUNDS
from hires.plan.proof.rounds import prove_in_rounds
from hires.plan.proof.walk import Proof

BACKENDS = {"gloo": (RENDEZVOUS, MAILBOXES), "mpi": (RENDEZVOUS,), "nccl": (SEPARATE,)}
"""How a backend's messages meet. A plan must be right under each of them: whether ranks share
memory, which depends on the machine, is known when they start."""

WAYS = (
    (RENDEZVOUS, AHEAD),
    (MAILBOXES, AHEAD),
    (SEPARATE, AHEAD),
    (STREAMS, JOINED),
    (STREAMS, AHEAD),
)
"""Semantics and orders of posting that ``hires plan --prove`` tries. The engine posts ahead; the
others show why a stream-ordered backend needs a communicator for each way."""

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
            "backends": [name for name, kinds in BACKENDS.items() if self.semantics in kinds],
            "decides": self.semantics in BACKENDS[plan.backend] and self.order == AHEAD,
            "ok": not self.proof.problems,
            "messages": self.messages,
            "collectives": self.collectives,
            "seconds": self.seconds,
            "problems": self.proof.problems,
        }


def prove(plan: Plan, semantics: str = RENDEZVOUS, order: str = AHEAD) -> Proof:
    """Runs one step of one replica on the abstract machine, after the creation of its groups.

    Replicas do the same and meet in the gradient groups only, at the end of the step, so the first
    one stands for all; their groups are cut down to its ranks.

    Args:
        plan: the plan.
        semantics: when messages begin and end.
        order: when receives are posted.
    """
    programs, members = _programs(plan, order)
    return run_machine([[*program] for program in programs], members, semantics)


def judged(plan: Plan, ways: Sequence[tuple[str, str]] = WAYS) -> Iterator[Verdict]:
    """Yields the verdict on a plan for each (semantics, order of posting)."""
    made: dict[str, tuple[list[list[Event]], list[list[int]]]] = {}
    in_rounds: dict[str, Proof | None] = {}
    # Every replica does the same, but all meet in the sums of gradients.
    joint = sum(len(sums_of(plan, stage.index)) for stage in plan.stages)
    joint = joint if plan.num_replicas > 1 else 0
    for semantics, order in ways:
        began = time.perf_counter()
        with _no_collection():
            proof = None
            if semantics in ROUNDS:
                if order not in in_rounds:
                    in_rounds[order] = prove_in_rounds(*_programs(plan, order))
                proof = in_rounds[order]
            if proof is None:
                if order not in made:
                    programs, members = _programs(plan, order)
                    made[order] = [[*program] for program in programs], members
                proof = run_machine(*made[order], semantics)
        took = time.perf_counter() - began
        collectives = (proof.num_collectives - joint) * plan.num_replicas + joint
        messages = proof.num_messages * plan.num_replicas
        yield Verdict(semantics, order, proof, messages, collectives, took)


def verify(plan: Plan) -> list[Finding]:
    """Returns the findings of the proofs and sets the plan's verdict.

    Under each semantics of the plan's own backend a problem is an error, under others a note.
    """
    own = BACKENDS[plan.backend]
    kinds = dict.fromkeys([*own, *itertools.chain.from_iterable(BACKENDS.values())])
    verdicts = judged(plan, [(kind, AHEAD) for kind in kinds])
    for verdict in itertools.islice(verdicts, len(own)):
        plan.verdict = verdict.text
        if verdict.proof.problems:
            return [Finding("error", "parallel", text) for text in verdict.proof.problems[:SHOWN]]
    return [
        Finding("note", "comm.backend", f"{_backends(other.semantics)} could not run it: {text}")
        for other in verdicts
        for text in other.proof.problems[:1]
    ]


def creation(members: list[list[int]], rank: int) -> Iterator[Event]:
    """Yields the groups that a rank creates before the first step, in order.

    Args:
        members: the ranks of each group, in the order in which this rank creates them.
        rank: of the world.
    """
    for index, ranks in enumerate(members):
        if rank in ranks and len(ranks) > 1:
            yield Event("create", index, 0, what=f"the creation of group {index}")


def _programs(plan: Plan, order: str) -> tuple[list[Iterator[Event]], list[list[int]]]:
    """Returns what each rank of the first replica does, and the members of each group there."""
    ranks = range(plan.ranks_per_replica)
    members = [[r for r in group if r in ranks] for group in groups(plan)]
    made = (itertools.chain(creation(members, r), events(plan, r, order)) for r in ranks)
    return [*made], members


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps Python from searching events for cycles, which they cannot have.

    Each search visits all of them, so that in large worlds a message would cost more.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _backends(semantics: str) -> str:
    """Returns the backends whose messages meet so."""
    return " and ".join(name for name, kinds in BACKENDS.items() if semantics in kinds)
