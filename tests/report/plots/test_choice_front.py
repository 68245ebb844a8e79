"""Is what a run was chosen from drawn, with its Pareto front and what the run measured?"""

from __future__ import annotations

import pytest

from hires.core.store.choice_file import write_choice
from hires.report import frames
from hires.report.plots import base as figures
from hires.report.plots.base import PlotData
from hires.report.plots.choice_front import PlacedLayout, pareto_front
from tests.helpers.report_runs import report_run


def layout(step_s, peak_bytes):
    return PlacedLayout(step_s, peak_bytes, "sp", "parallel.tiles=[2,1]")


def test_front_has_what_no_other_layout_beats_in_both():
    layouts = [layout(2, 20), layout(1, 30), layout(3, 30), layout(4, 10), layout(4, 20)]
    assert pareto_front(layouts) == [layout(1, 30), layout(2, 20), layout(4, 10)]


def option(step_s, peak_bytes, name="sp"):
    return {"step_s": step_s, "peak_bytes": peak_bytes, "layout": name, "overrides": f"{name}=1"}


def drawn(run):
    plots = figures.draw(PlotData(frames.load([run])))
    return next(plot for plot in plots if plot.name == "choice")


def test_choice_of_a_run_is_drawn(tmp_path):
    run = report_run(tmp_path, "sp grid")
    assert "no run had its layout chosen" in drawn(run).missing
    write_choice(run, {"schema": 1, "options": [option(0.01, 2**20), option(0.02, 2**19, "pp")]})
    plot = drawn(run)
    assert plot.figure is not None
    assert "2 layouts, 2 of them on the Pareto front; chosen sp=1" in plot.caption
    assert "measured" in plot.caption


@pytest.mark.parametrize("options", [7, [7], [{"step_s": "x"}], [option(-1, float("nan"))]])
def test_damaged_choice_is_left_out(tmp_path, options):
    run = report_run(tmp_path, "sp grid")
    write_choice(run, {"options": options})
    assert drawn(run).figure is None


def test_estimated_memory_and_layouts_that_do_not_fit_look_different(tmp_path):
    run = report_run(tmp_path, "sp grid")
    estimated = {**option(0.02, 2**19, "pp"), "memory_rehearsed": False}
    choice = {"options": [option(0.01, 2**20), estimated], "out": [option(0.005, 2**22)]}
    write_choice(run, {"schema": 1, **choice})
    [axis] = drawn(run).figure.axes
    lines = {line.get_label(): line for line in axis.get_lines()}
    assert (lines["sp"].get_fillstyle(), lines["pp"].get_fillstyle()) == ("full", "none")
    assert [*lines["does not fit"].get_xdata()] == [5.0]
