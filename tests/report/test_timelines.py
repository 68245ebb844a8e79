"""Messages, traces and time lines are what the ranks recorded and the plan says, in proportion."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from hires.core.ranks.timeline import FORWARD, Span, StepSpans
from hires.core.store.message_files import ROUTED_KEYS, summed
from hires.plan.program import edge_messages
from hires.plan.simulation.simulate import Link, Network
from hires.report.logged_messages import message_sums
from hires.report.record import RunRecord
from hires.report.timelines import chrome_events, draw, timeline_lines
from hires.report.typed_values import typed
from tests.helpers.report_runs import message_line
from tests.helpers.simulated import STEP, planned_spans
from tests.helpers.small_plans import LAYOUTS, plan_of

KIB = 2**10
SLOW = Link(0.05, 1e5)


def row(size, wait_s=0.02, **keys):
    words = {"operation": "send", "kind": "halo", "backend": "shm", "algorithm": "mailbox"}
    sums = {"count": 4, "bytes": 4 * 2**size, "issue_s": 0.0, "wait_s": wait_s}
    return {**words, "size": size, **sums, **keys}


def line(rank, *rows):
    """Returns what a rank records of two steps whose messages are as planned."""
    planned = [{key: one[key] for key in ROUTED_KEYS} for one in rows]
    for own, one in zip(planned, rows, strict=True):
        own |= {name: one[name] // 2 for name in ("count", "bytes")}
        own["plain_bytes"] = 4 * own["bytes"]  # a codec makes them a quarter
    line = {"kind": "comm", "rank": rank, "first": 2, "steps": 2, "step_s": 0.5}
    codes = {"codec": "int8", "count": 4, "code_s": 0.01, "changed": 1.0, "numbers": 2500.0}
    return {**line, "rows": list(rows), "codes": [codes], "planned": planned}


def sums_of(*lines):
    return message_sums(typed(RunRecord, {"comm": summed(lines)}).comm)


def test_calls_are_of_all_ranks_in_a_step_and_seconds_of_the_mean_rank():
    sums = sums_of(line(0, row(10), row(12)), line(1, row(10, wait_s=0.06)))
    assert sums.step_s == 0.25
    [by_kind] = sums.by("operation", "kind")
    assert (by_kind["count"], by_kind["planned_count"]) == (6, 6)
    assert by_kind["bytes"] == by_kind["planned_bytes"] == 2 * 2 * KIB + 2 * 4 * KIB
    assert by_kind["ratio"] == 4.0
    assert by_kind["wait_s"] == pytest.approx((0.02 + 0.02 + 0.06) / 2 / 2)
    assert by_kind["share"] == pytest.approx(0.025 / 0.25)
    assert [one["share"] for one in sums.by_rank] == pytest.approx([0.02 / 0.25, 0.03 / 0.25])
    assert sums.differences() == []
    coding = {"codec": "int8", "count": 4, "code_s": 0.005, "share": 0.02, "error": 0.02}
    assert sums.codes == [pytest.approx(coding)]
    assert [one.title for one in sums.tables()][-1] == "By codec"


def test_what_differs_from_the_plan_is_named():
    one = line(0, row(10), row(12))
    one["planned"][1] |= {"operation": "recv", "kind": "stage", "size": 4, "count": 1, "bytes": 16}
    assert sums_of(one).headline() == [
        "communication of steps 2 to 3 on 1 ranks: 8.0 % of 250.0 ms",
        "not as planned: recv stage of 16 B: 0 calls a step, planned 1",
        "not as planned: recv stage of 16 B: 0 bytes a step, planned 16",
        "not as planned: send halo of 4 KiB: 2 calls a step, planned 0",
        "not as planned: send halo of 4 KiB: 8192 bytes a step, planned 0",
    ]
    one = line(0, row(10), row(12, backend="gloo", algorithm="message staged"))
    for planned in one["planned"]:
        planned |= {"backend": "shm", "algorithm": "mailbox"}
    words = "send halo of 4 KiB: through gloo message, planned shm mailbox"
    assert sums_of(one).differences() == [words]


@pytest.mark.parametrize("name", ["pp 1f1b", "sp+gems", "local_dp"])
def test_log_of_a_plan_is_as_planned_in_every_table(name):
    plan = plan_of(**LAYOUTS[name])
    sums = sums_of(*(message_line(plan, rank, 4, 0.5) for rank in range(plan.world)))
    assert sums.differences() == []
    calls = set()
    for table in sums.tables():
        place = [column.key for column in table.columns].index("count")
        calls.add(sum(cells[place] for cells in table.rows))
        factors = {"MiB": 2**-20, "ms": 1e3, "%": 100.0}
        assert all(one.factor == factors.get(one.unit, 1) for one in table.columns)
    assert len(calls) == 1


def measured(plan):
    """Returns a step as a run would have recorded it: with waits inside passes and outside."""
    return planned_spans(plan, Network(SLOW, SLOW))


@pytest.mark.parametrize("name", ["single", "sp+pp", "gems_1f1b"])
def test_trace_has_the_passes_and_messages_of_the_plan_and_no_span_over_another(name):
    plan = plan_of(**LAYOUTS[name])
    world = plan.world
    events = chrome_events(plan, {0: measured(plan), 7: measured(plan)})
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert {"name", "cat", "ts", "dur", "pid", "tid", "args"} <= set(event)
            assert min(event["ts"], event["dur"]) >= 0
            threads[event["pid"], event["tid"]].append(event)
    assert {pid for pid, _ in threads} == set(range(2 * world))  # measured, then planned
    passes = defaultdict(list)
    for (pid, _), spans in threads.items():
        spans.sort(key=lambda event: (event["ts"], event["dur"]))
        for before, after in pairwise(spans):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3  # a thousandth of a us
        passes[pid] += [event for event in spans if event["cat"] in ("forward", "backward")]
    for pid, computed in passes.items():
        computed.sort(key=lambda event: event["ts"])
        rank = pid % world
        assert [event["name"] for event in computed] == 2 * plan.actions_of(rank)
        for event in computed[len(computed) // 2 :]:
            direction = plan.direction_of(event["name"])
            assert event["args"] == {
                "step": 7,
                "action": event["name"],
                "microbatch": int(event["name"][1:]),
                "stage": plan.slot_of(rank, direction).stage,
                "direction": ("down", "up")[direction],
            }
    # Every message between stages is an arrow.
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    messages = Counter(
        (rank, message.peer)
        for rank in range(world)
        for action in plan.actions_of(rank)
        for message in edge_messages(plan, rank, action, outgoing=True)
    )
    assert begins.keys() == ends.keys()
    arrows = Counter((begins[n]["pid"], ends[n]["pid"]) for n in begins)
    assert arrows == messages + messages
    assert all(begins[n]["ts"] <= ends[n]["ts"] + 1e-3 for n in begins)


def test_columns_are_time_and_measured_stands_below_planned():
    assert draw(STEP, 16.0, 16) == "dF0~~f..B0b~bgo."
    assert draw([Span(FORWARD, "F0", 2.0, 2.001)], 4.0, 4) == "..F."  # a short pass gets one
    plan = plan_of(stages=2, microbatches=2)
    lines = timeline_lines(plan, planned_spans(plan), width=10 + 6 * 4)
    planned = ["  rank 0: F0ffF1ff........B0bbB1bb", "  rank 1: ....F0ffF1ffB0bbB1bb...."]
    assert lines[1:3] == planned
    assert lines[4] == "measured, step 0: 6.0000 s"
    assert [line.replace(" ", "")[:8] for line in lines[5:7]] == ["rank0:F0", "rank1:.."]
    plan = plan_of(stages=2, microbatches=2, replicas=2)
    one = planned_spans(plan)
    both = [*one, *(replace(spans, rank=2 + spans.rank) for spans in one)]
    lines = [line.partition(": ")[2] for line in timeline_lines(plan, both, width=10 + 6 * 4)]
    assert lines[1:5] == [line.partition(": ")[2] for line in 2 * planned]
    lines = timeline_lines(plan_of(), [StepSpans(0, 3, "", 0.0)], width=20)
    assert lines[4] == "  rank 0: .........."  # without spans it is idle
