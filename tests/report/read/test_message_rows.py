"""Are messages added up as the ranks recorded them, whatever a record holds in their place?"""

from __future__ import annotations

import copy

import pytest

from hires.core.store import message_sums as message_sums_of_store
from hires.core.store.message_sums import summed
from hires.report.message_tables import headline, message_tables
from hires.report.read.message_rows import STUDY_CLASSES, message_sums, size_words
from tests.helpers.report_runs import message_line
from tests.helpers.small_plans import LAYOUTS, plan_of

KIB = 2**10


def row(size, count=4, num_bytes=None, wait_s=0.02, **keys):
    num_bytes = count * 2**size if num_bytes is None else num_bytes
    sums = {"count": count, "bytes": num_bytes, "issue_s": 0.0, "wait_s": wait_s}
    words = {"operation": "send", "kind": "halo", "backend": "shm", "algorithm": "mailbox"}
    return {**words, "size": size, **sums, **keys}


def line(rank, *rows, steps=2, step_s=0.5):
    keys = ("operation", "kind", "size")
    planned = [{key: one[key] for key in keys} for one in rows]
    for own, one in zip(planned, rows, strict=True):
        own |= {name: one[name] // steps for name in ("count", "bytes")}
    place = {"rank": rank, "first": 2, "steps": steps, "step_s": step_s}
    return {"kind": "comm", **place, "rows": list(rows), "planned": planned}


def sums_of(*lines):
    sums = message_sums({"comm": summed(lines)})
    assert sums is not None
    return sums


def test_calls_are_of_all_ranks_in_a_step_and_seconds_of_the_mean_rank():
    sums = sums_of(line(0, row(10), row(12)), line(1, row(10, wait_s=0.06)))
    assert sums.step_s == 0.25
    [by_kind] = sums.by("operation", "kind")
    assert (by_kind["count"], by_kind["planned_count"]) == (6, 6)
    assert by_kind["bytes"] == by_kind["planned_bytes"] == 2 * 2 * KIB + 2 * 4 * KIB
    assert by_kind["wait_s"] == pytest.approx((0.02 + 0.02 + 0.06) / 2 / 2)
    assert by_kind["share"] == pytest.approx(0.025 / 0.25)
    assert [one["share"] for one in sums.by_rank] == pytest.approx([0.02 / 0.25, 0.03 / 0.25])
    assert sums.differences() == []


def test_classes_of_the_study_begin_at_their_lower_bound():
    sizes = (9, 10, 16, 17, 23, 24, 25, 26, 30)
    rows = sums_of(line(0, *map(row, sizes))).by_study_class()
    counts = {one["class"]: one["count"] for one in rows}
    assert counts == dict(zip(STUDY_CLASSES, (2, 4, 4, 2, 2, 4), strict=True))
    assert [one["planned_count"] for one in rows] == [2, 4, 4, 2, 2, 4]


def test_what_differs_from_the_plan_is_named():
    one = line(0, row(10), row(12))
    del one["planned"][1]
    one["planned"].append(
        {"operation": "recv", "kind": "stage", "size": 4, "count": 1, "bytes": 16}
    )
    lines = headline(sums_of(one))
    assert lines[1:] == [
        "not as planned: recv stage of 16 B: 0 calls a step, planned 1",
        "not as planned: recv stage of 16 B: 0 bytes a step, planned 16",
        "not as planned: send halo of 4 KiB: 2 calls a step, planned 0",
        "not as planned: send halo of 4 KiB: 8192 bytes a step, planned 0",
    ]


def test_message_that_took_another_route_is_named():
    one = line(0, row(10), row(12, backend="gloo", algorithm="message staged"))
    for planned in one["planned"]:
        planned |= {"backend": "shm", "algorithm": "mailbox"}
    words = "send halo of 4 KiB: through gloo message, planned shm mailbox"
    assert sums_of(one).differences() == [words]
    one["planned"][1] |= {"backend": "gloo", "algorithm": "message"}
    assert sums_of(one).differences() == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_log_of_a_plan_is_as_planned_in_every_table(name):
    plan = plan_of(**LAYOUTS[name])
    if plan.world == 1:
        return
    sums = sums_of(*(message_line(plan, rank, 4, 0.5) for rank in range(plan.world)))
    assert sums.differences() == []
    calls = {table.title: 0.0 for table in message_tables(sums)}
    for table in message_tables(sums):
        place = [column.key for column in table.columns].index("count")
        calls[table.title] = sum(cells[place] for cells in table.rows)
    assert len(set(calls.values())) == 1, calls


def test_sizes_have_words():
    assert list(map(size_words, (-1, 0, 9, 10, 26, 62))) == [
        "empty", "1 B", "512 B", "1 KiB", "64 MiB", "4096 PiB",
    ]  # fmt: skip


@pytest.mark.parametrize("value", [None, [], {}, "x", -2, 1.5, 2**70, float("nan"), True])
def test_what_is_no_number_is_left_out(value):
    good = {"comm": summed([line(0, row(10), row(12))])}
    for key in ("first", "steps", "step_s", "rows", "planned", "ranks"):
        record = copy.deepcopy(good)
        record["comm"][key] = value
        tables = message_sums(record)
        assert tables is None or message_tables(tables)
    for key in good["comm"]["rows"][0]:
        record = copy.deepcopy(good)
        record["comm"]["rows"][0][key] = value
        sums = message_sums(record)
        assert sums is not None
        assert message_tables(sums)
    assert message_sums({"comm": value}) is None


def test_many_ranks_are_recorded_by_their_sums_alone(monkeypatch):
    monkeypatch.setattr(message_sums_of_store, "MAX_RANKS", 1)
    held = summed([line(0, row(10)), line(1, row(10, wait_s=0.06))])
    assert not any("rows" in one for one in held["ranks"])
    sums = message_sums({"comm": held})
    assert sums is not None
    assert [one["wait_s"] for one in sums.by_rank] == pytest.approx([0.01, 0.03])
