"""The record of a run follows from what its ranks wrote, whatever attempts it took."""

from __future__ import annotations

import json

import numpy as np  # here, as its import would take longer than an example may
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hires.core.config.run_config import RunConfig
from hires.core.config.training_config import MeasureConfig
from hires.core.store import attempts, file_names, files, records, rundir
from hires.core.store.files import append_line
from hires.core.store.step_lines import ENDED_LINE


@pytest.fixture
def run(tmp_path):
    config = RunConfig(
        steps=5, batch=8, results=str(tmp_path), measure=MeasureConfig(warmup=1, steps=3)
    )
    plan = {
        "world": 2,
        "placement": [
            {"rank": 0, "replica": 0, "stage": 0, "tile": [0, 0]},
            {"rank": 1, "replica": 0, "stage": 1, "tile": None},
        ],
        "totals": {"messages": 4, "bytes": 100},
    }
    return rundir.create(config, plan, ["hires", "run"])


def tell(run, *lines):
    for line in lines:
        append_line(file_names.rank_lines(run.attempt_dir, "metrics.jsonl", line["rank"]), line)


def step(rank, number, step_s, loss=None):
    return {"kind": "step", "rank": rank, "step": number, "step_s": step_s, "loss": loss}


def whole_run(run):
    tell(run, *[step(0, i, 0.5) for i in range(5)])
    tell(run, *[step(1, i, [9.0, 1.0, 2.0, 4.0, 8.0][i], 3.0 - i) for i in range(5)])


def test_slowest_rank_is_the_sample_and_warm_up_does_not_count(run):
    whole_run(run)
    record = records.finish(run, 0, "done")
    assert record == records.read_record(run)
    assert record["state"] == "done"
    assert [sample["step_s"] for sample in record["samples"]] == [9.0, 1.0, 2.0, 4.0, 8.0]
    throughput = record["throughput"]
    assert throughput["samples"] == 3
    assert throughput["discarded"] == [
        {"step": 0, "why": "warm-up"},
        {"step": 4, "why": "after measure.steps"},
    ]
    step_s = {"median": 2.0, "p10": 1.2, "p90": pytest.approx(3.6)}
    assert throughput["step_s"] == step_s
    img_per_s = {"median": 4.0, "p10": pytest.approx(8 / 3.6), "p90": pytest.approx(8 / 1.2)}
    assert throughput["img_per_s"] == img_per_s
    assert record["loss"] == {"first": 3.0, "last": -1.0, "finite": True}


def began(step_number, attempt):
    name = f"step{step_number:06d}"
    return {"kind": "begin", "rank": 0, "step": step_number, "checkpoint": name, "attempt": attempt}


def tell_attempt(run, number, lines):
    if number:
        assert attempts.next_attempt(run.path) == number
    for line in lines:
        append_line(file_names.attempt_dir(run.path, number) / "metrics.jsonl", line)


def steps(first, end, step_s=1.0):
    return [step(rank, i, step_s, 9.0 - i) for rank in (0, 1) for i in range(first, end)]


def test_steps_of_the_attempts_that_a_run_goes_on_with_count_and_their_times_do_not(run):
    tell_attempt(run, 0, steps(0, 3, 0.1))  # step 2 was done, and lost
    records.finish(run, 0, "failed", "killed")
    tell_attempt(run, 1, [began(2, 0), *steps(2, 3, 0.2)])
    tell_attempt(run, 2, [began(2, 0), *steps(2, 5, 0.3)])
    record = records.finish(run, 2, "done")
    assert record["state"] == "done"
    assert record["resumed"] == {"step": 2, "checkpoint": "step000002", "attempt": 0}
    assert record["loss"]["first"] == 9.0
    assert record["loss"]["last"] == 5.0
    assert [sample["step"] for sample in record["samples"]] == [2, 3, 4]
    assert record["throughput"]["samples"] == 2
    assert record["throughput"]["discarded"] == [{"step": 2, "why": "warm-up"}]


