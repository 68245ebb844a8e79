"""Do frames hold what run folders say, and survive what they should not say?"""

from __future__ import annotations

import json

import pandas as pd
import pytest

from hires.report import frames
from tests.helpers.report_runs import MIB, report_run, sized_campaign


@pytest.fixture
def campaign(tmp_path):
    return frames.load(sized_campaign(tmp_path))


def test_every_run_has_a_row_with_its_numbers(campaign):
    runs = campaign.runs.set_index("hash")
    assert len(runs) == 11
    assert set(runs["state"]) == {"done", "failed"}
    row = runs[(runs["layout"] == "sp") & (runs["image"] == "32x32")].iloc[0]
    assert row["ranks"] == 3
    assert row["peak_bytes_max"] == 22 * MIB
    assert row["img_per_s_median"] == pytest.approx(8 / 1.635, rel=1e-4)
    assert row["reproduce"] == "hires run parallel=sp image=32"


def test_frame_of_configs_names_the_runs_even_if_there_are_none():
    assert list(frames.Frames([]).configs) == ["campaign", "run"]


def test_columns_without_any_value_have_the_type_of_their_kind():
    runs = frames.Frames([]).runs.dtypes.astype(str)
    assert [runs[key] for key in ("img_per_s_median", "cause", "git")] == [
        "Float64",
        "string",
        "string",
    ]


def test_failed_run_has_no_speed_and_a_cause(campaign):
    [row] = campaign.failures.to_dict("records")
    assert (row["state"], row["reason"], row["attempt"]) == ("failed", "nan", 0)
    assert row["reproduce"].startswith("hires run ")
    failed = campaign.runs[campaign.runs["state"] == "failed"]
    assert failed["img_per_s_median"].isna().all()
    assert "failed" not in set(campaign.attempts["run"])


def test_memory_has_a_row_a_rank_and_its_error_beside_the_prediction(campaign):
    memory = campaign.memory
    gems = memory[(memory["layout"] == "sp+gems") & (memory["image"] == "64x64")]
    assert list(gems["rank"]) == [0, 1, 2, 3]
    assert list(gems["stage"])[:2] == ["0 / 2", "0 / 1"]
    assert gems["error_percent"].isna().all()  # nothing was predicted: no number, and not 0


def test_precision_is_beside_the_most_exact_twin(campaign):
    frame = campaign.precision.set_index("precision")
    assert frame.loc["bf16", "reference"] == "fp64"
    assert frame.loc["bf16", "first_loss_error"] == pytest.approx(1e-2)
    assert pd.isna(frame.loc["fp64", "first_loss_error"])


def test_samples_tell_which_steps_count(campaign):
    one = campaign.samples.groupby(["run", "attempt"])["counted"].agg(["size", "sum"])
    assert set(one["size"]) == {6}
    assert set(one["sum"]) == {4}


def test_configs_have_a_column_for_every_key(campaign):
    assert {"parallel.stages", "optimizer.lr", "image"} <= set(campaign.configs.columns)


def test_planned_points_know_how_their_runs_do(tmp_path):
    run = report_run(tmp_path)
    points = [{"run": run.name, "overrides": ["image=13"]}, {"run": "x-00000000", "overrides": []}]
    excluded = [{"overrides": ["image=99"], "reason": "too large [memory.limit]", "nearest": "a=1"}]
    values = {"points": points, "excluded": excluded}
    (run.parent / "campaign.json").write_text(json.dumps(values))
    found = frames.load([run], [run.parent])
    assert list(found.planned["state"]) == ["done", "pending", "infeasible"]
    assert found.planned["reproduce"].iloc[2] == "hires plan image=99"


def test_damaged_step_costs_no_more_than_itself(tmp_path):
    run = report_run(tmp_path)
    for path in (run / "record.json", run / "a0" / "record.json"):
        record = json.loads(path.read_text())
        record["throughput"]["discarded"][0]["step"] = [0]
        record["samples"][5]["step"] = {}
        path.write_text(json.dumps(record))
    found = frames.load([run])
    assert len(found.samples) == 5
    assert len(found.points) == 1


