"""Does each plot appear where its data is, and say why where it is not?"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import pytest

from hires.report import frames
from hires.report.plots import base as figures
from hires.report.plots import loss_curves, style
from hires.report.plots.base import DrawnRun, PlotData
from tests.helpers.report_runs import report_run, sized_campaign

ALWAYS = {
    "throughput_by_layout", "throughput_by_image", "throughput_by_ranks", "largest_image",
    "choice", "confusion", "learning", "predicted_maps",
}  # fmt: skip
OF_RANKS = {
    "memory_per_rank", "step_split", "timeline", "traffic", "tile_grid", "loss", "message_costs",
}  # fmt: skip


def drawn(*paths):
    return {p.name: p for p in figures.draw(PlotData(frames.load(paths)))}


@pytest.fixture(scope="module")
def plots(tmp_path_factory):
    return drawn(*sized_campaign(tmp_path_factory.mktemp("results")))


def test_campaign_has_every_plot(plots):
    with_figure = {name for name, plot in plots.items() if plot.figure is not None}
    assert with_figure == OF_RANKS | {
        "throughput_by_layout", "throughput_by_image", "precision_error",
    }  # fmt: skip
    assert "memory refused no image" in plots["largest_image"].missing
    assert "no layout" in plots["throughput_by_ranks"].missing  # each is one point, and no line


def test_caption_states_numbers(plots):
    for plot in plots.values():
        assert plot.figure is None or re.search(r"\d", plot.caption), plot.name
    assert "bf16 1.0e-02 beside fp64" in plots["precision_error"].caption


def test_every_figure_says_where_it_was_measured(plots):
    for plot in plots.values():
        if plot.figure is not None:
            assert "CPU" in " ".join(text.get_text() for text in plot.figure.texts)


def test_ranks_that_share_cores_are_told(tmp_path):
    run = report_run(tmp_path, "sp grid")
    record = json.loads((run / "record.json").read_text())
    record["provenance"]["hardware"]["cores"] = 2
    (run / "record.json").write_text(json.dumps(record))
    assert "simulated ranks: up to 6 share the cores" in frames.load([run]).setting


def test_ranks_on_an_accelerator_are_not_marked_as_simulated(tmp_path):
    run = report_run(tmp_path, "sp grid")
    record = json.loads((run / "record.json").read_text())
    record["provenance"]["hardware"]["cores"] = 2
    for entry in record["memory"]:
        entry["source"] = "device"
    (run / "record.json").write_text(json.dumps(record))
    assert frames.load([run]).setting.startswith("accelerator, 2 cores, 1 machine; ranks are")


def placed(folder, source, *ranks):
    """Returns the setting of a run whose ranks stand as (host, cores, devices)."""
    run = report_run(folder, "sp grid")
    record = json.loads((run / "record.json").read_text())
    record["provenance"]["ranks"] = [
        {"rank": n, "host": host, "cores": cores, "devices": devices}
        for n, (host, cores, devices) in enumerate(ranks)
    ]
    record["provenance"]["hardware"]["cores"] = 2
    for entry in record["memory"]:
        entry["source"] = source
    (run / "record.json").write_text(json.dumps(record))
    return frames.load([run]).setting


def test_ranks_of_several_machines_are_counted_where_they_stand(tmp_path):
    # Six ranks and the two cores of rank 0's machine looked like six ranks on two cores.
    nodes = [(f"n{n // 2}", [n % 2], None) for n in range(6)]
    assert placed(tmp_path / "a", "rss", *nodes) == "CPU, 2 cores each, 3 machines"
    crowded = [("n0", [0, 1], None)] * 5 + [("n1", [0, 1, 2, 3], None)]
    told = placed(tmp_path / "b", "rss", *crowded)
    assert told == "CPU, 2 to 4 cores each, 2 machines; simulated ranks: up to 5 share the cores"
    assert placed(tmp_path / "c", "rss", ("n0", "x", 3), ("n0", [[]], [1])).startswith("CPU, 2 ")


def test_ranks_that_share_an_accelerator_are_told(tmp_path):
    own = [("n0", list(range(8)), str(n)) for n in range(6)]
    assert "share" not in placed(tmp_path / "a", "device", *own)
    told = placed(tmp_path / "b", "device", *[("n0", list(range(8)), "0,1")] * 6)
    assert told.endswith("up to 3 ranks share one accelerator")


def test_one_run_has_its_own_plots_and_a_line_for_the_others(tmp_path):
    found = drawn(report_run(tmp_path))
    without = {name for name, plot in found.items() if plot.figure is None}
    assert without == ALWAYS | {
        "precision_error", "traffic", "tile_grid", "message_costs",
    }  # fmt: skip
    assert all(found[name].missing for name in without)


def test_what_is_not_recorded_is_not_drawn(tmp_path):
    run = report_run(tmp_path, "pp")
    (run / "a0" / "timeline.jsonl").unlink()
    (run / "a0" / "metrics.jsonl").unlink()
    record = json.loads((run / "record.json").read_text())
    for entry in record["memory"]:
        entry["peak_bytes"] = entry["predicted_bytes"] = None
    (run / "record.json").write_text(json.dumps(record))
    found = drawn(run)
    for name in ("timeline", "step_split", "loss", "memory_per_rank"):
        assert found[name].figure is None, name
    assert found["traffic"].figure is not None  # which the plan knows


def test_no_run_at_all_is_only_lines():
    assert all(plot.figure is None and plot.missing for plot in drawn().values())


WHAT = {
    "model": "resnet50", "image": [64, 64], "layout": "sp", "precision": "fp32", "task": "train",
    "batch": 8, "limit": None,
}  # fmt: skip
"""A point as a sweep describes it."""


def fit_plot(run, *excluded):
    """Returns the plot of a campaign whose sweep excluded some points, and its panels' titles."""
    points = [
        {"overrides": ["a=b"], "reason": "rank 0 needs more [memory.limit]", "what": what}
        for what in excluded
    ]
    (run.parent / "campaign.json").write_text(json.dumps({"excluded": points}))
    found = frames.load([run], [run.parent])
    plot = {p.name: p for p in figures.draw(PlotData(found))}["largest_image"]
    return plot, [t for axis in plot.figure.axes if (t := axis.get_title(loc="left"))]


