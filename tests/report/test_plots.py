"""Each plot appears where its data is, with its series, and says why where it is not."""

from __future__ import annotations

import json
from collections import Counter
from unittest import mock

import numpy as np
import pytest

from hires.core.ranks.timeline import BACKWARD, FORWARD, HALO, OPTIMISER, WAIT, Span, StepSpans
from hires.core.store import campaign, file_names
from hires.core.store.campaign import Campaign, ExcludedPoint
from hires.engine.prediction_maps import MapKind, MapPlace, PredictionMaps
from hires.report import tables
from hires.report.plots import base as figures
from hires.report.plots import loss_curves, predicted_maps
from hires.report.plots.base import PlotData
from hires.report.plots.predicted_maps import NOT_FINITE, overviews
from hires.report.plots.steps import BUBBLE, OTHER, PARTS, PIPELINE, split_rank, split_steps
from hires.report.runs import read_runs
from tests.helpers.compared_runs import compared_run, failed_run
from tests.helpers.report_runs import change, report_run
from tests.helpers.simulated import STEP, planned_spans
from tests.helpers.small_plans import LAYOUTS, plan_of

OF_ONE_RUN = {"memory_per_rank", "step_split", "timeline", "loss"}
OF_CAMPAIGN = OF_ONE_RUN | {
    "traffic", "message_costs", "throughput_by_layout", "throughput_by_image",
    "precision_error",
}  # fmt: skip


def drawn(*paths, only=None):
    """Returns the plots of some runs by name, or one of them."""
    plots = {n: plot for n, plot in figures.registered().items() if only in (None, plot.name)}
    with mock.patch.dict(figures.PLOTS, plots, clear=True):
        plots = {p.name: p for p in figures.draw(PlotData(tables.load(*paths)))}
    return plots[only] if only else plots


def test_campaign_has_its_plots_with_numbers_and_where_they_were_measured(campaign):
    plots = {plot.name: plot for plot in figures.draw(PlotData(campaign))}
    assert {name for name, plot in plots.items() if plot.figure} == OF_CAMPAIGN
    for name in OF_CAMPAIGN:
        assert plots[name].caption
        assert "CPU" in plots[name].figure.get_supxlabel()
    assert all(plots[name].missing for name in plots.keys() - OF_CAMPAIGN)
    assert "memory refused no image" in plots["largest_image"].missing
    assert "no layout" in plots["throughput_by_ranks"].missing  # each is one point, and no line
    for axis in plots["memory_per_rank"].figure.axes:
        highs: Counter[float] = Counter()
        for bar in axis.patches:
            highs[round(bar.get_x() + bar.get_width() / 2)] += bar.get_height()
        assert highs == pytest.approx({rank: 20 + rank for rank in highs})  # MiB, the peak


def test_one_complete_run_of_each_layout_is_drawn_the_fastest(tmp_path):
    runs = [
        compared_run(tmp_path, [[step_s]], optimizer={"lr": step_s}) for step_s in (2.0, 1.5, 1.8)
    ]
    data = PlotData(tables.load([*runs, failed_run(tmp_path, optimizer={"lr": 1.0})]))
    assert [one.run.path for one in data.runs] == [runs[1]]


def test_last_step_is_drawn_the_mean_of_those_that_count_is_split_and_messages_cost_all(tmp_path):
    run = report_run(tmp_path, "pp")
    file = run / "a0" / "timeline.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        file.write_text(file.read_text() + json.dumps({**line, "step": 4}) + "\n")
    axes = drawn([run], only="timeline").figure.axes
    assert axes[1].get_title(loc="left") == "measured, step 5 [ms]"
    assert drawn([run], only="step_split").figure
    bars = drawn([run], only="message_costs").figure.axes[0].patches
    cost_ms = 1e3 * tables.load([run]).messages[["issue_s", "wait_s"]].sum().sum()
    assert sum(bar.get_height() for bar in bars) == pytest.approx(cost_ms)
    left_out = [{"step": step, "why": "warm-up"} for step in range(6)]
    change(run, throughput={"discarded": left_out})
    assert "time line was kept are warm-up" in drawn([run], only="step_split").missing


