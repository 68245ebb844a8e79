"""What the records of several ranks say about why they wait."""

from __future__ import annotations

import dataclasses
import json

from hires.core.ranks.call_records import (
    CallFacts,
    CallRing,
    RankCalls,
    explanation,
    first_difference,
    read_calls,
)

SITE = "test_call_records.py"
SUM = CallFacts("all_reduce", 4096, "float32", "gloo")
ROOTED = CallFacts("broadcast", 8, "int64", "gloo")


def ring_of(*calls: tuple[str, CallFacts, object]) -> CallRing:
    """A ring after calls of (communicator, facts, agreed) of ranks 0 and 1."""
    ring = CallRing(())
    for name, facts, agreed in calls:
        ring.note(ring.channel(name, [0, 1]), facts, agreed)
    return ring


def stuck(*rings: CallRing) -> dict[int, RankCalls]:
    return {rank: ring.record(rank, ring.total - 1, 1.0) for rank, ring in enumerate(rings)}


def test_first_call_that_differs_is_named_with_both_lines():
    common = ("gloo", SUM, "ReduceOp.SUM")
    records = stuck(ring_of(common, common), ring_of(common, ("gloo", ROOTED, 0)))
    text = explanation(records)
    line = ring_of.__code__.co_firstlineno + 4
    assert text == (
        f"rank 0 calls all_reduce of 4 KiB float32 (sum) over gloo at {SITE}:{line} where rank 1 "
        f"calls broadcast of 8 B int64 (root 0) over gloo at {SITE}:{line}: call 2 of gloo"
    )


def test_roots_reductions_sizes_types_and_routes_must_agree():
    for one, other in (
        ((ROOTED, 0), (ROOTED, 1)),
        ((SUM, "ReduceOp.SUM"), (SUM, "ReduceOp.MAX")),
        ((SUM, None), (CallFacts("all_reduce", 8192, "float32", "gloo"), None)),
        ((SUM, None), (CallFacts("all_reduce", 4096, "float64", "gloo"), None)),
        ((SUM, None), (CallFacts("all_reduce", 4096, "float32", "gloo:segmented:1KiB"), None)),
    ):
        assert first_difference(stuck(ring_of(("gloo", *one)), ring_of(("gloo", *other))))
        assert not first_difference(stuck(ring_of(("gloo", *one)), ring_of(("gloo", *one))))


def test_rank_that_has_not_come_is_named_with_what_it_does():
    a, b = ring_of(("gloo", SUM, None), ("gloo", SUM, None)), ring_of(("gloo", SUM, None))
    last = a.total - 1
    waiting, computing = a.record(0, last, 2.0), b.record(1, -1, 3.0)
    text = explanation({0: waiting, 1: computing})
    assert "to which rank 1 has not come; rank 1 waits in no call for 3.00 s, and its last" in text
    left = dataclasses.replace(computing, has_left=True)
    assert "rank 1 has left the world" in explanation({0: waiting, 1: left})
    assert "rank 1 gives no answer: it has ended" in explanation({0: waiting})
    assert explanation({0: waiting}, ended=[1]).endswith("to which rank 1 has not come")
    assert explanation({0: waiting}, [], "lost").endswith("rank 1 gives no answer: lost")
    both = {0: waiting, 1: a.record(1, last, 2.0)}
    assert "to which all its ranks have come" in explanation(both)


def test_record_survives_a_file_and_damaged_values_are_none():
    record = stuck(ring_of(("gloo", SUM, None)))[0]
    values = json.loads(json.dumps(dataclasses.asdict(record)))
    assert read_calls(0, values) == record
    for damage in ({"calls": 3}, {"calls": [[1]]}, {"channels": {"gloo": 1}}, {"more": 1}):
        assert read_calls(0, {**values, **damage}) is None
    assert read_calls(0, {}) == RankCalls(0)
