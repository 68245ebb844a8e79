"""Can this plan run? Its communications are run on the abstract machine before anything starts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from hires.plan.machine import DIRECTED, RENDEZVOUS, STREAMS, run_machine
from hires.plan.plan import Finding, Plan
from hires.plan.program import AHEAD, JOINED, creation, events, groups
from hires.plan.walk import Proof

BACKENDS = {"gloo": RENDEZVOUS, "mpi": RENDEZVOUS, "nccl": DIRECTED}
"""How a backend's messages meet."""

WAYS = ((RENDEZVOUS, AHEAD), (DIRECTED, AHEAD), (STREAMS, JOINED), (STREAMS, AHEAD))
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
            "backends": [name for name, kind in BACKENDS.items() if kind == self.semantics],
            "decides": (self.semantics, self.order) == (BACKENDS[plan.backend], AHEAD),
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
    ranks = range(plan.ranks_per_replica)
    members = [[r for r in group if r in ranks] for group in groups(plan)]
    programs = [[*creation(members, rank), *events(plan, rank, order)] for rank in ranks]
    return run_machine(programs, members, semantics)


def judge(plan: Plan, semantics: str, order: str) -> Verdict:
    """Proves a plan one way, and counts for all replicas."""
    began = time.perf_counter()
    proof = prove(plan, semantics, order)
    took = time.perf_counter() - began
    # Every replica does the same, but all meet in one gradient collective for each stage.
    joint = len(plan.stages) if plan.training and plan.num_replicas > 1 else 0
    collectives = (proof.num_collectives - joint) * plan.num_replicas + joint
    messages = proof.num_messages * plan.num_replicas
    return Verdict(semantics, order, proof, messages, collectives, took)


def judge_all(plan: Plan) -> list[Verdict]:
    """Proves a plan in every way."""
    return [judge(plan, semantics, order) for semantics, order in WAYS]


def verify(plan: Plan) -> list[Finding]:
    """Returns the findings of the proofs and sets the plan's verdict.

    Under the semantics of the plan's own backend a problem is an error, under others a note.
    """
    own = judge(plan, BACKENDS[plan.backend], AHEAD)
    plan.verdict = own.text
    if own.proof.problems:
        return [Finding("error", "parallel", text) for text in own.proof.problems[:SHOWN]]
    findings = []
    for semantics in dict.fromkeys(BACKENDS.values()):
        if semantics != own.semantics:
            problems = judge(plan, semantics, AHEAD).proof.problems
            findings += [
                Finding("note", "comm.backend", f"{_backends(semantics)} could not run it: {text}")
                for text in problems[:1]
            ]
    return findings


def _backends(semantics: str) -> str:
    """Returns the backends whose messages meet so."""
    return " and ".join(name for name, kind in BACKENDS.items() if kind == semantics)
