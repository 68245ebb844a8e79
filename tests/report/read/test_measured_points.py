"""Are attempts repeats of one point exactly where nothing but the seed differs?"""

from __future__ import annotations

import json

import pandas as pd
import pytest

from hires.report import frames, page
from hires.report.compare.metrics import METRICS
from hires.report.compare.pairing import points as pairs
from hires.report.plots import base as figures
from hires.report.plots.base import PlotData
from hires.report.summaries import summaries
from tests.helpers.report_runs import MIB, report_run


def drawn(*paths):
    return {p.name: p for p in figures.draw(PlotData(frames.load(paths)))}


def rows_of(*paths):
    table = page.headline(frames.load(paths))
    return [dict(zip([c.key for c in table.columns], row, strict=True)) for row in table.rows]


def more_attempts(run, *speeds):
    """Adds attempts to a run with (median, seconds of a counted step) of each."""
    first = json.loads((run / "a0" / "record.json").read_text())
    for number, took in enumerate(speeds, start=1):
        record = json.loads(json.dumps(first)) | {"attempt": number}
        for sample in record["samples"]:
            sample["step_s"] = took
        record["throughput"]["img_per_s"] = dict.fromkeys(("median", "p10", "p90"), 8 / took)
        folder = run / f"a{number}"
        folder.mkdir()
        (folder / "record.json").write_text(json.dumps(record))
        (folder / "exit.json").write_text('{"state": "done"}')
        (run / "record.json").write_text(json.dumps(record))


def test_numbers_of_ranks_are_rows_and_bars_of_their_own(tmp_path):
    runs = [report_run(tmp_path, name) for name in ("single", "sp rows", "sp grid")]
    found = rows_of(*runs)
    assert {(row["layout"], row["ranks"]) for row in found} == {
        ("single", 1), ("sp", 3), ("sp", 6),
    }  # fmt: skip
    axis = drawn(*runs)["throughput_by_layout"].figure.axes[0]
    assert {t.get_text() for t in axis.get_yticklabels()} == {"single", "sp on 3", "sp on 6"}


def test_seeds_are_repeats_and_other_keys_are_not(tmp_path):
    runs = [report_run(tmp_path, seed=seed, step_s=took) for seed, took in ((0, 1.0), (1, 3.0))]
    other = report_run(tmp_path, optimizer={"lr": 0.5}, step_s=0.1)
    assert sorted(frames.load([*runs, other]).points["attempts"]) == [1, 2]
    [row] = rows_of(*runs, other)
    assert row["attempts"] == 1
    assert row["img_per_s_median"] > 40


def test_headline_has_no_column_without_a_number(tmp_path):
    alone, tiles = report_run(tmp_path, "single"), report_run(tmp_path, "sp rows")
    assert all("speedup" not in row and "arranged" not in row for row in rows_of(tiles))
    assert all("speedup" in row for row in rows_of(alone, tiles))


def test_headline_is_of_one_size_of_image(tmp_path):
    # It compared a layout at 96 pixels with others at 64.
    runs = [report_run(tmp_path, name) for name in ("single", "sp rows")]
    runs.append(report_run(tmp_path, "sp+gems", image=96))
    assert {row["layout"] for row in rows_of(*runs)} == {"single", "sp"}
    caption = page.headline(frames.load(runs)).caption
    assert caption.endswith("latest commit. 1 more layout was not run with this work.")


def test_headline_has_every_campaign_and_its_work(tmp_path):
    runs = [report_run(tmp_path, campaign=f"c{size}", image=size) for size in (32, 48)]
    found = rows_of(*runs)
    assert sorted((row["campaign"], row["layout"]) for row in found) == [
        ("c32", "single"), ("c48", "single"),
    ]  # fmt: skip
    caption = page.headline(frames.load(runs)).caption
    assert "c32: " in caption
    assert "c48: " in caption
    assert "more layout" not in caption
    runs += [report_run(tmp_path, "sp rows", campaign="c48", image=size) for size in (32, 48)]
    runs.append(report_run(tmp_path, "sp grid", campaign="c32", image=96))
    assert len(rows_of(*runs)) == 3
    caption = page.headline(frames.load(runs)).caption
    assert caption.endswith("1 more layout was not run with this work (c32).")


