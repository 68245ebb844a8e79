"""Do the texts of every plot fit, at the widths of a page, a telephone and a paper's column?"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from hires.report import frames
from hires.report.plots import base as figures
from hires.report.plots import style
from hires.report.plots.base import Plot, PlotData
from tests.helpers.report_runs import report_run, sized_campaign

WIDTHS = [
    style.COLUMN,
    style.WIDTH,
    pytest.param(5.0, marks=pytest.mark.slow),
    pytest.param(style.WIDE, marks=pytest.mark.slow),
]
SHARE = 0.15
"""Of the smaller of two texts, which others may cover: boxes are larger than letters."""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> PlotData:
    """Returns a campaign in which every plot but that of a benchmark is drawn."""
    results = tmp_path_factory.mktemp("results")
    paths = sized_campaign(results)
    paths += [
        report_run(results, "sp grid", image=[64, 64]),
        report_run(results, "sp columns", image=[64, 64]),
    ]
    paths.append(report_run(results, "sp+gems", state="failed", image=[512, 512], reason="oom"))
    return PlotData(frames.load(paths))


@pytest.fixture(scope="module")
def drawn(data) -> Callable[[float], list[Plot]]:
    """Returns the plots that have a figure, drawn at a width in inches."""

    @functools.cache
    def at(width: float) -> list[Plot]:
        plots = [plot for plot in figures.draw(data, width) if plot.figure is not None]
        for plot in plots:
            plot.figure.draw_without_rendering()  # it places everything, once for all tests
        return plots

    return at


def texts_of(figure: Figure) -> list[tuple[str, Bbox]]:
    """Returns every text that is seen, and where."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    shown = [
        text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()
    ]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in shown]
    ticks = {
        id(label): axis.get_window_extent(renderer)
        for axis in figure.axes
        for scale in (axis.xaxis, axis.yaxis)
        for label in scale.get_ticklabels()
    }
    kept = []
    for (name, box), text in zip(boxes, shown, strict=True):
        frame = ticks.get(id(text))
        # A tick beyond the end of its axis has a label that is not drawn.
        inside = frame is None or (
            frame.x0 - 1 <= (box.x0 + box.x1) / 2 <= frame.x1 + 1
            or frame.y0 - 1 <= (box.y0 + box.y1) / 2 <= frame.y1 + 1
        )
        if inside and box.width and box.height:
            kept.append((name, box))
    return kept


def clashes(figure: Figure) -> list[str]:
    """Returns texts that leave the figure or lie on each other."""
    width, height = figure.bbox.width, figure.bbox.height
    texts = texts_of(figure)
    found = [
        f"cut: {name}"
        for name, box in texts
        if box.x0 < -2 or box.y0 < -2 or box.x1 > width + 2 or box.y1 > height + 2
    ]
    for (a, p), (b, q) in itertools.combinations(texts, 2):
        both = Bbox.intersection(p, q)
        if both is not None and both.width * both.height > SHARE * min(
            p.width * p.height, q.width * q.height
        ):
            found.append(f"{a} / {b}")
    return found


@pytest.mark.parametrize("width", WIDTHS)
def test_no_text_is_cut_or_lies_on_another(drawn, width):
    assert len(drawn(width)) >= 11
    told = {plot.name: found for plot in drawn(width) if (found := clashes(plot.figure))}
    assert told == {}


@pytest.mark.parametrize("width", [style.COLUMN, style.WIDTH])
def test_figures_have_the_width_that_was_asked_for_and_panels_fill_it(drawn, width):
    for plot in drawn(width):
        assert plot.figure.get_size_inches()[0] == width
        boxes = [axis.get_position() for axis in plot.figure.axes]
        assert max(box.x1 for box in boxes) > 0.8, plot.name
        assert min(box.x0 for box in boxes) < 0.35, plot.name


@pytest.mark.parametrize("width", [style.COLUMN, style.WIDTH])
def test_legend_and_footer_take_no_room_from_the_axes(drawn, width):
    # On a telephone the legend lay across the bars, and time lines had no height.
    for plot in drawn(width):
        figure = plot.figure
        boxes = [axis.get_window_extent() for axis in figure.axes]
        legends = [legend.get_window_extent() for legend in figure.legends]
        assert min(box.height for box in boxes) > 0.1 * figure.dpi, plot.name
        assert not any(Bbox.intersection(a, b) for a in boxes for b in legends), plot.name


@pytest.mark.parametrize("layout", ["dp", "sp grid"])
@pytest.mark.parametrize("width", [style.COLUMN, style.WIDTH])
def test_single_square_panel_has_bars_beside_it_that_fill_the_figure(tmp_path, layout, width):
    # The right half of such a figure was empty.
    data = PlotData(frames.load([report_run(tmp_path, layout)]))
    expected = {"traffic", "memory_per_rank"} | ({"tile_grid"} if layout != "dp" else set())
    names = set()
    for plot in figures.draw(data, width):
        if plot.name not in ("traffic", "tile_grid", "memory_per_rank") or plot.figure is None:
            continue
        names.add(plot.name)
        assert not clashes(plot.figure)
        boxes = [axis.get_position() for axis in plot.figure.axes]
        assert min(box.x0 for box in boxes) < 0.2
        assert max(box.x1 for box in boxes) > 0.75
        if plot.name != "memory_per_rank" and width == style.WIDTH:
            bars = plot.figure.axes[1]
            gap = bars.get_position().x0 - plot.figure.axes[0].get_position().x1
            assert gap < 0.25
            assert "The bars are" in plot.caption
    assert names == expected


def test_logarithmic_axes_say_so(drawn):
    for plot in drawn(style.WIDTH):
        for axis in plot.figure.axes:
            for scale, kind in ((axis.xaxis, axis.get_xscale()), (axis.yaxis, axis.get_yscale())):
                label = scale.get_label_text()
                assert ("log scale" in label) == (kind == "log" and bool(label)), plot.name


def test_lines_of_a_figure_differ_in_marker_or_dashes(drawn):
    for plot in drawn(style.WIDTH):
        for axis in plot.figure.axes:
            looks = [
                (line.get_marker(), str(line._dash_pattern), line.get_markerfacecolor())
                for line in axis.get_lines()
                if line.get_label()[:1] != "_" and line.get_linestyle() != "None"
            ]
            assert len(set(looks)) == len(looks), plot.name
