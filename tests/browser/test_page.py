"""Does the page of real runs work in a browser, in any width, light and dark, without a network?"""

from __future__ import annotations

import itertools
import socket

import pytest
from PIL import Image
from selenium.webdriver.common.keys import Keys

from hires.report.report import write_report
from tests.helpers.hostile import hostile_campaign
from tests.helpers.patience import until
from tests.helpers.report_runs import report_run

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1500)]

_SHARE = """
const svg = arguments[0].querySelector('svg').getBoundingClientRect();
return svg.width / arguments[1].clientWidth;
"""
"""Of the width of a figure's box, which its plot takes."""
_SCROLLED = """
const box = arguments[0];
box.scrollLeft = box.scrollWidth;
const frame = box.getBoundingClientRect(), heads = box.querySelector('tr').cells;
return [heads[heads.length - 1].getBoundingClientRect().right - frame.right,
        heads[0].getBoundingClientRect().left - frame.left];
"""
"""Pixels of the last column behind the right edge, and of the first behind the left one."""
MOST_CLASHES = 2
"""Texts of plots that may touch: fonts differ from machine to machine."""


def column(opened, table, name):
    texts = (" ".join(head.text.split()) for head in opened.all(f"#table-{table} th button"))
    heads = [text.split(" [")[0] for text in texts]
    place = heads.index(name) + 1
    rows = opened.all(f"#table-{table} tbody tr")
    cells = opened.all(f"#table-{table} tbody tr td:nth-child({place})")
    return place, [cell.text for cell, row in zip(cells, rows, strict=True) if row.is_displayed()]


def test_campaign_has_at_least_twelve_real_runs(opened):
    assert len(opened.all(".box")) >= 12
    assert opened.all("#table-failures tbody tr")
    assert "infeasible" in opened.one("#table-points").text


def test_console_is_silent_and_nothing_is_asked_for(opened, page):
    opened.run("window.scrollTo(0, document.body.scrollHeight)")
    assert opened.console() == []
    addresses = [a for a in opened.requests() if not a.startswith("data:")]
    assert addresses == [page.as_uri()]


def test_page_cannot_reach_out_even_if_it_would(opened):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(2)
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        opened.run(
            "fetch(arguments[0] + '/x').catch(() => {});"
            "new Image().src = arguments[0] + '/y.png';"
            "const s = document.createElement('script'); s.textContent = 'window.inserted = 1';"
            "document.body.append(s);",
            address,
        )
        with pytest.raises(TimeoutError):
            server.accept()
    assert opened.run("return window.inserted === undefined")
    said = opened.console()
    assert said
    assert all("Content Security Policy" in line for line in said)


def test_every_plot_shows_something(opened, tmp_path):
    figures = opened.all("figure")
    assert len(figures) >= 10
    for number, figure in enumerate(figures):
        path = tmp_path / f"{number}.png"
        path.write_bytes(opened.picture(figure))
        with Image.open(path) as image:
            colours = image.convert("RGB").getcolors(1 << 24)
        assert image.width > 300
        assert image.height > 150
        assert len(colours) > 30, figure.get_attribute("id")
        assert opened.run("return arguments[0].querySelectorAll('path').length", figure) > 5


def test_captions_and_marks_stand_on_every_figure(opened):
    for figure in opened.all("figure"):
        assert any(
            letter.isdigit() for letter in figure.find_element("tag name", "figcaption").text
        )
        assert "CPU" in opened.run("return arguments[0].querySelector('svg').textContent", figure)


WIDTHS = [400, 800, 1200, 1600]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_overlaps_and_the_page_never_scrolls_sideways(opened, width, dark):
    opened.resize(width, dark=dark)
    opened.run("for (const one of document.querySelectorAll('details')) one.open = true")
    assert opened.overlaps() == []
    assert opened.run("return document.documentElement.scrollWidth <= window.innerWidth")
    assert opened.console() == []


@pytest.mark.parametrize("width", WIDTHS)
def test_texts_of_plots_do_not_lie_on_each_other(opened, width):
    opened.resize(width)
    assert opened.clashing_texts()[MOST_CLASHES:] == []


@pytest.mark.parametrize("width", WIDTHS)
def test_plots_fill_their_boxes_and_are_not_cut(opened, width):
    opened.resize(width)
    for figure in opened.all("figure"):
        [plot] = [one for one in figure.find_elements("class name", "plot") if one.is_displayed()]
        share = opened.run(_SHARE, plot, figure)
        assert 0.85 < share <= 1.0, figure.get_attribute("id")


@pytest.mark.parametrize("width", WIDTHS)
def test_every_column_of_a_table_is_reached_and_the_first_stays(opened, width):
    opened.resize(width)
    for scroll in opened.all(".scroll"):
        last, first = opened.run(_SCROLLED, scroll)
        assert last <= 1, scroll.get_attribute("aria-label")
        assert first >= -1, scroll.get_attribute("aria-label")