def test_last_better_evaluation_of_all_attempts_is_the_best(run):
    def evaluated(number, top1, better):
        facts = {"metric": "top1", "top1": top1, "better": better}
        return {"kind": "validated", "rank": 0, "step": number, **facts}

    tell_attempt(run, 0, [*steps(0, 2), evaluated(0, 0.2, True), evaluated(1, 0.3, True)])
    tell_attempt(run, 1, [began(1, 0), *steps(1, 3), evaluated(1, 0.6, True)])
    tell_attempt(run, 2, [began(2, 1), *steps(2, 5), evaluated(4, 0.5, False)])
    found = records.finish(run, 2, "done")["validation"]
    assert (found["best"]["step"], found["last"]["step"], found["count"]) == (1, 4, 3)


def test_number_that_json_does_not_have_is_null_in_the_record_of_a_complete_run(run):
    whole_run(run)
    loss = {"metric": "top1", "top1": 0.5, "loss": float("nan"), "better": False}
    tell(run, {"kind": "validated", "rank": 0, "step": 4, **loss})
    record = records.finish(run, 0, "done")
    assert (record["state"], record["validation"]["last"]["loss"]) == ("done", None)
    assert record == records.read_record(run)


def test_training_that_ended_early_is_done(run):
    tell_attempt(run, 0, [*steps(0, 3), {"kind": ENDED_LINE, "rank": 0, "step": 3}])
    assert records.finish(run, 0, "done")["state"] == "done"


def test_memory_has_one_entry_per_rank_with_its_place(run):
    plan = records.read_plan(run) | {"world": 4}  # of two replicas
    plan["memory"] = [{"peak_bytes": 5}, {"peak_bytes": 6}]
    (run.path / file_names.PLAN).write_text(json.dumps(plan))
    sizes = {"params_bytes": 1, "grads_bytes": 2, "optimizer_bytes": 3}
    tell(run, {"kind": "ready", "rank": 0, **sizes})
    tell(run, {"kind": "memory", "rank": 0, "peak_bytes": 7, "source": "rss"})
    first, second, *others = records.finish(run, 0, "failed", "x")["memory"]
    assert [first["stage"], second["stage"], second["tile"]] == [[0], [1], [None]]
    assert (first["peak_bytes"], first["grads_bytes"], second["peak_bytes"]) == (7, 2, None)
    assert [one["predicted_bytes"] for one in (first, second, *others)] == [5, 6, 5, 6]


def test_skipped_steps_of_all_attempts_count_and_the_last_scale_is_shown(run):
    def scaled(first, scales):
        return [
            {**step(0, number, 1.0), "loss_scale": scale, "skipped": number % 2 == 1}
            for number, scale in enumerate(scales, start=first)
        ]

    tell_attempt(run, 0, [{**began(0, None), "skipped_steps": 4}, *scaled(0, [8.0, 4.0, 4.0, 2.0])])
    tell_attempt(run, 1, [began(2, 0), *scaled(2, [4.0, 1.0])])
    record = records.finish(run, 1, "failed")
    assert (record["skipped_steps"], record["loss_scale"]) == (4 + 2, 1.0)


def test_each_rank_appends_to_files_of_its_own_and_readers_merge_them(run):
    """Two clients of a network file system that append to one file overwrite each other's lines."""
    for rank in (1, 0):
        files.append_metric(run.attempt_dir, rank, "ready", params_bytes=rank)
        records.rank_event(run, 0, "rank_bound", rank)
    records.event(run, 0, "stopping")
    lines = [path.read_text().count("\n") for path in run.attempt_dir.rglob("*.jsonl")]
    assert lines == 5 * [1]
    own = attempts.Attempt(run, 0)
    assert [line["rank"] for line in own.metrics] == [0, 1]
    events = [(line["event"], line.get("rank")) for line in own.events]
    assert events == [("rank_bound", 1), ("rank_bound", 0), ("stopping", None)]


def test_done_without_all_steps_is_failed(run):
    whole_run(run)
    path = file_names.rank_lines(run.attempt_dir, "metrics.jsonl", 1)
    path.write_bytes(path.read_bytes()[:-10])  # the last line is torn
    record = records.finish(run, 0, "done")
    assert (record["state"], record["cause"]) == ("failed", "rank 1 recorded 4 of 5 steps")
    assert {"step": 4, "why": "rank 1 did not finish it"} in record["throughput"]["discarded"]


