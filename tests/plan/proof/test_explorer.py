"""Small programs over all interleavings, and the machine that must come to the same verdict."""

from __future__ import annotations

import random

from hires.plan.proof.comm_program import CommProgram, read_program
from hires.plan.proof.explorer import explore, time_line
from hires.plan.proof.prove import run_machine
from hires.plan.proof.semantics import ROUTES
from tests.helpers.mixed_programs import BUGS, random_program, seed_bug


def program(*ranks: list, **values: object) -> CommProgram:
    return read_program({"ranks": dict(enumerate(ranks)), **values})


def test_opposite_orders_on_two_backends_are_drawn():
    found = explore(
        program(["all_reduce gloo", "all_reduce mpi"], ["all_reduce mpi", "all_reduce gloo"])
    )
    assert found.always
    call = "all_reduce of 4 B float32 (sum) over"
    assert time_line(found) == [
        "rank  0  1",
        f"      *  .   {call} gloo",
        f"      .  *   {call} mpi",
        f"      x      rank 0 waits in {call} gloo, to which rank 1 has not come",
        f"         x   rank 1 waits in {call} mpi, to which rank 0 has not come",
    ]


def test_crossed_sends_end_only_if_they_are_buffered():
    crossed = program(["send 1", "recv 1"], ["send 0", "recv 0"])
    assert explore(crossed).always
    assert not explore(crossed, is_buffered=True).problems
    assert not explore(program(["send 1", "recv 1"], ["recv 0", "send 0"])).problems


def test_receive_from_any_rank_deadlocks_in_some_interleavings_only():
    found = explore(program(["recv any", "recv 1"], ["send 0"], ["send 0"]))
    assert found.deadlocks
    assert not found.always
    assert not explore(program(["recv any", "recv any"], ["send 0"], ["send 0"])).problems


def agree(one: CommProgram) -> bool:
    """Whether the explorer and the machine have the same verdict; returns whether it is good."""
    found = explore(one)
    programs, members = one.events()
    proof = run_machine(programs, members)
    mixed = run_machine(programs, members, ROUTES)
    assert (mixed.problems == [], mixed.stuck) == (proof.problems == [], proof.stuck)
    assert bool(found.stuck) == bool(proof.stuck), (found.problems, proof.problems)
    assert bool(found.problems) == bool(proof.problems), (found.problems, proof.problems)
    assert sorted(found.stuck) == proof.stuck
    return not found.problems


def test_explorer_and_proof_agree_on_random_programs():
    for seed in range(40):
        one = random_program(random.Random(seed), 2 + seed % 3, ("gloo", "mpi"), 10)
        assert agree(one), seed
    bugs = [(bug, seed) for bug in BUGS for seed in range(10)]
    found = 0
    for bug, seed in bugs:
        one = random_program(random.Random(seed), 2 + seed % 3, ("gloo", "mpi"), 8)
        broken = seed_bug(random.Random(seed), one, bug)
        if broken is not None:
            assert not agree(broken.program), (bug, seed)
            found += 1
    assert found > 5 * len(BUGS)
