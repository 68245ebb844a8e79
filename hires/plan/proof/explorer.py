"""Runs a small program of communication calls over all interleavings of its ranks.

What a step is, and what it completes: :mod:`hires.plan.proof.call_machine`.

States are hashed. Ranks whose next step no receive from any rank can notice commute with all
others, so one such rank is taken and the others wait: every deadlock is still found, in as few
states as the program has steps. Where there are receives from any rank the order matters, and
every order is tried.

Source:
    Godefroid, "Partial-order methods for the verification of concurrent systems", LNCS 1032, 1996
    (persistent sets); Siegel and Avrunin, "Modeling wildcard-free MPI programs for verification",
    PPoPP 2005 (without wildcards one order decides).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hires.core.errors import ConfigError
from hires.plan.proof.call_machine import CallMachine, ExploredState
from hires.plan.proof.comm_program import CommProgram

MOST_STATES = 500_000


@dataclass
class Exploration:
    """What all interleavings of a program come to."""

    program: CommProgram
    is_buffered: bool
    num_states: int = 0
    problems: list[str] = field(default_factory=list)
    """Sides that differ, messages that nothing receives, and a deadlock; each once."""
    steps: list[tuple[int, str]] = field(default_factory=list)
    """The shortest way into a deadlock: which rank takes a step, and which."""
    stuck: dict[int, str] = field(default_factory=dict)
    """What each rank that cannot go on waits for there."""
    always: bool = False
    """Whether every interleaving ends in a deadlock."""

    @property
    def deadlocks(self) -> bool:
        """Whether some interleaving ends with ranks that wait for ever."""
        return bool(self.stuck)


def explore(program: CommProgram, is_buffered: bool = False) -> Exploration:
    """Runs every interleaving; ConfigError: there are more states than can be held.

    ``is_buffered``: sends, and the ranks of rooted collectives that need no answer, go on at once.
    """
    machine = CallMachine(program, is_buffered)
    found = Exploration(program, is_buffered)
    start = ExploredState((0,) * len(program.ranks))
    before: dict[ExploredState, tuple[ExploredState, int, str] | None] = {start: None}
    todo, ends = deque([start]), 0  # breadth first, so the first deadlock has the shortest way
    while todo:
        state = todo.popleft()
        steps = [*machine.steps(state)]
        for rank, words, following in steps:
            if following not in before:
                before[following] = state, rank, words
                todo.append(following)
        if len(before) > MOST_STATES:
            raise ConfigError(
                f"the program has more than {MOST_STATES} states; use fewer calls, or fewer "
                f"receives from any rank"
            )
        if steps:
            continue
        stuck = machine.stuck(state)
        ends += not stuck
        if stuck and not found.stuck:
            found.stuck, found.steps = stuck, _way(before, state)
        found.problems += [one for one in machine.leftovers(state) if not stuck]
    found.num_states, found.always = len(before), not ends
    problems = [*machine.mismatches, *found.problems]
    if found.stuck:
        waits = "; ".join(f"rank {rank} {text}" for rank, text in found.stuck.items())
        problems.append(f"deadlock: {waits}")
    found.problems = list(dict.fromkeys(problems))
    return found


def _way(before: dict[ExploredState, Any], state: ExploredState) -> list[tuple[int, str]]:
    steps = []
    while (step := before[state]) is not None:
        state, rank, words = step
        steps.append((rank, words))
    return steps[::-1]


def time_line(found: Exploration) -> list[str]:
    """Returns the way into the deadlock: a column for each rank, a row for each call.

    rank  0  1
          *  .   all_reduce of 4KiB float32 (sum) over gloo
          .  *   all_reduce of 4KiB float32 (sum) over mpi
          x      rank 0 waits in ...
             x   rank 1 waits in ...
    """
    ranks = [str(rank) for rank in range(len(found.program.ranks))]
    rows = [("*", ".", rank, words) for rank, words in found.steps if words]
    rows += [("x", " ", rank, f"rank {rank} {text}") for rank, text in found.stuck.items()]
    lines = ["rank  " + "  ".join(ranks)]
    for sign, other, mover, words in rows:
        signs = [sign if mover == one else other for one in range(len(ranks))]
        cells = [cell.ljust(len(name)) for cell, name in zip(signs, ranks, strict=True)]
        lines.append(f"      {'  '.join(cells)}   {words}")
    return lines