def test_throughput_is_drawn_with_its_spread_and_beside_the_ideal(tmp_path):
    runs = []
    for world, median in ((1, 4.0), (2, 2.5), (4, 1.25)):  # seconds of a step of 4 images
        keys = {"name": "single" if world == 1 else "dp", "replicas": world}
        steps = [0.8 * median, median, 1.6 * median]
        runs.append(compared_run(tmp_path, [steps], parallel=keys))
        change(runs[-1], world=world)
    speed, share = drawn(runs, only="throughput_by_ranks").figure.axes
    assert speed.lines[0].get_xydata().tolist() == [[1, 1], [2, 2], [4, 4]]  # ideal
    assert speed.containers[0][0].get_xydata().tolist() == [[2, 1.6], [4, 3.2]]
    assert share.lines[-1].get_xydata().tolist() == [[2, 80], [4, 80]]
    speed = drawn(runs[1:], only="throughput_by_ranks").figure.axes[0]
    assert speed.lines[0].get_xydata().tolist() == [[2, 1.6], [4, 3.2]]  # of the fewest ranks
    [axis] = drawn(runs, only="throughput_by_layout").figure.axes
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert names == ["single", "dp on 2", "dp on 4"]  # the slowest first
    assert [bar.get_width() for bar in axis.patches] == [1, 1.6, 3.2]
    [errors] = axis.containers[-1].errorbar[2]
    p10_to_p90 = errors.get_segments()[0][:, 0].tolist()
    assert p10_to_p90 == pytest.approx([1 / 1.48, 1 / 0.84])  # of the steps
    # More points of one layout show less than two layouts.
    for world in (1, 2, 4, 8):
        keys = {"name": "dp", "replicas": world}
        runs.append(compared_run(tmp_path, [[1.0]], parallel=keys, batch=8))
        change(runs[-1], world=world)
    assert "batch 4" in drawn(runs, only="throughput_by_layout").caption


def test_figures_of_a_paper_are_as_wide_as_a_column(tmp_path):
    data = PlotData(tables.load([report_run(tmp_path, name) for name in ("pp", "dp")]))
    plots = [plot for plot in figures.draw(data, 3.4) if plot.figure]
    assert {plot.figure.get_figwidth() for plot in plots} == {3.4}
    assert (figures.encoded(plots[0], "pdf") or b"").startswith(b"%PDF")


CORES = list(range(8))


@pytest.mark.parametrize(
    ("source", "ranks", "begins", "ends"),
    [  # ranks are host, cores and devices
        ("rss", [], "CPU", "share the cores"),
        ("rss", [(f"n{n // 2}", [n % 2], None) for n in range(6)], "CPU, 2 cores each, 3 mac", ""),
        ("device", [("n0", CORES, str(n)) for n in range(6)], "accelerator", "1 machine"),
        ("device", [("n0", CORES, "0,1")] * 6, "accelerator", "3 ranks share one accelerator"),
    ],
)
def test_ranks_that_share_cores_or_accelerators_are_reported(tmp_path, source, ranks, begins, ends):
    run = report_run(tmp_path, "sp grid")
    record = json.loads((run / "record.json").read_text())
    provenance, keys = record["provenance"], ("host", "cores", "devices")
    provenance["hardware"]["cores"] = 2
    provenance["ranks"] = [
        {"rank": n, **dict(zip(keys, rank, strict=True))} for n, rank in enumerate(ranks)
    ]
    memory = [{**entry, "source": source} for entry in record["memory"]]
    change(run, provenance=provenance, memory=memory)
    setting = tables.setting(tables.load([run]).found)
    assert setting.startswith(begins)
    assert ends in setting
    assert ("share" in setting) == ("share" in ends)


