"""Do the tables of a campaign hold every complete attempt, and tell them apart?"""

from __future__ import annotations

import json

import pytest

from hires.core.store.campaign import Campaign, PlannedPoint
from hires.report import tables as run_tables

SPREAD = {"median": 12.0, "p10": 11.0, "p90": 13.0}


def record(attempt, image=64):
    place = {"replica": 0, "stage": [0], "tile": [None], "peak_bytes": 3 << 20, "source": "rss"}
    sizes = dict.fromkeys(["params_bytes", "grads_bytes", "optimizer_bytes", "predicted_bytes"])
    return {
        "state": "done",
        "attempt": attempt,
        "model": "resnet18",
        "image": [image, image],
        "layout": "sp",
        "precision": "fp32",
        "world": 2,
        "images_per_step": 4,
        "throughput": {"img_per_s": SPREAD, "step_s": SPREAD, "samples": 2},
        "memory": [{"rank": rank, **place, **sizes} for rank in range(2)],
    }


@pytest.fixture
def make(tmp_path):
    def point(name, *words, attempts=1, repeat=1):
        for attempt in range(attempts):
            folder = tmp_path / name / f"a{attempt}"
            folder.mkdir(parents=True)
            (folder / "exit.json").write_text('{"state": "done"}')
            (folder / "record.json").write_text(json.dumps(record(attempt)))
        return PlannedPoint(name, list(words), repeat)

    return point


def tables(folder, *points):
    return run_tables.campaign_tables(folder, Campaign("c", points=list(points)))


def test_rows_of_all_points_below_each_other(make, tmp_path):
    one = make("x-0000000a", "image=64", "batch=4")
    other = make("x-0000000b", "image=96", "batch=4")
    throughput, memory = tables(tmp_path, one, other)
    assert [row[0] for row in throughput.rows] == ["0000000a", "0000000b"]
    assert [row[:2] for row in memory.rows] == [
        ["0000000a", 0], ["0000000a", 1], ["0000000b", 0], ["0000000b", 1],
    ]  # fmt: skip
    assert throughput.to_csv().splitlines()[0].startswith("run,model,image,layout")


def test_old_record_without_its_attempt_has_a_row(make, tmp_path):
    point = make("x-0000000a", "image=64")
    old = {key: value for key, value in record(0).items() if key != "attempt"}
    (tmp_path / "x-0000000a" / "a0" / "record.json").write_text(json.dumps(old))
    [throughput, _] = tables(tmp_path, point)
    assert len(throughput.rows) == 1


def test_repeated_point_has_a_row_for_each_of_its_last_attempts(make, tmp_path):
    [throughput, _] = tables(tmp_path, make("x-0000000a", "image=64", attempts=4, repeat=3))
    assert [row[:2] for row in throughput.rows] == [["0000000a", n] for n in (1, 2, 3)]
    assert [column.key for column in throughput.columns][:3] == ["run", "attempt", "model"]


def test_what_no_column_shows_is_told(make, tmp_path):
    points = (
        make("x-0000000a", "batch=4", "image=64", "parallel.stages=2"),
        make("x-0000000b", "batch=4", "image=64", "parallel.stages=3"),
    )
    [throughput, _] = tables(tmp_path, *points)
    assert [row[1] for row in throughput.rows] == ["parallel.stages=2", "parallel.stages=3"]


def test_points_that_are_not_complete_have_no_row(make, tmp_path):
    one, failed = make("x-0000000a"), make("x-0000000b")
    (tmp_path / "x-0000000b/a0/exit.json").write_text('{"state": "failed"}')
    [throughput, _] = tables(tmp_path, one, failed, PlannedPoint("x-0000000c", []))
    assert len(throughput.rows) == 1
    assert tables(tmp_path, failed) == []
    assert tables(tmp_path) == []


def test_run_of_an_earlier_time_has_one_record(tmp_path):
    (tmp_path / "x-0000000a").mkdir()
    (tmp_path / "x-0000000a" / "record.json").write_text(json.dumps(record(0)))
    [throughput, _] = tables(tmp_path, PlannedPoint("x-0000000a", []))
    assert len(throughput.rows) == 1


def test_files_are_written_beside_the_runs(make, tmp_path):
    made = tables(tmp_path, make("x-0000000a"))
    names = {path.name for path in run_tables.write_tables(tmp_path, made)}
    assert names == {"throughput.csv", "throughput.md", "memory.csv", "memory.md"}