def test_campaigns_of_one_name_in_two_folders_are_two(tmp_path):
    # Both were called by the last part of their path, and their runs merged.
    folders = [tmp_path / "results", tmp_path / "other" / "results"]
    runs = [report_run(f, campaign="before", step_s=n + 1) for n, f in enumerate(folders)]
    alone = report_run(folders[0], campaign="alone")
    excluded = {"excluded": [{"overrides": ["image=99"], "reason": "too large"}]}
    for folder in (runs[1].parent, tmp_path / "third" / "before"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "campaign.json").write_text(json.dumps(excluded))
    third = tmp_path / "third" / "before"
    found = frames.load([*runs, alone], [runs[1].parent, third])
    names = [f"{tmp_path.name}/results/before", "other/results/before", "alone"]
    assert list(found.runs["campaign"]) == names
    assert len(found.points) == 3
    assert [run.path for run in found.run_list] == [*runs, alone]
    assert list(found.planned["campaign"]) == [names[1], f"{tmp_path.name}/third/before"]


def test_run_that_is_done_and_has_no_record_is_told(tmp_path):
    run = report_run(tmp_path)
    for path in (run / "record.json", run / "a0" / "record.json"):
        path.unlink(missing_ok=True)
    [note] = frames.load([run]).all_notes()
    assert note.where.endswith("/record.json")
    assert "attempt a0 ended as done" in note.text


def test_no_runs_are_frames_without_rows():
    found = frames.load([])
    for name in ("runs", "attempts", "samples", "memory", "communication", "failures", "planned"):
        assert len(getattr(found, name)) == 0
    assert "img_per_s_median" in found.attempts.columns


def test_run_that_left_no_word_is_as_somebody_found_out(tmp_path):
    run = report_run(tmp_path)
    (run / "record.json").unlink()
    (run / "a0" / "record.json").unlink()
    (run / "a0" / "exit.json").unlink()
    assert list(frames.load([run]).runs["state"]) == ["unknown"]
    found = frames.load([run])
    found.run_list[0].status = ("lost", None, "its process is gone")
    assert list(found.failures["cause"]) == ["its process is gone"]


@pytest.mark.parametrize("name", ["record.json", "plan.json", "config.yaml", "a0/exit.json"])
@pytest.mark.parametrize("data", ["", "[]", "{", "\udcff\udcfe", '{"schema": 99}', "NaN"])
def test_damaged_file_never_stops_the_others(tmp_path, name, data):
    good, bad = report_run(tmp_path, "sp rows"), report_run(tmp_path, "pp")
    (bad / name).write_bytes(data.encode("utf-8", "surrogateescape"))
    if name == "record.json":
        (bad / "a0" / "record.json").write_bytes((bad / name).read_bytes())
    found = frames.load([bad, good])
    for frame in ("runs", "attempts", "memory", "communication", "failures", "precision"):
        getattr(found, frame)
    assert good.name in set(found.attempts["run"])
    # Other keys are nothing wrong where a file has keys.
    assert found.all_notes() or (name != "record.json" and data.startswith('{"'))


def test_newer_schema_is_shown_as_far_as_it_is_known(tmp_path):
    run = report_run(tmp_path)
    record = json.loads((run / "record.json").read_text())
    (run / "record.json").write_text(json.dumps({**record, "schema": 7, "news": {"x": 1}}))
    found = frames.load([run])
    assert len(found.attempts) == 1
    assert "its schema is 7" in found.all_notes()[0].text


def test_columns_hold_no_value_of_another_type(tmp_path):
    run = report_run(tmp_path, "pp")
    record = json.loads((run / "record.json").read_text())
    record |= {"world": "many", "image": ["a", {}], "layout": 7, "loss": [1], "model": {"x": 1}}
    record["memory"] = [7, {"rank": "x", "peak_bytes": float("inf"), "stage": {"a": []}}]
    record["throughput"] = {"img_per_s": {"median": "fast"}, "discarded": 3}
    (run / "record.json").write_text(json.dumps(record))
    found = frames.load([run])
    row = found.runs.iloc[0]
    assert pd.isna(row["ranks"])
    assert pd.isna(row["img_per_s_median"])
    assert row["layout"] == "pp"
    assert row["image"] == "13x10"
    assert len(found.memory) == 1


def test_messages_are_those_of_the_plan_with_the_time_that_was_logged(tmp_path):
    run = report_run(tmp_path, "sp+gems")
    held = frames.load([run]).messages
    assert (held["calls_per_step"] == held["planned_calls_per_step"]).all()
    assert set(held["backends"]) == {"gloo", "shm", "cma"}
    assert {"halo", "norm", "gradient", "barrier"} <= set(held["kind"])
    ranks = held["ranks"].iloc[0]
    seconds = 1e-3 * held["calls_per_step"].sum() / ranks
    assert held["wait_s"].sum() == pytest.approx(seconds)
    assert frames.load([report_run(tmp_path)]).messages.empty