def test_excluded_points_are_images_that_are_too_large(tmp_path):
    run = report_run(tmp_path, image=[64, 64])
    point = {"model": "resnet50", "image": [64, 64], "layout": "sp", "precision": "fp32"}
    point |= {"task": "train", "batch": 8, "limit": "20MiB"}  # a limit has a panel of its own
    other = {**point, "model": "unet3_8_x", "image": [96, 128], "limit": None}
    why, odd = "rank 0 needs more [memory.limit]", {**other, "image": [300, 300]}
    facts = (point, other, None, {"model": "y"})
    excluded = [ExcludedPoint([f"a={n}"], why, what=what) for n, what in enumerate(facts)]
    excluded.append(ExcludedPoint(["a=b"], "it does not divide [batch]", what=odd))
    campaign.write(run.parent, Campaign("a", excluded=excluded))
    runs = [run, report_run(tmp_path, image=[32, 32])]
    for size, why in ((80, "oom"), (90, "nan")):
        runs.append(report_run(tmp_path, state="failed", reason=why, image=[size, size]))
    plot = drawn(runs, [run.parent], only="largest_image")
    panels = [axis for axis in plot.figure.axes if axis.get_title(loc="left")]
    marks = [line.get_xdata().tolist() for axis in panels for line in axis.get_lines()]
    assert len(panels) == 3
    assert [[(96 * 128) ** 0.5] in marks, [80.0] in marks] == [True, True]
    assert not {90.0, 300.0} & {edge for edges in marks for edge in edges}  # memory was enough
    assert [bar.get_width() for axis in panels for bar in axis.patches] == [64.0]  # ran to the end


