"""What a rank logs is what its plan says, in every family of layouts, and is added up right."""

from __future__ import annotations

import math
from collections import Counter
from time import perf_counter as clock
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hires import comm
from hires.comm import message_log
from hires.comm.coding import decode, encode, usual_codec
from hires.comm.message_log import ALL_GATHER, BARRIER_CALL, SEND, SUMMARY_ENTRIES, MessageLog, way
from hires.core.store import message_files
from hires.engine.build import assemble, contexts_of, named_tensors, names_of, place_tensors
from hires.engine.footprint import _blank, _blank_feed
from hires.engine.live_bytes import LiveBytes
from hires.engine.loader import image_dtype
from hires.nets.build_network import build_model
from hires.plan import traffic
from hires.plan.event import Event, Part
from hires.plan.plan import Plan
from hires.plan.program import events
from hires.plan.rank_kinds import rehearsed_ranks
from hires.plan.traffic import backends_of_plan
from tests.helpers.layouts import config_of
from tests.helpers.traces import plan_of


def logged_step(config: Any, plan: Plan, rank: int) -> MessageLog:
    """Returns the log of one step that a rank runs alone, without numbers."""
    backends = backends_of_plan(plan)
    with (
        comm.rehearsal(rank, backends=backends),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        contexts = contexts_of(plan, rank)
        model = build_model(config.model, config.seed, (config.height, config.width))
        real = named_tensors(model)
        tensors = {name: _blank(real[name], None) for name in names_of(contexts, real)}
        place_tensors(tensors, image_dtype(config), plan.graph)
        engine = assemble(config, contexts, tensors, [])
        executor = engine.executor
        executor.methods["agree"] = lambda event: None  # there are no numbers to look at
        log = MessageLog(executor.cursor, executor.cursor.events)
        with comm.logged(log):
            executor.step([_blank_feed(config, one, LiveBytes()) for one in contexts])
            log.end_step(0, 1.0, counts=True)
    return log


def by_kind(rows: list[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    counts: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
        key = row["operation"], row["kind"], row["size"]
        counts[(*key, "count")] += row["count"]
        counts[(*key, "bytes")] += row["bytes"]
    return counts


BY_MPI, THROUGH_MEMORY = way("mpi", "message"), way("shm", "collective")

FAMILIES: dict[str, dict[str, Any]] = {
    "sp grid": {"tiles": [2, 2], "microbatches": 2},
    "sp+gems": {"tiles": [2, 1], "stages": 2, "directions": 2, "schedule": "gems"},
}


@pytest.mark.parametrize("codec", ["none", "int8", "topk"])
@pytest.mark.parametrize("name", FAMILIES)
def test_rank_logs_the_calls_and_bytes_of_its_plan(name: str, codec: str):
    divided = {"shard": name == "sp+gems", "exchange": "scatter"}
    keys: dict[str, Any] = {"comm": {"codec": codec}, "optimizer": divided}
    config = config_of(batch=8, parallel={"name": name, **FAMILIES[name]}, **keys)
    plan = plan_of(config)
    for rank in sorted(set(rehearsed_ranks(plan))):
        log = logged_step(config, plan, rank)
        summary, program = log.summary(), [*events(plan, rank)]
        # The barrier and the agreement are not rehearsed.
        planned = [r for r in summary["planned"] if r["kind"] not in ("barrier", "agree")]
        assert by_kind(summary["rows"]) == by_kind(planned)
        coded = [r for r in planned if r["plain_bytes"] != r["bytes"]]
        assert {r["kind"] for r in coded} <= {"gradient", "parameter", "halo", "stage", "join"}
        assert bool(coded) == (codec != "none")
        assert all(r["plain_bytes"] > 3 * r["bytes"] for r in coded)
        # Message by message, in the order of the program's events.
        for entry in log.entries():
            one = program[entry["event"]]
            said = (traffic.CALLED[entry["operation"]], entry["bytes"])
            assert said == (one.operation, one.num_bytes)
            assert message_log._ways[entry["way"]] == one.route.names


class At:
    """A place in a program."""

    at = 1


def filled(sizes: list[int]) -> MessageLog:
    log = MessageLog(At(), [Event("send", 1, 0, (1,), "int64", traffic="halo")])
    for size in sizes:
        log.note(log.issue(SEND, BY_MPI, size, 1.0), 2.0)
    return log


def test_codecs_are_timed_in_steps_that_count_and_their_first_error_is_kept():
    log, codec, x = filled([]), usual_codec("int8"), torch.randn(3000)
    for step, calls in enumerate((5, 2, 2)):
        with comm.logged(log):
            for _ in range(calls):
                decode(codec, encode(codec, x * 2**step), y := torch.empty_like(x))
        log.end_step(step, 1.0, counts=step > 0)
    [codes] = log.summary()["codes"]
    assert (codes["codec"], codes["count"]) == ("int8", 8)  # each message is coded and decoded
    assert codes["code_s"] > 0
    error = float((y / 4 - x).norm() / x.norm())
    assert math.sqrt(codes["changed"] / codes["numbers"]) == pytest.approx(error, rel=1e-4)


def test_only_whole_steps_that_count_are_added_up():
    log = filled([8] * 5)
    log.end_step(0, 1.0, counts=False)
    for step, counts in ((1, True), (2, True), (3, False)):
        log.note(log.issue(SEND, BY_MPI, 8, 1.0), 2.0)
        log.end_step(step, 1.0, counts)
    log.note(log.issue(SEND, BY_MPI, 8, 1.0), 2.0)  # of a step that fails
    summary = log.summary()
    assert (summary["first"], summary["steps"], summary["step_s"]) == (1, 2, 2.0)
    assert [row["count"] for row in summary["rows"]] == [2]


def test_entries_beyond_those_kept_are_added_up_all_the_same():
    log = filled([3] * (SUMMARY_ENTRIES + 1))
    log.end_step(0, 1.0, counts=True)
    [row] = log.summary()["rows"]
    assert row["count"] == SUMMARY_ENTRIES + 1 == row["bytes"] // 3
    assert len(log.entries()) == SUMMARY_ENTRIES
    assert log.calls_between(0.0, clock()) is None  # some that ended then are not kept


def test_messages_between_steps_count_in_none():
    log = filled([8])
    log._place.at = 0  # as at a checkpoint
    log.note(log.issue(SEND, BY_MPI, 8, 1.0), 2.0)
    log.end_step(0, 1.0, counts=True)
    assert [row["count"] for row in log.summary()["rows"]] == [1]
    assert log.entries()["event"].tolist() == [0, -1]


def test_full_log_names_kind_action_and_ranks_of_its_entries(tmp_path):
    facts = ("barrier", -1, "", ""), ("send", 3, "F1", "stage"), ("agree", -1, "", "agree")
    events = [
        Event(kind, peer, 0, (1,), "int64", part=Part(action), traffic=traffic or kind)
        for kind, peer, action, traffic in (*facts, ("collective", 1, "B0", "gradient"))
    ]
    place = At()
    log = MessageLog(place, events, True)
    for number in (4, 0, 1, 2, 3):
        place.at = number
        log.note_blocking(ALL_GATHER, BY_MPI, number, clock())
    (tmp_path / "logs").mkdir()
    log.write(tmp_path, 2, [[0, 1], [1, 2]])
    [ranks] = message_files.read(tmp_path)
    assert [(m.kind, m.action, m.ranks, m.num_bytes) for m in ranks.messages] == [
        ("gradient", "B0", [1, 2], 4), ("", "", [], 0), ("barrier", "", [], 1),
        ("stage", "F1", [3], 2), ("agree", "", [], 3)
    ]  # fmt: skip
    assert {(m.rank, m.operation, m.backend) for m in ranks.messages} == {(2, "all_gather", "mpi")}


def test_wait_in_the_barrier_before_a_step_is_part_of_its_time():
    log = MessageLog(At(), [Event("barrier", -1, 0, (1,), "int64", traffic="barrier")])
    log.note((BARRIER_CALL, way("gloo", "own"), 0, 0, 0.0, 0.0), clock() - 0.5)
    log.end_step(0, 1.0, counts=True)
    summary = log.summary()
    [row] = summary["rows"]
    assert row["wait_s"] >= 0.5
    assert summary["step_s"] == pytest.approx(1.0 + row["wait_s"])