def test_efficiency_is_of_one_batch(tmp_path):
    small = report_run(tmp_path, "single", step_s=1.0)
    large = report_run(tmp_path, "sp rows", step_s=0.2)
    record = json.loads((large / "record.json").read_text()) | {"images_per_step": 64}
    for path in (large / "record.json", large / "a0" / "record.json"):
        path.write_text(json.dumps(record))
    plot = drawn(small, large)["throughput_by_ranks"]
    assert plot.figure is None
    assert "batch" in plot.missing


def test_efficiency_is_beside_the_single_run(tmp_path):
    runs = [report_run(tmp_path, "single", step_s=2.0), report_run(tmp_path, "sp rows", step_s=1.0)]
    found = frames.load(runs).points.set_index("layout")["efficiency_percent"]
    assert found["single"] == pytest.approx(100)
    assert found["sp"] == pytest.approx(100 * 2 / 3, rel=0.02)


def test_campaigns_are_kept_apart(tmp_path):
    runs = [
        report_run(tmp_path, layout, campaign=name, step_s=took)
        for name, took in (("first", 1.0), ("later", 2.0))
        for layout in ("single", "sp rows")
    ]
    found = rows_of(*runs)
    assert [(row["campaign"], row["attempts"]) for row in found].count(("first", 1)) == 2
    assert len(found) == 4
    axis = drawn(*runs)["throughput_by_layout"].figure.axes[0]
    names = {t.get_text() for t in axis.get_yticklabels()}
    assert names == {"first: single", "later: single", "first: sp on 3", "later: sp on 3"}


def test_attempts_counts_those_of_the_point_that_the_row_names(tmp_path):
    runs = [report_run(tmp_path, image=[size, size]) for size in (32, 64)]
    [row] = rows_of(*runs)
    assert row["attempts"] == 1


def test_point_is_the_median_of_its_attempts_and_the_spread_of_all_steps(tmp_path):
    run = report_run(tmp_path, step_s=0.5)
    more_attempts(run, 1.0, 2.0)
    [point] = frames.load([run]).points.to_dict("records")
    assert point["attempts"] == 3
    assert point["img_per_s_median"] == pytest.approx(8.0)
    assert point["img_per_s_p10"] == pytest.approx(4.0)
    assert point["img_per_s_p90"] > 14


def test_attempts_of_other_code_and_machines_count_in_no_median(tmp_path):
    # compare left them out, and the page said another number of the same runs.
    run = report_run(tmp_path, step_s=0.5)
    more_attempts(run, 1.0, 2.0)
    path = run / "a0" / "record.json"
    record = json.loads(path.read_text())
    record["provenance"] |= {"git": "0123456789abcdef", "hires": "0.0.9"}
    path.write_text(json.dumps(record))
    held = frames.load([run])
    [point] = held.points.to_dict("records")
    assert (point["attempts"], point["left_out"]) == (2, 1)
    assert point["img_per_s_median"] == pytest.approx(6.0)
    [repeats] = [point.repeats(METRICS["throughput"]) for _, point in pairs(held.run_list)]
    assert len(repeats) == 2
    assert page.run_card(held.run_list[0], 0)["summary"].startswith(
        "6.00 img/s, median of 2 attempts"
    )
    assert any("1 complete attempts of another commit" in note.text for note in held.all_notes())
    assert "0.0.9 (0123456789)" in dict(page.origins(held))["hires"]


def test_fullest_rank_is_the_median_of_the_attempts(tmp_path):
    run = report_run(tmp_path)
    more_attempts(run, 0.5, 0.5)
    path = run / "a1" / "record.json"
    record = json.loads(path.read_text())
    record["memory"][0]["peak_bytes"] = 900 * MIB
    path.write_text(json.dumps(record))
    [row] = rows_of(run)
    assert row["peak_bytes_max"] == 20 * MIB
    assert "fullest rank 20.0 MiB" in page.run_card(frames.load([run]).run_list[0], 0)["summary"]