def test_excluded_point_is_an_image_that_is_too_large(tmp_path):
    run = report_run(tmp_path, image=[64, 64])
    plot, _ = fit_plot(run, WHAT | {"image": [128, 256]})
    assert "too large: sp 128x256." in plot.caption


def test_excluded_network_has_a_panel_of_its_own_name(tmp_path):
    # The word of the network alone stood for the one that ran.
    what = WHAT | {"model": "unet3_8_x", "image": [96, 64], "layout": "pp", "precision": "bf16"}
    run = report_run(tmp_path, image=[64, 64])
    plot, titles = fit_plot(run, what, ["x"], None, {"model": "y"}, what | {"image": "large"})
    # Memory refused none of the run's images; what a sweep did not describe has no size.
    assert titles == ["unet3_8_x, bf16, train, batch 8"]
    assert "too large: pp 96x64" in plot.caption


def test_limits_and_batches_have_panels_of_their_own(tmp_path):
    run = report_run(tmp_path, image=[64, 64])
    _, titles = fit_plot(run, WHAT | {"limit": "20MiB"}, WHAT | {"precision": "bf16"})
    assert len(titles) == 2
    assert any("limit 20MiB" in title for title in titles)


def test_runs_of_one_precision_are_drawn_beside_each_other(tmp_path):
    runs = [report_run(tmp_path, "single", step_s=1.0), report_run(tmp_path, "sp rows", step_s=1.0)]
    runs.append(report_run(tmp_path, "single", precision="bf16", step_s=0.1))
    shown = PlotData(frames.load(runs)).runs
    assert {s.run.record["precision"] for s in shown} == {"fp32"}


def test_axis_of_a_narrow_range_has_several_numbers_and_steps_are_whole(plots):
    axis = plots["precision_error"].figure.axes[0]
    plots["precision_error"].figure.canvas.draw()
    low, high = axis.get_ylim()
    assert sum(low <= tick <= high for tick in axis.get_yticks()) >= 2
    ticks = plots["loss"].figure.axes[0].get_xticks()
    assert all(tick == int(tick) for tick in ticks)


