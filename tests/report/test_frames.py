"""Frames hold what run folders say, repeats of a point among them, and survive damaged files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest

import hires
from hires.core.errors import ConfigError
from hires.core.store import campaign, message_files
from hires.core.store.campaign import Campaign, ExcludedPoint, PlannedPoint
from hires.core.store.file_names import rank_messages
from hires.report import report, tables
from hires.report.compare.verdicts import METRICS
from hires.report.compare.verdicts import points as pairs
from hires.report.plots.base import PlotData
from tests.helpers.compared_runs import compared_run
from tests.helpers.report_runs import MIB, change, report_run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reports.md"


def test_campaign_has_these_frames(campaign):
    runs = campaign.runs
    assert (len(runs), set(runs["state"])) == (11, {"done", "failed"})
    assert campaign.all_notes() == []
    row = runs[(runs["layout"] == "sp") & (runs["image"] == "32x32")].iloc[0]
    assert (row["ranks"], row["peak_bytes_max"]) == (3, 22 * MIB)
    assert row["img_per_s_median"] == pytest.approx(8 / 1.635, rel=1e-4)
    assert row["reproduce"] == "hires run parallel=sp image=32"
    [row] = campaign.failures.to_dict("records")
    assert (row["state"], row["reason"], row["attempt"]) == ("failed", "nan", 0)
    assert runs[runs["state"] == "failed"]["img_per_s_median"].isna().all()
    assert "failed" not in set(campaign.throughput["run"])
    memory = campaign.memory
    gems = memory[(memory["layout"] == "sp+gems") & (memory["image"] == "64x64")]
    assert [*gems["rank"], *gems["stage"][:2]] == [0, 1, 2, 3, "0 / 2", "0 / 1"]
    assert gems["error_percent"].isna().all()  # nothing was predicted: no number, and not 0
    precision = campaign.precision.set_index("precision")
    assert precision.loc["bf16", "reference"] == "fp64"
    assert precision.loc["bf16", "first_loss_error"] == pytest.approx(1e-2)
    assert pd.isna(precision.loc["fp64", "first_loss_error"])
    steps = campaign.samples.groupby(["run", "attempt"])["counted"].agg(["size", "sum"])
    assert (set(steps["size"]), set(steps["sum"])) == ({6}, {4})
    assert {"parallel.stages", "optimizer.lr", "image"} <= set(campaign.configs.columns)
    one = campaign.messages.groupby("run").first().iloc[0]
    messages = campaign.messages[campaign.messages["run"] == one.name]
    assert (messages["calls_per_step"] == messages["planned_calls_per_step"]).all()
    seconds = 1e-3 * messages["calls_per_step"].sum() / one["ranks"]
    assert messages["wait_s"].sum() == pytest.approx(seconds)
    pp = campaign.messages[campaign.messages["layout"] == "pp"].iloc[0]
    step_s = 0.1 * int(pp["image"].partition("x")[0]) / 3
    assert pp["share_percent"] == pytest.approx(100 * pp["wait_s"] / step_s)


def test_best_evaluation_of_a_training_is_a_column(tmp_path):
    run = report_run(tmp_path)
    held = {"metric": "top1", "best": {"images": 9, "loss": 0.5, "top1": 0.75, "step": 4}}
    change(run, validation=held)
    assert hires.load(run).runs.best_validation[0] == 0.75
    change(run, validation={**held, "metric": "loss"})
    assert hires.load(run).runs.best_validation[0] == 0.5


def test_line_that_repeats_a_run_is_whole(tmp_path):
    run, line = (
        report_run(tmp_path),
        f"hires run {' '.join(f'model.args.a{n}={n}' for n in range(60))}",
    )
    change(run, reproduce=line)
    assert hires.load(run).runs.reproduce[0] == line


def test_run_without_a_record_or_an_end_is_reported(tmp_path):
    run = report_run(tmp_path)
    original = json.loads((run / "record.json").read_text())
    points = [PlannedPoint(run.name, ["image=13"]), PlannedPoint("x-00000000", [])]
    excluded = [ExcludedPoint(["image=99"], "too large [memory.limit]")]
    campaign.write(run.parent, Campaign("a", [], points, excluded))
    loaded = tables.load([run], [run.parent])
    assert report.counts(loaded) == [("run", "1"), ("done", "1"), ("excluded", "1")]
    planned = loaded.planned
    assert list(planned["state"]) == ["infeasible", "pending", "done"]
    assert planned["reproduce"].iloc[0] == "hires plan image=99"
    for changes, why in (
        ({"schema": 7}, "its schema is 7, and this hires reads"),
        ({"memory": [{"rank": "x"}]}, "is damaged: its memory.0.rank is x, which is no int"),
        ({"throughput": {"img_per_s": {"median": 1}}}, "damaged: its throughput.img_per_s lacks"),
    ):
        change(run, "record.json", **changes)
        found = tables.load([run])
        [note] = found.all_notes()
        assert why in note.text
        change(run, "record.json", **original)
    for name in ("record.json", "a0/record.json"):
        (run / name).unlink()
    [note] = tables.load([run]).all_notes()
    assert note.where.endswith("/record.json")
    assert "attempt a0 ended as done" in note.text
    (run / "a0" / "exit.json").unlink()
    loaded = tables.load([run])
    assert list(loaded.runs["state"]) == ["unknown"]
    loaded.run_list[0].status = ("lost", None, "its process is gone")
    assert list(loaded.failures["cause"]) == ["its process is gone"]


def test_lost_messages_of_a_complete_run_are_named(tmp_path):
    run = report_run(tmp_path, "pp", comm={"log": "full"})
    world = json.loads((run / "record.json").read_text())["world"]
    ranks = [rank_messages(run / "a0", rank) for rank in range(world)]
    for rank in range(world):
        message_files.write(run / "a0", rank, "c", 0, [])
    for path in ranks:
        whole = path.read_bytes()
        path.unlink()
        found = tables.load([run])
        assert found.calls.empty
        [note] = found.all_notes()
        assert note.where.endswith(path.name)
        path.write_bytes(whole)
    found = tables.load([run])
    assert (found.calls.empty, found.all_notes()) == (True, [])


@pytest.mark.dist
def test_program_starts_a_run_and_has_its_frames(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    [_, text] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names = {"hires": hires}
    exec(compile(text, "reports.md", "exec"), names)
    assert "done" in capsys.readouterr().out
    [run] = names["quick"].run_list
    assert (run.record.state, run.config["image"]) == ("done", [32, 32])
    again = hires.run("model=preact_resnet", "model.depth=11", "steps=4", image=32, batch=4,
                      campaign="quick", results=str(tmp_path / "results"))  # fmt: skip
    assert [one.path for one in again.run_list] == [run.path]  # it is not run again
    assert len(again.run_list[0].attempts) == 1
    with pytest.raises(ConfigError, match=r"unknown key 'paralel'; did you mean parallel\?"):
        hires.run("paralel=sp")


def test_paths_patterns_and_names_stand_for_their_runs(tmp_path, monkeypatch, capsys):
    def paths(*names, **options):
        return [run.path for run in hires.load(*names, **options).run_list]

    monkeypatch.chdir(tmp_path)
    sizes = [("fig2.4", 16), ("fig2.4", 32), ("fig2.5", 48)]
    runs = [report_run(Path("results"), campaign=name, image=[size] * 2) for name, size in sizes]
    first, second, other = (run.absolute() for run in runs)
    both = sorted([first, second])
    for name in ("fig2.4", tmp_path / "results/fig2.4", "*2.4"):
        assert paths(name) == both, name
    for name in ("results", None, f"{tmp_path}/res*/fig*"):
        assert paths(name) == [*both, other], name
    for name in (first, first.name.rpartition("-")[2], f"fig2.4/{first.name}"):
        assert paths(name) == [first], name
    assert paths([other, "fig2.4"]) == [other, *both]
    with pytest.raises(ConfigError, match="'nowhere' is no campaign and no run"):
        hires.load([first, "nowhere"])
    [text, _] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(text, "reports.md", "exec"), {})  # the example of the docs
    assert "img_per_s_median" in capsys.readouterr().out
    monkeypatch.chdir("/")
    assert paths("fig2.5", results=tmp_path / "results") == [other]
    # Campaigns of one name in two folders were merged.
    twin = report_run(tmp_path / "other/results", campaign="fig2.5")
    campaigns = [f"{tmp_path.name}/results/fig2.5", "other/results/fig2.5"]
    assert list(tables.load([other, twin]).runs["campaign"]) == campaigns


def more_attempts(run, *speeds):
    """Adds attempts to a run with the seconds of a counted step of each."""
    first = json.loads((run / "a0" / "record.json").read_text())
    for attempt, took in enumerate(speeds, start=1):
        record = json.loads(json.dumps(first)) | {"attempt": attempt}
        for sample in record["samples"]:
            sample["step_s"] = took
        record["throughput"]["img_per_s"] = dict.fromkeys(("median", "p10", "p90"), 8 / took)
        folder = run / f"a{attempt}"
        folder.mkdir()
        (folder / "exit.json").write_text('{"state": "done"}')
        for path in (folder, run):
            (path / "record.json").write_text(json.dumps(record))


def test_attempts_of_one_commit_and_machine_are_repeats_of_a_point(tmp_path):
    run = report_run(tmp_path, step_s=0.5)
    more_attempts(run, 1.0, 2.0)
    [point] = tables.load([run]).points.to_dict("records")
    assert point["attempts"] == 3
    assert point["img_per_s_median"] == pytest.approx(8.0)  # of the attempts
    assert point["img_per_s_p10"] == pytest.approx(4.0)  # of all steps
    assert point["img_per_s_p90"] > 14
    box = report.run_card(tables.load([run]).run_list[0], 0)
    assert box["summary"].startswith("8.00 img/s, median of 3 attempts")
    assert ("model.classes", "5") in box["settings"]
    assert "optimizer.lr" not in dict(box["settings"])  # it has its default
    # compare left others out, and the page said another number of the same runs.
    provenance = json.loads((run / "a0" / "record.json").read_text())["provenance"]
    for other in ({"host": "elsewhere"}, {"git": "0123456789abcdef", "hires": "0.0.9"}):
        change(run, "a0/record.json", provenance=provenance | other)
        loaded = tables.load([run])
        [point] = loaded.points.to_dict("records")
        assert (point["attempts"], point["left_out"]) == (2, 1)
        assert point["img_per_s_median"] == pytest.approx(6.0)
    [repeats] = [point.repeats(METRICS["throughput"]) for _, point in pairs(loaded.run_list)]
    assert len(repeats) == 2
    assert any("1 complete attempts of another commit" in one.text for one in loaded.all_notes())


def test_seeds_are_repeats_and_other_keys_layouts_and_campaigns_are_not(tmp_path):
    runs = [report_run(tmp_path, seed=seed, step_s=took) for seed, took in ((0, 1.0), (1, 3.0))]
    other = report_run(tmp_path, optimizer={"lr": 0.5}, step_s=0.1)
    assert sorted(tables.load([*runs, other]).points["attempts"]) == [1, 2]
    several = [report_run(tmp_path / "c", campaign=f"c{size}", image=size) for size in (32, 48)]
    assert [*tables.load(several).points["campaign"]] == ["c32", "c48"]


def test_efficiency_is_beside_the_fastest_single_run_of_the_same_work(tmp_path):
    def timed(layout, step_s, **keys):
        parallel = {"name": layout, "tiles": [2, 1] if layout == "sp" else [1, 1]}
        run = compared_run(tmp_path, [[step_s] * 3], parallel=parallel, **keys)
        change(run, world=2 if layout == "sp" else 1)
        return run

    runs = [timed("single", 2.0), timed("sp", 1.25)]
    points = tables.load(runs).points
    assert [*points["layout"]] == ["sp", "single"]  # the fastest first
    assert [*points["efficiency_percent"]] == pytest.approx([80, 100])
    assert [*points["speedup"]] == pytest.approx([1.6, 1])
    runs.append(timed("single", 8.0, launcher={"bind": "none"}))  # a point of its own
    other = {"campaign": "b", "image": 64, "task": {"name": "infer"}, "optimizer": {"lr": 0.5}}
    other |= {"batch": 8, "model": {"depth": 18}, "precision": {"name": "bf16"}}
    runs += [timed("single", 0.1, **{key: value}) for key, value in other.items()]
    points = tables.load(runs).points
    assert (len(points), set(points["attempts"])) == (len(runs), {1})
    assert points.set_index("layout").loc["sp", "efficiency_percent"] == pytest.approx(80)


@pytest.mark.parametrize("commits", ["aa", "ab"])
def test_precisions_are_beside_each_other_in_one_campaign_or_of_one_commit(tmp_path, commits):
    runs = [
        report_run(tmp_path, campaign="exact"),
        report_run(tmp_path, campaign="half", precision="bf16", checkpoint={"every": 4}),
    ]
    for run, commit in zip(runs, commits, strict=True):
        provenance = json.loads((run / "record.json").read_text())["provenance"]
        change(run, provenance={**provenance, "git": commit * 40})
    loaded, same = tables.load(runs), commits == "aa"
    frame = loaded.precision.set_index("precision")
    assert frame.loc["bf16", "reference"] == "fp32" if same else frame["reference"].isna().all()
    assert not same or frame.loc["bf16", "first_loss_error"] > 0
    assert len(PlotData(loaded).runs_of_precisions) == (2 if same else 1)


def test_runs_of_another_beginning_or_end_are_no_precisions_of_each_other(tmp_path):
    def low(**keys):
        return compared_run(tmp_path, [[0.5]], losses=[4.4], precision={"name": "bf16"}, **keys)

    others = [{"seed": 1}, {"weights": "net.pt"}, {"batch": 8}]
    others += [{"checkpoint": {key: "/other"}} for key in ("resume", "continues")]
    exact = compared_run(tmp_path, [[0.5]], losses=[4.0])
    elsewhere = compared_run(tmp_path, [[0.5]], losses=[8.0], campaign="another")
    runs = [
        elsewhere,
        exact,
        low(),
        *(low(campaign=f"c{n}", **keys) for n, keys in enumerate(others)),
    ]
    rows = tables.plain_rows(tables.load(runs).precision)
    assert [row["reference"] for row in rows[:3]] == [None, None, "fp32"]
    assert rows[2]["last_loss_error"] == pytest.approx(0.1)  # of its own campaign
    assert [row["reference"] for row in rows[3:]] == [None] * len(others)
    change(exact, "record.json", "a0/record.json", "a0/exit.json", state="failed")
    [row] = tables.plain_rows(tables.load([exact, low(image=64), runs[2]]).precision)[1:]
    assert row["reference"] is None