def test_box_lists_attempts_and_says_their_median(tmp_path):
    run = report_run(tmp_path, step_s=0.5)
    more_attempts(run, 1.0, 2.0)
    box = page.run_card(frames.load([run]).run_list[0], 0)
    assert box["summary"].startswith("8.00 img/s, median of 3 attempts")
    assert box["attempts"][1:] == [
        ("attempt 1", "done, 8.00 img/s"),
        ("attempt 2", "done, 4.00 img/s"),
    ]


def test_efficiency_has_a_column_in_the_table(tmp_path):
    runs = [report_run(tmp_path, "single", step_s=2.0), report_run(tmp_path, "sp rows", step_s=1.0)]
    [table, *_] = summaries(frames.load(runs))
    found = table.frame.set_index("layout")["efficiency_percent"]
    assert found["sp"] == pytest.approx(100 * 2 / 3, rel=0.02)


def test_step_split_leaves_out_what_the_record_discards(tmp_path):
    run = report_run(tmp_path, "sp rows")
    lines = [json.loads(t) for t in (run / "a0" / "timeline.jsonl").read_text().splitlines()]
    later = [{**line, "step": 4} for line in lines]
    slow = [
        {**line, "step": 0, "spans": [[k, a, 9 * b, 9 * e, *w] for k, a, b, e, *w in line["spans"]]}
        for line in lines
    ]
    text = "".join(json.dumps(line) + "\n" for line in [*slow, *later])
    (run / "a0" / "timeline.jsonl").write_text(text)
    [shown] = PlotData(frames.load([run])).runs
    assert (list(shown.steps), list(shown.counted)) == ([0, 4], [4])
    (run / "a0" / "timeline.jsonl").write_text("".join(json.dumps(x) + "\n" for x in slow))
    assert "warm-up" in drawn(run)["step_split"].missing


def test_run_without_a_step_does_not_know_gradients_and_optimiser(tmp_path):
    run = report_run(tmp_path)
    record = json.loads((run / "record.json").read_text()) | {"samples": []}
    for entry in record["memory"]:
        entry |= {"grads_bytes": 0, "optimizer_bytes": 0}
    (run / "record.json").write_text(json.dumps(record))
    [row] = frames.load([run]).memory.to_dict("records")
    assert pd.isna(row["grads_bytes"])
    assert pd.isna(row["optimizer_bytes"])
    assert row["params_bytes"] == 4 * MIB


def test_precisions_of_two_campaigns_are_not_beside_each_other(tmp_path):
    runs = [report_run(tmp_path, campaign=name) for name in ("first", "later")]
    assert frames.load(runs).precision["reference"].isna().all()


def in_two_campaigns(results, commits):
    """Makes a run in fp32 and one in bf16 that saves checkpoints, by these commits."""
    made = [
        report_run(results, campaign="exact"),
        report_run(results, campaign="half", precision="bf16", checkpoint={"every": 4}),
    ]
    for run, commit in zip(made, commits, strict=True):
        for path in (run / "record.json", run / "a0" / "record.json"):
            record = json.loads(path.read_text())
            record["provenance"] = {**record.get("provenance", {}), "git": commit}
            path.write_text(json.dumps(record))
    return frames.load(made)


def test_precisions_of_two_campaigns_are_beside_each_other_if_the_code_is_the_same(tmp_path):
    loaded = in_two_campaigns(tmp_path / "same", ["a" * 40] * 2)
    frame = loaded.precision.set_index("precision")
    assert frame.loc["bf16", "reference"] == "fp32"
    assert frame.loc["bf16", "first_loss_error"] > 0
    # Both are drawn among the losses, though they have one layout.
    drawn = PlotData(loaded)
    assert len(drawn.runs) == 1
    assert {run.run.record["precision"] for run in drawn.runs_of_precisions} == {"fp32", "bf16"}
    others = in_two_campaigns(tmp_path / "others", ["a" * 40, "b" * 40])
    assert others.precision["reference"].isna().all()
    assert len(PlotData(others).runs_of_precisions) == 1


def test_network_of_a_run_without_a_record_has_its_whole_name(tmp_path):
    run = report_run(tmp_path)
    name = frames.load([run]).runs["model"].iloc[0]
    (run / "record.json").unlink()
    (run / "a0" / "record.json").unlink()
    assert frames.load([run]).runs["model"].iloc[0] == name
