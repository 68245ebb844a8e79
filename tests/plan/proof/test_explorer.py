"""Small programs over all interleavings, and the one pass that must come to the same verdict."""

from __future__ import annotations

import random
import time

import pytest

from hires.core.errors import ConfigError
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


def test_broadcast_root_leaves_early_where_messages_are_buffered():
    one = ["broadcast 0", "send 1"], ["recv 0", "broadcast 0"]
    assert explore(program(*one)).always
    assert not explore(program(*one), is_buffered=True).problems


def test_nccl_runs_messages_of_two_ranks_in_order_and_a_batch_at_once():
    ends = ["wait"]
    crossed = (
        ["a = isend 1 tag=1", "b = irecv 1 tag=2", *ends],
        ["b = isend 0 tag=2", "a = irecv 0 tag=1", *ends],
    )
    assert not explore(program(*crossed)).problems
    assert explore(program(*crossed, backend="nccl")).always
    batched = (
        [["a = isend 1 tag=1", "b = irecv 1 tag=2"], *ends],
        [["b = isend 0 tag=2", "a = irecv 0 tag=1"], *ends],
    )
    assert not explore(program(*batched, backend="nccl")).problems


def test_sides_that_differ_and_messages_without_a_side_are_named():
    found = explore(program(["broadcast 0"], ["broadcast 1"]))
    [text] = found.problems
    assert text.startswith("rank 0 calls broadcast of 4 B float32, root 0 over gloo where rank 1")
    found = explore(program(["a = isend 1", "wait"], ["barrier"]), is_buffered=True)
    assert (
        "deadlock: rank 1 waits in barrier over gloo, to which rank 0 has not come"
        in (found.problems[0])
    )
    found = explore(program(["a = isend 1", "wait"], []), is_buffered=True)
    assert found.problems == [
        "rank 0 calls isend of 4 B float32 to rank 1, which rank 1 never takes"
    ]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["all_redcue"], "all_reduce"),
        (["send 0"], "the other rank is 0; name one of [1]"),
        (["isend 1"], "it needs a handle"),
        (["a = isend 1"], "never waits for a"),
        (["wait a"], "no open handle"),
        (["barrier gluu"], "gloo"),
        (["barrier group=pair"], "'group=pair' is not valid"),
        (["all_reduce dtype=float31"], "float32"),
    ],
)
def test_lines_that_are_wrong_are_named(lines: list[str], words: str):
    with pytest.raises(ConfigError, match="rank 0") as caught:
        program(lines, [])
    assert words in str(caught.value)


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
    for seed in range(60):
        one = random_program(random.Random(seed), 2 + seed % 3, ("gloo", "mpi"), 10)
        assert agree(one), seed


@pytest.mark.parametrize("bug", BUGS)
def test_explorer_and_proof_find_the_same_seeded_bugs(bug: str):
    found = 0
    for seed in range(40):
        one = random_program(random.Random(seed), 2 + seed % 3, ("gloo", "mpi"), 8)
        broken = seed_bug(random.Random(seed), one, bug)
        if broken is not None:
            assert not agree(broken.program), (bug, seed)
            found += 1
    assert found > 20


def test_explorer_visits_few_states_of_three_ranks_and_eight_calls():
    began = time.process_time()
    racing = [["recv any"] * 8, *([["send 0"] * 4, ["send 0"] * 4])]
    found = explore(program(*racing))
    assert not found.problems
    assert found.num_states < 20_000
    assert time.process_time() - began < 60  # a guard against an explosion, not a measurement
