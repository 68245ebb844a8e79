"""Each plot appears where its data is, with its series, and says why where it is not."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from hires.core.ranks.timeline import BACKWARD, FORWARD, HALO, OPTIMISER, WAIT, Span, StepSpans
from hires.core.store import file_names
from hires.core.store.choice_file import write_choice
from hires.engine.map_formats import MapKind
from hires.engine.prediction_maps import PredictionMaps
from hires.plan.simulation.simulate import simulate
from hires.report import frames
from hires.report.plots import base as figures
from hires.report.plots import loss_curves, style
from hires.report.plots.base import PlotData
from hires.report.plots.choice_front import PlacedLayout, pareto_front
from hires.report.plots.steps import BUBBLE, OTHER, PARTS, PIPELINE, split_rank, split_steps
from hires.report.read import map_overviews
from hires.report.read.map_overviews import NOT_FINITE, overviews
from hires.report.read.measured_points import set_apart
from hires.report.read.runs import read_runs
from tests.helpers.report_runs import report_run
from tests.helpers.simulated import STEP, EqualCosts
from tests.helpers.small_plans import LAYOUTS, plan_of

OF_CAMPAIGN = {
    "memory_per_rank", "step_split", "timeline", "traffic", "tile_grid", "loss", "message_costs",
    "throughput_by_layout", "throughput_by_image", "precision_error",
}  # fmt: skip
OF_ONE_RUN = {"memory_per_rank", "step_split", "timeline", "loss"}


def drawn(*paths):
    return {p.name: p for p in figures.draw(PlotData(frames.load(paths)))}


def change(run, /, **values):
    record = json.loads((run / "record.json").read_text())
    (run / "record.json").write_text(json.dumps({**record, **values}))


@pytest.fixture(scope="module")
def plots(campaign):
    return {plot.name: plot for plot in figures.draw(PlotData(campaign))}


def test_campaign_has_its_plots_with_numbers_and_where_they_were_measured(plots):
    shown = {name: plot for name, plot in plots.items() if plot.figure is not None}
    assert set(shown) == OF_CAMPAIGN
    for name, plot in shown.items():
        assert re.search(r"\d", plot.caption), name
        assert "CPU" in " ".join(text.get_text() for text in plot.figure.texts)
        assert any(axis.lines or axis.patches or axis.collections or axis.images
                   for axis in plot.figure.axes), name  # fmt: skip
    assert "bf16 1.0e-02 beside fp64" in plots["precision_error"].caption
    assert "memory refused no image" in plots["largest_image"].missing
    assert "no layout" in plots["throughput_by_ranks"].missing  # each is one point, and no line
    assert "validate.every" in plots["learning"].missing
    ticks = plots["loss"].figure.axes[0].get_xticks()
    assert all(tick == int(tick) for tick in ticks)


def test_run_has_its_own_plots_and_a_line_for_each_other(tmp_path, plots):
    found = drawn(report_run(tmp_path))
    without = {name for name, plot in found.items() if plot.figure is None}
    assert without == set(plots) - OF_ONE_RUN
    assert all(found[name].missing for name in without)
    assert all(plot.figure is None and plot.missing for plot in drawn().values())
    run = report_run(tmp_path, "pp")
    for name in ("timeline.jsonl", "metrics.jsonl"):
        (run / "a0" / name).unlink()
    change(run, memory=[])
    found = drawn(run)
    for name in OF_ONE_RUN:  # what is not recorded is not drawn
        assert found[name].figure is None, name
    assert found["traffic"].figure is not None  # which the plan knows


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


def test_layouts_differ_in_marker_and_hatch_and_titles_in_their_words():
    names = ("single", "dp", "lp", "pp", "sp", "gems", "sp+pp", "sp+gems", "sp+lp", "local_dp")
    marks = [style.layout_style(name) for name in names]
    assert len({m.marker for m in marks}) == len({m.hatch for m in marks}) == len(names)
    assert style.layout_style("unheard") == style.layout_style("unheard")
    panels = [["resnet18", "bf16", "batch 4"], ["resnet18", "fp32", "batch 4"]]
    assert set_apart(panels) == ("resnet18, batch 4", ["bf16", "fp32"])


def placed(folder, source, *ranks):
    """Returns the setting of a run whose ranks stand as (host, cores, devices)."""
    run = report_run(folder, "sp grid")
    record = json.loads((run / "record.json").read_text())
    provenance = record["provenance"]
    provenance["hardware"]["cores"] = 2
    provenance["ranks"] = [
        {"rank": n, "host": host, "cores": cores, "devices": devices}
        for n, (host, cores, devices) in enumerate(ranks)
    ]
    memory = [{**entry, "source": source} for entry in record["memory"]]
    change(run, provenance=provenance, memory=memory)
    return frames.load([run]).setting


def test_machines_and_ranks_that_share_cores_or_accelerators_are_told(tmp_path):
    assert "simulated ranks: up to 6 share the cores" in placed(tmp_path / "a", "rss")
    device = placed(tmp_path / "b", "device")
    assert device.startswith("accelerator, 2 cores, 1 machine; ranks are")
    # Six ranks and the two cores of rank 0's machine looked like six ranks on two cores.
    nodes = [(f"n{n // 2}", [n % 2], None) for n in range(6)]
    assert placed(tmp_path / "c", "rss", *nodes) == "CPU, 2 cores each, 3 machines"
    own = [("n0", list(range(8)), str(n)) for n in range(6)]
    assert "share" not in placed(tmp_path / "f", "device", *own)
    shared = placed(tmp_path / "g", "device", *[("n0", list(range(8)), "0,1")] * 6)
    assert shared.endswith("up to 3 ranks share one accelerator")


WHAT = {
    "model": "resnet50", "image": [64, 64], "layout": "sp", "precision": "fp32", "task": "train",
    "batch": 8, "limit": None,
}  # fmt: skip
"""A point as a sweep describes it."""


def test_excluded_points_are_images_that_are_too_large(tmp_path):
    run = report_run(tmp_path, image=[64, 64])
    # The word of the network alone stood for the one that ran; a limit has a panel of its own.
    excluded = [WHAT | {"model": "unet3_8_x", "image": [96, 128]}, ["x"], None, {"model": "y"}]
    excluded.append(WHAT | {"limit": "20MiB"})
    points = [
        {"overrides": ["a=b"], "reason": "rank 0 needs more [memory.limit]", "what": what}
        for what in excluded
    ]
    (run.parent / "campaign.json").write_text(json.dumps({"excluded": points}))
    data = PlotData(frames.load([run], [run.parent]))
    [plot] = [p for p in figures.draw(data) if p.name == "largest_image"]
    assert "too large: sp 96x128" in plot.caption
    assert len([1 for axis in plot.figure.axes if axis.get_title(loc="left")]) == 2


def test_losses_and_evaluations_are_curves(tmp_path):
    steps, values = loss_curves.thinned({step: float(step % 2) for step in range(10_000)})
    assert len(steps) <= loss_curves.MAX_POINTS
    assert set(values) == {0.5}
    run = report_run(tmp_path)
    lines = [
        {"kind": "step", "rank": 0, "step": n, "loss": 2.0 - 0.1 * n, "lr": 0.1 / (n + 1),
         "grad_norm": 3.0 + n}
        for n in range(6)
    ]  # fmt: skip
    lines[1]["loss"], lines[2]["loss"] = float("nan"), None
    for step, top1 in ((1, 0.5), (3, 0.8), (5, 0.7)):
        facts = {"metric": "top1", "top1": top1, "loss": 1.5, "better": top1 > 0.6}
        lines.append({"kind": "validated", "rank": 0, "step": step, **facts})
    (run / "a0" / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    change(run, validation={"metric": "top1"})
    [shown] = PlotData(frames.load([run])).runs
    assert [*loss_curves.losses_of(shown)] == [0, 3, 4, 5]  # what is no number is left out
    plot = drawn(run)["learning"]
    assert "top1 0.8 at best (step 4), 0.7 last" in plot.caption
    titles = [axis.get_title(loc="left") for axis in plot.figure.axes]
    assert titles[1:] == ["top1", "learning rate", "gradient norm"]
    curve = plot.figure.axes[1].lines[0]
    assert curve.get_xydata().tolist() == [[2, 0.5], [4, 0.8], [6, 0.7]]


def test_steps_are_divided_so_that_all_parts_add_up():
    plan = plan_of(stages=2)
    parts = split_rank(plan, StepSpans(0, 0, "", 0.0, STEP), {}, 16.0)
    assert set(parts) == set(PARTS)
    assert sum(parts.values()) == pytest.approx(16.0)
    assert (parts[FORWARD], parts[BACKWARD], parts[HALO], parts[OPTIMISER]) == (3.0, 4.0, 2.0, 1.0)
    assert parts[BUBBLE] == 1.0  # behind its last span, until the last rank ends
    # Waiting is a bubble until the sender has computed: rank 1 needs F0 of rank 0.
    spans = [Span(WAIT, "F0", 0.0, 5.0), Span(FORWARD, "F0", 5.0, 9.0)]
    parts = split_rank(plan, StepSpans(1, 0, "", 0.0, spans), {(0, "F0"): 4.0}, 9.0)
    assert (parts[BUBBLE], parts[PIPELINE], parts[FORWARD]) == (4.0, 1.0, 4.0)
    spans = [Span(WAIT, "F0", 0.0, 5.0), Span(WAIT, "", 6.0, 7.0, "its sends")]
    parts = split_rank(plan, StepSpans(1, 0, "", 0.0, spans), {}, 7.0)
    assert (parts[BUBBLE], parts[PIPELINE], parts[OTHER]) == (0.0, 6.0, 1.0)
    for name in ("single", "sp+pp", "sp+gems", "dp"):
        plan = plan_of(**LAYOUTS[name])
        ranks = split_steps(plan, {0: [*simulate(plan, EqualCosts(plan)).ranks]})
        assert len(ranks) == plan.world
        # Replicas are simulated as one.
        assert len({round(sum(one.values()), 6) for one in ranks} - {0.0}) == 1


def option(step_s, peak_bytes, name="sp", **more):
    values = {"step_s": step_s, "peak_bytes": peak_bytes, "layout": name, "overrides": f"{name}=1"}
    return values | more


def test_choice_is_drawn_with_its_front(tmp_path):
    layouts = [PlacedLayout(s, b, "", "") for s, b in ((2, 20), (1, 30), (3, 30), (4, 10), (4, 20))]
    front = [(one.step_s, one.peak_bytes) for one in pareto_front(layouts)]
    assert front == [(1, 30), (2, 20), (4, 10)]
    run = report_run(tmp_path, "sp grid")
    assert "no run had its layout chosen" in drawn(run)["choice"].missing
    for damaged in (7, [7], [{"step_s": "x"}], [option(-1, float("nan"))]):
        write_choice(run, {"options": damaged})
        assert drawn(run)["choice"].figure is None
    options = [option(0.01, 2**20), option(0.02, 2**19, "pp", memory_rehearsed=False)]
    write_choice(run, {"schema": 1, "options": options, "out": [option(0.005, 2**22)]})
    plot = drawn(run)["choice"]
    assert "2 layouts, 2 of them on the Pareto front; chosen sp=1" in plot.caption
    assert "measured" in plot.caption
    lines = {line.get_label(): line for line in plot.figure.axes[0].get_lines()}
    # Estimated memory looks different.
    assert (lines["sp"].get_fillstyle(), lines["pp"].get_fillstyle()) == ("full", "none")
    assert [*lines["does not fit"].get_xdata()] == [5.0]


CLASSES = ["_sky", "<b>road</b>", "$x$"]
FORMS = ("tiff", "ome-tiff", "zarr")


def predicted_run(results, maps, kind, form="tiff"):
    """Makes the folder of a complete prediction with some maps, named by their numbers."""
    run = report_run(results)
    files = PredictionMaps(run / "a0" / file_names.PREDICTIONS, map(str, range(len(maps))), kind,
                           form)  # fmt: skip
    for number, one in enumerate(maps):
        files.write(number, one, (slice(None),) * one.ndim)
    held = {**kind._asdict(), "shape": [*kind.shape], "dtype": np.dtype(kind.dtype).name}
    change(run, prediction={"kind": "pixels", "images": len(maps), "map": held})
    return run


def read(run, most=6):
    notes: list = []
    [one] = read_runs([run])
    return overviews(one, most, notes), notes


@pytest.mark.parametrize("form", FORMS)
def test_overview_counts_classes_and_shrinks_a_map_piece_by_piece(tmp_path, monkeypatch, form):
    monkeypatch.setattr(map_overviews, "MAX_SIDE", 20)
    monkeypatch.setattr(map_overviews, "PIECE_BYTES", 300)  # many pieces
    whole = np.random.default_rng(0).integers(0, 3, (61, 45), np.uint8)
    whole[5, 8] = 255
    kind = MapKind(whole.shape, np.uint8, "YX", CLASSES)
    run = predicted_run(tmp_path / "a", [whole], kind, form)
    [[one], notes] = read(run)
    assert not notes
    assert (one.name, one.size, one.names) == ("0", (61, 45), CLASSES)
    assert one.pixels == {**{n: (whole == n).sum() for n in range(3)}, NOT_FINITE: 1}
    assert (one.classes == whole[::4, ::4]).all()
    monkeypatch.setattr(map_overviews, "MAX_COUNTED", 100)  # only what is shown
    [[one], _] = read(run)
    assert one.pixels == {n: (whole[::4, ::4] == n).sum() for n in range(3)}
    shares = np.random.default_rng(0).random((3, 30, 45), np.float32)
    shares[1, 3, 6] = np.nan
    kind = MapKind(shares.shape, np.float32, "CYX", CLASSES)
    [[one], _] = read(predicted_run(tmp_path / "b", [shares], kind, form))
    expected = shares.argmax(0)
    expected[3, 6] = NOT_FINITE
    assert (one.classes == expected[::3, ::3]).all()
    np.testing.assert_array_equal(one.shares, shares.max(0)[::3, ::3])


def test_predicted_maps_are_drawn_with_their_classes(tmp_path):
    maps = [np.full((20, 30), n % 3, np.uint8) for n in range(12)]
    maps[0][:5] = 2
    run = predicted_run(tmp_path / "a", maps, MapKind((20, 30), np.uint8, "YX", CLASSES))
    plot = drawn(run)["predicted_maps"]
    assert "single: 0, 20x30 pixels: _sky 75 %, $x$ 25 %" in plot.caption
    assert "single: 5" in plot.caption  # the sixth: 10 comes after it
    assert "6 more are not drawn" in plot.caption
    svg = figures.inline(plot)
    assert all(name in svg for name in ("_sky", "&lt;b&gt;road&lt;/b&gt;", "$x$"))
    assert "<b>" not in svg
    assert svg.count("<image") == 6
    image = np.random.default_rng(0).random((20, 30, 3), np.float32)
    run = predicted_run(tmp_path / "b", [image], MapKind(image.shape, np.float32, "YXS"))
    [[one], _] = read(run)
    np.testing.assert_array_equal(one.image, image)


def test_damaged_map_is_left_out_with_a_note(tmp_path):
    values = np.ones((20, 30), np.uint8)
    run = predicted_run(tmp_path, [values, values], MapKind(values.shape, np.uint8, "YX", CLASSES))
    file = run / "a0" / "predictions" / "0.tif"
    file.write_bytes(file.read_bytes()[:50])
    found, notes = read(run)
    assert len(found) == 1
    assert "0.tif" in str(notes[0])
    record = json.loads((run / "record.json").read_text())
    record["prediction"]["map"]["shape"] = [10**9, 10**9]  # no memory is reserved for it
    change(run, **record)
    assert read(run)[0] == []