def test_titles_of_memory_are_cut_only_where_there_is_no_room(tmp_path):
    runs = [report_run(tmp_path, "single", image=[64, 64]), report_run(tmp_path, "pp")]
    titles = [a.get_title(loc="left") for a in drawn(*runs)["memory_per_rank"].figure.axes]
    assert "single 64x64" in titles


@pytest.mark.parametrize("form", figures.FORMATS)
def test_files_are_what_their_names_say(plots, form):
    begins = {"svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG"}
    assert figures.encoded(plots["loss"], form).startswith(begins[form])


def test_equal_runs_make_equal_files(tmp_path):
    run = report_run(tmp_path, "sp+gems")
    first, second = (drawn(run) for _ in range(2))
    for name in ("timeline", "traffic", "memory_per_rank"):
        assert figures.encoded(first[name], "svg") == figures.encoded(second[name], "svg")


def test_svg_of_the_page_is_sound_and_has_ids_of_its_own(plots):
    texts = [figures.inline(plot) for plot in plots.values() if plot.figure is not None]
    ids = [i for text in texts for i in re.findall(r'\bid="([^"]*)"', text)]
    assert len(ids) == len(set(ids))
    for text in texts:
        ET.fromstring(text)
        targets = re.findall(r"(?:href=\"|url\()#([^\")]*)", text)
        assert set(targets) <= set(ids)
        assert "http:" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
        assert style.INK not in text
        assert "currentColor" in text


def test_layouts_differ_in_more_than_colour():
    names = ("single", "dp", "lp", "pp", "sp", "gems", "sp+pp", "sp+gems", "sp+lp", "local_dp")
    marks = [style.layout_style(name) for name in names]
    assert len({m.marker for m in marks}) == len(names)
    assert len({m.hatch for m in marks}) == len(names)
    assert style.layout_style("sp+dp") != style.layout_style("sp")
    assert style.layout_style("unheard") == style.layout_style("unheard")


def test_long_curve_is_thinned_to_its_means():
    steps, values = loss_curves.thinned({step: float(step % 2) for step in range(10_000)})
    assert len(steps) <= loss_curves.MAX_POINTS
    assert set(values) == {0.5}


def test_loss_that_is_no_number_is_left_out(tmp_path):
    run = report_run(tmp_path)
    lines = [
        {"kind": "step", "step": n, "loss": v} for n, v in enumerate([2.0, float("nan"), None])
    ]
    (run / "a0" / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    [shown] = PlotData(frames.load([run])).runs
    assert isinstance(shown, DrawnRun)
    assert loss_curves.losses_of(shown) == {0: 2.0}


def test_learning_curve_shows_evaluations_rates_and_norms(tmp_path):
    run = report_run(tmp_path)
    lines = [
        {"kind": "step", "rank": 0, "step": n, "loss": 2.0 - 0.1 * n, "lr": 0.1 / (n + 1),
         "grad_norm": 3.0 + n}
        for n in range(6)
    ]  # fmt: skip
    for step, top1 in ((1, 0.5), (3, 0.8), (5, 0.7)):
        facts = {"metric": "top1", "top1": top1, "loss": 1.5, "better": top1 > 0.6}
        lines.append({"kind": "validated", "rank": 0, "step": step, **facts})
    (run / "a0" / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    record = json.loads((run / "record.json").read_text())
    record["validation"] = {"metric": "top1"}
    (run / "record.json").write_text(json.dumps(record))
    plot = drawn(run)["learning"]
    assert "top1 0.8 at best (step 4), 0.7 last" in plot.caption
    titles = [axis.get_title(loc="left") for axis in plot.figure.axes]
    assert titles[1:] == ["top1", "learning rate", "gradient norm"]
    curve = plot.figure.axes[1].lines[0]
    assert curve.get_xydata().tolist() == [[2, 0.5], [4, 0.8], [6, 0.7]]


def test_run_without_evaluations_says_how_to_have_some(plots):
    assert "validate.every" in plots["learning"].missing
