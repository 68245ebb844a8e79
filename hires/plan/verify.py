"""Can this plan run? Its communications are run on the abstract machine before anything starts."""

from __future__ import annotations

from hires.plan.machine import Proof, run_machine
from hires.plan.plan import Finding, Plan
from hires.plan.program import events, groups


def prove(plan: Plan) -> Proof:
    """Runs one step of one replica on the abstract machine.

    Replicas do the same and meet in the gradient groups only, at the end of the step, so the first
    one stands for all; their groups are cut down to its ranks.
    """
    ranks = range(plan.ranks_per_replica)
    members = [[r for r in group if r in ranks] for group in groups(plan)]
    return run_machine([list(events(plan, rank)) for rank in ranks], members)


def verify(plan: Plan) -> list[Finding]:
    """Returns the findings of the proof and sets the plan's verdict."""
    proof = prove(plan)
    if proof.problems:
        count = len(proof.problems)
        plan.verdict = f"{count} problem{'s' if count > 1 else ''}"
        return [Finding("error", "parallel", text) for text in proof.problems[:8]]
    # Every replica does the same, but all meet in one gradient collective for each stage.
    joint = len(plan.stages) if plan.training and plan.num_replicas > 1 else 0
    messages = proof.num_messages * plan.num_replicas
    collectives = (proof.num_collectives - joint) * plan.num_replicas + joint
    plan.verdict = f"deadlock-free, {messages} messages and {collectives} collectives a step"
    return []
