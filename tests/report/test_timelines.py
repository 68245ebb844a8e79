"""Do traces and drawn time lines show what the plan says was done, in proportion to time?"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from hires.core.errors import ConfigError
from hires.core.ranks.timeline import FORWARD, Span, StepSpans
from hires.plan.plan import Plan
from hires.plan.program import edge_messages
from hires.plan.simulation.simulate import Link, Network, simulate
from hires.report.timelines import (
    Event,
    chrome_events,
    draw,
    planned_steps,
    timeline_lines,
    write_trace,
)
from tests.helpers.simulated import STEP, unit_costs
from tests.helpers.small_plans import LAYOUTS, plan_of

SLOW = Link(0.05, 1e5)
NAMES = ("single", "pp", "pp 1f1b", "sp+pp", "local_dp", "sp+gems", "gems_1f1b")


def measured(plan: Plan) -> list[StepSpans]:
    """Returns a step as a run would have recorded it: with waits inside passes and outside."""
    return simulate(plan, unit_costs(plan), Network(SLOW, SLOW)).ranks


def spans(events: list[Event], first: int, end: int) -> list[Event]:
    """Returns the spans of some processes."""
    return [event for event in events if event["ph"] == "X" and first <= event["pid"] < end]


@pytest.mark.parametrize("name", NAMES)
def test_spans_of_a_thread_do_not_overlap(name: str):
    plan = plan_of(**LAYOUTS[name])
    events = chrome_events(plan, {0: measured(plan), 1: measured(plan)})
    threads: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in spans(events, 0, 2 * plan.world):
        assert {"name", "cat", "ts", "dur", "pid", "tid", "args"} <= set(event)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        threads[event["pid"], event["tid"]].append(event)
    assert {pid for pid, _ in threads} == set(range(2 * plan.world))
    for held in threads.values():
        held.sort(key=lambda event: (event["ts"], event["dur"]))
        for before, after in pairwise(held):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3  # a thousandth of a us


@pytest.mark.parametrize("name", NAMES)
def test_passes_are_those_of_the_plan_measured_and_planned(name: str):
    plan = plan_of(**LAYOUTS[name])
    events = chrome_events(plan, {7: measured(plan)})
    for rank in range(plan.world):
        for pid in (rank, plan.world + rank):
            found = [
                event
                for event in spans(events, pid, pid + 1)
                if event["cat"] in ("forward", "backward")
            ]
            found.sort(key=lambda event: event["ts"])
            assert [event["name"] for event in found] == plan.actions_of(rank)
            for event in found:
                direction = plan.direction_of(event["name"])
                assert event["args"] == {
                    "step": 7,
                    "action": event["name"],
                    "microbatch": int(event["name"][1:]),
                    "stage": plan.slot_of(rank, direction).stage,
                    "direction": ("down", "up")[direction],
                }


@pytest.mark.parametrize("name", NAMES)
def test_every_message_between_stages_is_an_arrow(name: str):
    plan = plan_of(**LAYOUTS[name])
    events = chrome_events(plan, {0: measured(plan)})
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    expected = Counter(
        (rank, message.peer)
        for rank in range(plan.world)
        for action in plan.actions_of(rank)
        for message in edge_messages(plan, rank, action, outgoing=True)
    )
    assert begins.keys() == ends.keys()
    assert Counter((begins[n]["pid"], ends[n]["pid"]) for n in begins) == expected
    assert all(begins[n]["ts"] <= ends[n]["ts"] + 1e-3 for n in begins)


def test_processes_and_threads_have_names():
    plan = plan_of(**LAYOUTS["sp+gems"])
    events = chrome_events(plan, {0: measured(plan)})
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names[0] == "rank 0: stage 0 tile 0 down / stage 2 up"
    assert names[plan.world] == "planned rank 0: stage 0 tile 0 down / stage 2 up"
    threads = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {"compute", "communication"}


def test_planned_ranks_are_drawn_to_the_length_of_the_step_in_every_replica():
    plan = plan_of(stages=2, replicas=2)
    lines = planned_steps(plan, 8.0)
    assert [[span.action for span in line.spans] for line in lines] == [["F0", "B0"]] * 4
    assert [span[2:4] for span in lines[2].spans] == [(0.0, 2.0), (6.0, 8.0)]
    assert [span[2:4] for span in lines[3].spans] == [(2.0, 4.0), (4.0, 6.0)]


def test_file_is_json_that_replaces_an_older_one(tmp_path):
    plan = plan_of(**LAYOUTS["pp"])
    file = tmp_path / "trace.json"
    file.write_text("old")
    count = write_trace(file, plan, measured(plan))
    trace = json.loads(file.read_text())
    assert len(spans(trace["traceEvents"], 0, plan.world)) == count


def test_folder_is_refused(tmp_path):
    plan = plan_of()
    with pytest.raises(ConfigError, match=r"is a folder; name a file in it"):
        write_trace(tmp_path, plan, measured(plan))


def test_folder_that_is_not_there_is_named_and_not_that_of_results(tmp_path):
    plan = plan_of()
    missing = tmp_path / "missing"
    advice = f"there is no folder {missing}: choose another folder with --trace FILE, or make it"
    with pytest.raises(ConfigError, match=advice):
        write_trace(missing / "t.json", plan, measured(plan))


def test_columns_are_time():
    assert draw(STEP, 16.0, 16) == "dF0~~f..B0b~bgo."
    assert draw(STEP, 16.0, 32) == "ddF0ff~~~~ff....B0bbbb~~bbggoo.."


def test_short_pass_gets_one_column():
    assert draw([Span(FORWARD, "F0", 2.0, 2.001)], 4.0, 4) == "..F."


def test_measured_stands_below_planned_one_line_a_rank():
    plan = plan_of(stages=2, microbatches=2)
    steps = simulate(plan, unit_costs(plan)).ranks
    lines = timeline_lines(plan, [*steps], width=10 + 6 * 4)
    planned = ["  rank 0: F0ffF1ff........B0bbB1bb", "  rank 1: ....F0ffF1ffB0bbB1bb...."]
    assert lines[1:3] == planned
    assert lines[4] == "measured, step 0: 6.0000 s"
    assert [line.replace(" ", "")[:8] for line in lines[5:7]] == ["rank0:F0", "rank1:.."]


def test_rank_without_spans_is_an_idle_line():
    plan = plan_of()
    lines = timeline_lines(plan, [StepSpans(0, 3, "", 0.0)], width=20)
    assert lines[4] == "  rank 0: .........."