def test_a_click_sorts_and_another_turns_it_round(opened):
    place, before = column(opened, "throughput", "median")
    button = opened.one(f"#table-throughput th:nth-child({place}) button")
    button.click()
    _, up = column(opened, "throughput", "median")
    assert up == sorted(before, key=float)
    head = opened.one(f"#table-throughput th:nth-child({place})")
    assert head.get_attribute("aria-sort") == "ascending"
    button.click()
    assert column(opened, "throughput", "median")[1] == up[::-1]
    assert head.get_attribute("aria-sort") == "descending"


def test_keyboard_sorts_too_and_text_sorts_by_the_numbers_in_it(opened):
    place, before = column(opened, "throughput", "image")
    opened.one(f"#table-throughput th:nth-child({place}) button").send_keys(Keys.ENTER)
    assert column(opened, "throughput", "image")[1] == sorted(
        before, key=lambda text: int(text.split("x")[0])
    )


def test_what_is_not_known_comes_last_either_way(opened):
    place, cells = column(opened, "precision", "error of first")
    assert "-" in cells
    button = opened.one(f"#table-precision th:nth-child({place}) button")
    for _ in range(2):
        button.click()
        assert column(opened, "precision", "error of first")[1][-1] == "-"


def test_filter_keeps_rows_that_hold_all_words_and_says_how_many(opened):
    _, every = column(opened, "memory", "layout")
    field = opened.one("#filter-memory")
    field.send_keys("SP+PP 48x48")
    _, kept = column(opened, "memory", "layout")
    assert set(kept) == {"sp+pp"}
    assert len(kept) == 3
    assert opened.one("[data-table=memory] .rows").text == f"3 of {len(every)} rows"
    field.send_keys(Keys.ESCAPE)
    assert column(opened, "memory", "layout")[1] == every


def test_runs_are_filtered_and_opened_by_keyboard(opened):
    every = opened.all(".box")
    opened.one("#filter-boxes").send_keys("failed nan")
    boxes = [box for box in every if box.is_displayed()]
    assert 0 < len(boxes) < len(every)
    boxes[0].find_element("tag name", "summary").send_keys(Keys.ENTER)
    assert "hires run" in boxes[0].text
    assert "the loss is" in boxes[0].text


def test_link_of_a_row_opens_the_box_of_its_run(opened):
    link = opened.one("#table-throughput tbody a")
    box = opened.one(f"#{link.get_attribute('href').rpartition('#')[2]}")
    assert box.get_attribute("open") is None
    link.click()
    until(lambda: box.get_attribute("open") is not None, "the box")  # the page hears of it later
    assert link.get_attribute("title") in box.text


def test_colours_follow_the_reader(opened):
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = opened.run(ground)
    opened.resize(1600, dark=True)
    assert opened.run(ground) != light
    ink = "return getComputedStyle(document.querySelector('.plot svg text')).fill"
    assert opened.run(ink) == "rgb(236, 236, 234)"


def test_headings_and_controls_have_names(opened):
    for control in opened.all("input, button, [role=img], [role=region], figure"):
        assert control.accessible_name.strip(), control.get_attribute("outerHTML")[:200]
    levels = opened.run(
        "return [...document.querySelectorAll('h1,h2,h3')].map((h) => +h.tagName[1])"
    )
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))


def test_page_prints(opened):
    printed = opened.driver.execute_cdp_cmd("Page.printToPDF", {})
    assert len(printed["data"]) > 100_000


def test_hostile_runs_execute_nothing(one_browser, tmp_path):
    paths = hostile_campaign(tmp_path / "results")
    made = write_report(paths, [paths[0].parent], ("html",), tmp_path)
    one_browser.resize(1600)
    one_browser.open(made.files[0])
    one_browser.run("for (const one of document.querySelectorAll('details')) one.open = true")
    one_browser.one("#table-throughput th button").click()
    one_browser.one("#filter-throughput").send_keys("script")
    assert one_browser.run("return window.hacked === undefined")
    assert one_browser.console() == []
    assert [a for a in one_browser.requests() if a.startswith("http")] == []
    assert len(one_browser.all("script")) == 1
    assert one_browser.all("img") == []
    assert len(one_browser.all("#notes li")) > 3
    assert one_browser.run("return document.documentElement.scrollWidth <= window.innerWidth")


def test_link_that_was_followed_last_opens_its_box_again(one_browser, tmp_path):
    # Only a change of the hash was listened to, and the same link changes none.
    paths = [report_run(tmp_path / "results")]
    made = write_report(paths, [], ("html",), tmp_path)
    one_browser.resize(1600)
    one_browser.open(made.files[0])
    follow = "document.querySelector('td a[href^=\"#run-\"]').click()"
    box = "document.querySelector('.box')"
    opens = "const done = arguments[0]; setTimeout(() => done(%s.open), 200)"
    for _ in range(2):
        one_browser.run(follow)
        assert one_browser.driver.execute_async_script(opens % box)
        one_browser.run(f"{box}.open = false")