def test_losses_and_evaluations_are_curves(tmp_path):
    run = report_run(tmp_path)
    lines = [
        {"kind": "step", "rank": 0, "step": n, "loss": loss, "lr": 1 / (n + 1), "grad_norm": n}
        for n, loss in enumerate([2.0, float("nan"), None, 1.7])
    ]
    for step, top1 in ((1, 0.5), (3, 0.8), (5, 0.7)):
        facts = {"metric": "top1", "top1": top1, "loss": 1.5, "better": top1 > 0.6}
        lines.append({"kind": "validated", "rank": 0, "step": step, **facts})
    (run / "a0" / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    change(run, validation={"metric": "top1"})
    [shown] = read_runs([run])
    assert [*loss_curves.curve_of(shown, "step", "loss")] == [1, 4]  # what is no number is left out
    plot = drawn([run], only="learning")
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
    assert split_steps(plan, {}) == [dict.fromkeys(PARTS, 0.0)] * 2  # nothing was kept
    kept = planned_spans(plan)
    one, two = (split_steps(plan, dict.fromkeys(range(n), kept)) for n in (1, 2))
    assert [pytest.approx(rank) for rank in one] == two
    plan = plan_of(**LAYOUTS["sp+gems"])
    ranks = split_steps(plan, {0: planned_spans(plan)})
    assert len({round(sum(one.values()), 6) for one in ranks}) == 1


def test_choice_is_drawn_with_its_front(tmp_path):
    def option(step_s, peak_bytes, name="sp", **facts):
        values = {"step_s": step_s, "peak_bytes": peak_bytes, "layout": name}
        return {**values, "overrides": f"{name}=1", **facts}

    run = report_run(tmp_path, "sp grid")
    for damaged in (7, [7], [{"step_s": "x"}], [option(-1, float("nan"))]):
        (run / "choice.json").write_text(json.dumps({"options": damaged}))
        assert drawn([run], only="choice").figure is None
    options = [option(0.01, 2**20), option(0.02, 2**19, "pp", rehearsed=False)]
    options.append(option(0.03, 2**19, "dp"))
    choice = {"schema": 1, "options": options, "out": [option(0.005, 2**22)]}
    (run / "choice.json").write_text(json.dumps(choice))
    plot = drawn([run], only="choice")
    assert "Chosen: sp: sp=1." in plot.caption
    lines = {line.get_label(): line for line in plot.figure.axes[0].get_lines()}
    # Estimated memory looks different.
    assert (lines["sp"].get_fillstyle(), lines["pp"].get_fillstyle()) == ("full", "none")
    assert [*lines["does not fit"].get_xdata()] == [5.0]
    assert [*lines["Pareto front"].get_xdata()] == [10.0, 20.0]


CLASSES = ["_sky", "<b>road</b>", "$x$"]


def predicted_run(results, maps, axes, form="ome-tiff"):
    """Makes the folder of a complete prediction with some maps, named by their numbers."""
    channels = {"YX": 1, "CYX": maps[0].shape[0], "YXS": maps[0].shape[-1]}[axes]
    kind = MapKind(channels, maps[0].dtype, axes, () if axes == "YXS" else CLASSES)
    run = report_run(results)
    folder, names = run / file_names.PREDICTIONS, map(str, range(len(maps)))
    files = PredictionMaps(folder, names, kind, form)
    for number, one in enumerate(maps):
        rows, cols = (one.shape[axes.index(axis)] for axis in "YX")
        place = MapPlace(np.arange(rows), np.arange(cols))
        files.make(number, place)
        files.write(number, place, one, (0, rows, 0, cols))
    facts = {**kind._asdict(), "dtype": np.dtype(kind.dtype).name}
    change(run, prediction={"kind": "pixels", "images": len(maps), "map": facts})
    return run


def read(run):
    notes: list = []
    [one] = read_runs([run])
    return overviews(one, 6, notes), notes


@pytest.mark.parametrize("form", ["ome-tiff", "zarr"])
def test_overview_shrinks_a_map_and_counts_its_classes(tmp_path, monkeypatch, form):
    monkeypatch.setattr(predicted_maps, "MAX_SIDE", 20)
    whole = np.random.default_rng(0).integers(0, 3, (61, 45), np.uint8)
    whole[4, 8] = 255
    run = predicted_run(tmp_path / "a", [whole], "YX", form)
    [[one], notes] = read(run)
    assert not notes
    assert (one.name, one.size, one.names) == ("0", (61, 45), CLASSES)
    shown = whole[::4, ::4]
    assert one.pixels == {**{n: (shown == n).sum() for n in range(3)}, NOT_FINITE: 1}
    assert (one.classes == np.where(shown == 255, NOT_FINITE, shown.astype(int))).all()
    shares = np.random.default_rng(0).random((3, 30, 45), np.float32)
    shares[1, 3, 6] = np.nan
    [[one], _] = read(predicted_run(tmp_path / "b", [shares], "CYX", form))
    expected = shares.argmax(0)
    expected[3, 6] = NOT_FINITE
    assert (one.classes == expected[::3, ::3]).all()
    np.testing.assert_array_equal(one.shares, shares.max(0)[::3, ::3])


def test_predicted_maps_are_drawn_with_their_classes_and_damaged_ones_noted(tmp_path):
    maps = [np.full((20, 30), n % 3, np.uint8) for n in range(12)]
    maps[0][:5] = 2
    run = predicted_run(tmp_path / "a", maps, "YX")
    plot = drawn([run], only="predicted_maps")
    titles = [axis.get_title(loc="left") for axis in plot.figure.axes]
    assert (titles[0], titles[5]) == ("single: 0", "single: 5")  # the sixth: 10 comes after it
    assert "6 more are not drawn" in plot.caption
    svg = figures.inline(plot)
    assert "&lt;b&gt;road&lt;/b&gt;" in svg
    assert "<b>" not in svg
    image = np.random.default_rng(0).random((20, 30, 3), np.float32)
    [[one], _] = read(predicted_run(tmp_path / "b", [image], "YXS"))
    np.testing.assert_array_equal(one.image, image)
    file = run / "predictions" / "0.ome.tif"
    file.write_bytes(file.read_bytes()[:50])
    overviews, notes = read(run)
    assert len(overviews) == 5
    assert "0.ome.tif" in str(notes[0])
    record = json.loads((run / "record.json").read_text())
    # No memory is reserved for it.
    record["prediction"]["map"] |= {"axes": "CYX", "channels": 10**9}
    change(run, **record)
    assert read(run)[0] == []
