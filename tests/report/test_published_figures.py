"""Do the tables of a published figure hold the right ratios, and its plot all numbers?"""

from __future__ import annotations

import dataclasses
import io

import pytest

from hires.core.config.value_checks import build
from hires.core.errors import ConfigError
from hires.report.columns import keys
from hires.report.plots import published_figure, style
from hires.report.published_figures import (
    MEASURED,
    PREDICTED,
    FigurePoint,
    FigureSpec,
    PublishedFigure,
    require_number,
)

POINT = FigurePoint(PREDICTED, "net", (256, 256), 32, "single", 1, 1, "fp32", 100.0, (8000,))


def point(**changed):
    return dataclasses.replace(POINT, **changed)


def figure(number, shows, points, **more):
    return PublishedFigure(FigureSpec(number, "a title", shows, **more), list(points))


@pytest.fixture
def speeds():
    """Figure 2.4 with ratios of 1.5 and 2 in FP16, and of 6 at 1024x1024 in INT8."""
    large = {"image": (1024, 1024)}
    return figure(
        "2.4",
        ["speed"],
        [
            point(),
            point(precision="fp16", img_per_s=150.0),
            point(**large, img_per_s=10.0),
            point(**large, precision="fp16", img_per_s=20.0),
            point(**large, precision="int8", img_per_s=60.0),
            point(source=MEASURED, img_per_s=5.0, state="done"),
            point(source=MEASURED, img_per_s=7.0, precision="fp16", state="done"),
        ],
    )


def test_mean_is_over_all_points_of_a_source(speeds):
    rows = {(one.number.precision, one.number.how): one for one in speeds.compared()}
    fp16 = rows["fp16", "the mean of all"]
    assert (fp16.predicted, fp16.measured) == (1.75, pytest.approx(1.4))
    assert fp16.off_by == pytest.approx(1.75 / 1.54)
    assert rows["bf16", "the mean of all"].predicted is None
    assert rows["bf16", "the mean of all"].off_by is None


def test_number_of_one_size_stands_beside_that_size_alone(speeds):
    points, _ = speeds.tables()
    place = keys(points.columns).index("published")
    assert [row[place] for row in points.rows] == [None] * 4 + [6.72] + [None] * 2
    [large] = [one for one in speeds.compared() if one.number.image == 1024]
    assert large.predicted == 6.0
    assert "1024x1024" in large.label


def test_largest_ratio_stands_beside_up_to():
    tiles = [point(tiles=n, ranks=n, layout="sp", img_per_s=10.0) for n in (2, 4)]
    halves = [
        dataclasses.replace(one, precision="fp16", img_per_s=speed)
        for one, speed in zip(tiles, (11.0, 18.0), strict=True)
    ]
    found = figure("2.8", ["speed"], [*tiles, *halves]).compared()
    assert {one.number.precision: one.predicted for one in found} == {"fp16": 1.8, "bf16": None}


def test_memory_is_that_of_all_ranks_together():
    whole = point(layout="sp+lp", tiles=4, ranks=5, rank_bytes=(10, 10, 10, 10, 40))
    half = dataclasses.replace(whole, precision="fp16", rank_bytes=(5, 5, 5, 5, 30))
    made = figure("2.6", ["memory"], [whole, half], by_rank=True)
    assert made.ratio(half, "memory") == pytest.approx(80 / 50)
    [row] = [one for one in made.compared() if one.number.precision == "fp16"]
    assert row.predicted == pytest.approx(1.6)


def test_readings_of_a_speed_up_over_one_gpu_have_a_row_each():
    one = point(precision="bf16", img_per_s=2.0)
    layouts = [("sp", 4, 4, 8.0), ("sp+lp", 4, 5, 3.0)]
    tiled = [
        dataclasses.replace(one, layout=name, tiles=tiles, ranks=ranks, img_per_s=speed)
        for name, tiles, ranks, speed in layouts
    ]
    made = figure("2.11", ["speed"], [one, *tiled])
    found = {row.layout: row.predicted for row in made.compared() if row.number.tiles == 4}
    assert found == {"sp, 4": 4.0, "sp+lp, 4+1": 1.5}
    assert made.ratio(point(img_per_s=9.0), "speed") is None  # no run of it on one GPU


def drawn(made):
    with style.styled():
        fig = published_figure.draw(made)
        fig.savefig(io.BytesIO(), format="png")
    return fig


def test_plot_has_a_panel_for_each_source_and_every_published_number(speeds):
    fig = drawn(speeds)
    titles = [axis.get_title(loc="left") for axis in fig.axes]
    assert titles[0].startswith("predicted")
    assert titles[1].startswith("measured")
    marks = {line.get_label(): line.get_xdata() for line in fig.axes[-1].get_lines()}
    assert [*marks["published"]] == [n.value for n in speeds.numbers]
    assert set(marks) == {"published", PREDICTED, MEASURED}
    bars = fig.axes[0].patches
    assert sorted(bar.get_height() for bar in bars) == [10.0, 20.0, 60.0, 100.0, 150.0]


def test_plot_by_rank_has_a_bar_for_each_rank():
    whole = point(layout="sp+lp", tiles=4, ranks=5, rank_bytes=(10, 11, 12, 13, 40))
    fig = drawn(figure("2.6", ["memory"], [whole], by_rank=True))
    assert len(fig.axes[0].patches) == 5
    assert [text.get_text() for text in fig.axes[0].get_xticklabels()] == [*"01234"]


@pytest.mark.parametrize(
    ("values", "meant"),
    [
        ({"number": "2.4", "title": "a", "shows": ["spede"]}, "must hold speed, memory or both"),
        ({"number": "2.4", "title": "a", "shows": []}, "must hold speed, memory or both"),
        ({"number": "2.4", "title": "a", "show": ["speed"]}, "unknown key figure.show"),
    ],
)
def test_mistakes_in_a_figure_are_named(values, meant):
    with pytest.raises(ConfigError, match=meant):
        build(FigureSpec, values, "figure.")


def test_figure_that_the_text_does_not_have_is_refused():
    with pytest.raises(ConfigError, match=r"figure\.number=2\.3 is none"):
        require_number(FigureSpec("2.3", "a", ["speed"]))