def test_record_of_a_run_is_that_of_its_complete_attempt(run):
    whole_run(run)
    records.finish(run, 0, "done")
    for number, later in enumerate(("failed", "cancelled"), start=1):
        attempts.next_attempt(run.path)
        assert records.finish(run, number, later)["state"] == later
        assert records.read_record(run)["attempt"] == 0
        assert records.read_record(run.path / f"a{number}")["state"] == later
    records.finish(run, 0, "failed", "rank 1 crashed at its end")
    assert records.read_record(run)["state"] == "failed"


def test_loss_is_the_mean_over_replicas_and_strict_json(run):
    tell(run, *[step(rank, i, 1.0, 1.0 + rank) for rank in (0, 1) for i in range(4)])
    assert records.finish(run, 0, "failed")["loss"]["first"] == 1.5
    for number, (bad, at) in enumerate(((float("nan"), 4), (float("inf"), 2)), start=1):
        lines = [step(r, i, 1.0, bad if i == at else 1.0) for r in (0, 1) for i in range(5)]
        tell_attempt(run, number, lines)
        record = records.finish(run, number, "done")
        last = None if at == 4 else 1.0
        assert record["loss"] == {"first": 1.0, "last": last, "finite": False}
        assert "NaN" not in (text := (run.path / "record.json").read_text())
        assert "Infinity" not in text


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=9))
def test_quantiles_are_numpys(values):
    spread = records.spread(values)
    wanted = np.quantile(values, [0.1, 0.5, 0.9])
    assert [spread["p10"], spread["median"], spread["p90"]] == pytest.approx(wanted, abs=1e-6)


def test_lineage_is_the_run_of_the_checkpoint_at_which_the_first_attempt_began(run, tmp_path):
    config = records.read_config(run)
    config.checkpoint.continues = str(tmp_path / "short")  # a run folder
    rundir.refreeze(run.path, config)
    place = tmp_path / "short" / "checkpoints" / "step000003"
    tell_attempt(run, 0, [{**began(3, None), "checkpoint": str(place)}, *steps(3, 4)])
    tell_attempt(run, 1, [began(4, 0), *steps(4, 5)])
    before = {"run": "shorter", "step": 1}
    place.mkdir(parents=True)
    (tmp_path / "short" / file_names.RECORD).write_text(json.dumps({"lineage": [before]}))
    assert records.finish(run, 1, "done")["lineage"] == [{"run": "short", "step": 3}, before]


def test_messages_of_all_ranks_are_summed(run):
    whole_run(run)
    assert records.finish(run, 0, "done")["comm"] is None
    row = {"operation": "send", "kind": "halo", "backend": "shm", "algorithm": "mailbox"}
    row |= {"size": 10, "count": 3, "bytes": 3072, "issue_s": 0.5, "wait_s": 0.25}
    planned = {"operation": "send", "kind": "halo", "backend": "shm", "algorithm": "mailbox"}
    planned |= {"size": 10, "count": 1, "bytes": 1024, "plain_bytes": 4096}
    codes = {"codec": "int8", "count": 3, "code_s": 0.5, "changed": 1.0, "numbers": 9.0}
    line = {"kind": "comm", "first": 1, "steps": 3, "step_s": 2.0, "rows": [row], "codes": [codes]}
    tell(run, *({**line, "rank": rank, "planned": [planned]} for rank in (1, 0)))
    comm = records.finish(run, 0, "done")["comm"]
    each = {"step_s": 2.0, "count": 3, "bytes": 3072, "issue_s": 0.5, "wait_s": 0.25, "rows": [row]}
    assert comm["ranks"] == [{"rank": 0, **each}, {"rank": 1, **each}]
    assert (comm["first"], comm["steps"], comm["step_s"]) == (1, 3, 4.0)
    summed = {"count": 6, "code_s": 1.0, "changed": 2.0, "numbers": 18.0}
    assert comm["codes"] == [codes | summed]
    assert comm["rows"] == [row | {"count": 6, "bytes": 6144, "issue_s": 1.0, "wait_s": 0.5}]
    assert comm["planned"] == [planned | {"count": 2, "bytes": 2048, "plain_bytes": 8192}]
