"""The page works in a browser, in any width, light and dark, without a network."""

from __future__ import annotations

import itertools
import socket

import pytest

from hires.core.store import campaign
from hires.core.store.campaign import Campaign, ExcludedPoint
from hires.report.report import write_report
from hires.report.tables import load
from tests.helpers.browser import browser
from tests.helpers.hostile import hostile_campaign
from tests.helpers.patience import until
from tests.helpers.report_runs import report_run, sized_campaign

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

ENTER, ESCAPE = "\ue007", "\ue00c"
"""Keys, by their numbers in the protocol of WebDriver."""
_REACH_OUT = """
fetch(arguments[0] + '/x').catch(() => {});
new Image().src = arguments[0] + '/y.png';
const s = document.createElement('script'); s.textContent = 'window.inserted = 1';
document.body.append(s);
"""
_OPEN = "for (const one of document.querySelectorAll('details')) one.open = true"
_FITS = "return document.documentElement.scrollWidth <= window.innerWidth"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a campaign in which every plot has something to show."""
    folder = tmp_path_factory.mktemp("page")
    paths = sized_campaign(folder / "results")
    paths += [report_run(folder / "results", name, image=[64, 64]) for name in ("sp grid", "dp")]
    excluded = [ExcludedPoint(["image=999"], "rank 0 needs more [memory.limit]")]
    campaign.write(paths[0].parent, Campaign("a", excluded=excluded))
    return write_report(load(paths, [paths[0].parent]), ("html",), folder / "report").files[0]


@pytest.fixture(scope="module")
def one_browser():
    with browser() as opened:
        yield opened


@pytest.fixture
def opened(one_browser, page):
    """The browser with the page opened afresh, 1600 pixels wide."""
    one_browser.resize(1600)
    one_browser.open(page)
    return one_browser


def column(opened, table, name):
    """Returns the place of a column, and the texts of its rows that are shown."""
    texts = (" ".join(head.text.split()) for head in opened.all(f"#table-{table} th button"))
    place = [text.split(" [")[0] for text in texts].index(name) + 1
    rows = opened.all(f"#table-{table} tbody tr")
    cells = opened.all(f"#table-{table} tbody tr td:nth-child({place})")
    return place, [cell.text for cell, row in zip(cells, rows, strict=True) if row.is_displayed()]


def test_page_asks_for_nothing_and_cannot_reach_out_even_if_it_would(opened, page):
    opened.run("window.scrollTo(0, document.body.scrollHeight)")
    assert opened.console() == []
    addresses = [a for a in opened.requests() if not a.startswith("data:")]
    assert addresses == [page.as_uri()]
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(2)
        opened.run(_REACH_OUT, f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(TimeoutError):
            server.accept()
    assert opened.run("return window.inserted === undefined")
    messages = opened.console()
    assert messages
    assert all("Content Security Policy" in line for line in messages)


def test_plots_have_the_colours_of_the_reader_and_everything_has_a_name(opened):
    assert len(opened.all("figure")) >= 10
    for control in opened.all("input, button, [role=img], [role=region], figure"):
        assert control.accessible_name.strip(), control.get_attribute("outerHTML")[:200]
    levels = [int(head.tag_name[1]) for head in opened.all("h1, h2, h3")]
    assert (levels[0], levels.count(1)) == (1, 1)
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = opened.run(ground)
    opened.resize(1600, dark=True)
    assert opened.run(ground) != light
    ink = "return getComputedStyle(document.querySelector('.plot svg text')).fill"
    assert opened.run(ink) == "rgb(236, 236, 234)"
    opened.resize(400)
    opened.run(_OPEN)
    assert opened.run(_FITS)
    assert len(opened.driver.execute_cdp_cmd("Page.printToPDF", {})["data"]) > 100_000


def test_tables_are_sorted_by_click_and_keyboard_and_filtered(opened):
    place, before = column(opened, "throughput", "median")
    head = opened.one(f"#table-throughput th:nth-child({place})")
    button = head.find_element("tag name", "button")
    for direction, order in (("ascending", 1), ("descending", -1)):
        button.click()
        assert column(opened, "throughput", "median")[1] == sorted(before, key=float)[::order]
        assert head.get_attribute("aria-sort") == direction
    place, before = column(opened, "throughput", "image")
    opened.one(f"#table-throughput th:nth-child({place}) button").send_keys(ENTER)
    by_number = sorted(before, key=lambda text: int(text.split("x")[0]))
    assert column(opened, "throughput", "image")[1] == by_number
    place, _ = column(opened, "precision", "error of first")
    button = opened.one(f"#table-precision th:nth-child({place}) button")
    for _ in range(2):  # what is not known comes last either way
        button.click()
        assert column(opened, "precision", "error of first")[1][-1] == "-"
    every = column(opened, "memory", "layout")[1]
    field = opened.one("#filter-memory")
    field.send_keys("SP+GEMS 64x64")
    assert column(opened, "memory", "layout")[1] == ["sp+gems"] * 4
    assert opened.one("[data-table=memory] .rows").text == f"4 of {len(every)} rows"
    field.send_keys(ESCAPE)
    assert column(opened, "memory", "layout")[1] == every


def test_boxes_of_runs_are_filtered_and_opened_by_keyboard_and_by_links(opened):
    assert "infeasible" in opened.one("#table-planned").text
    field = opened.one("#filter-boxes")
    field.send_keys("failed nan")
    [box] = [box for box in opened.all(".box") if box.is_displayed()]
    box.find_element("tag name", "summary").send_keys(ENTER)
    assert "the loss is" in box.text
    field.send_keys(ESCAPE)
    link = opened.one("#table-throughput tbody a")
    box = opened.one(f"#{link.get_attribute('href').rpartition('#')[2]}")
    for _ in range(2):  # only a change of the hash was listened to, and the same link changes none
        assert box.get_attribute("open") is None
        opened.run("arguments[0].click()", link)
        until(lambda: box.get_attribute("open") is not None, "the box")
        assert link.get_attribute("title") in box.text
        opened.run("arguments[0].open = false", box)


def test_hostile_runs_execute_nothing(one_browser, tmp_path):
    paths = hostile_campaign(tmp_path / "results")
    made = write_report(load(paths, [paths[0].parent]), ("html",), tmp_path)
    one_browser.resize(1600)
    one_browser.open(made.files[0])
    one_browser.run(_OPEN)
    one_browser.one("#table-throughput th button").click()
    one_browser.one("#filter-throughput").send_keys("script")
    assert one_browser.run("return window.hacked === undefined")
    assert one_browser.console() == []
    assert [a for a in one_browser.requests() if a.startswith("http")] == []
    assert len(one_browser.all("script")) == 1
    assert one_browser.all("img") == []
    assert len(one_browser.all("#notes li")) > 3
    assert one_browser.run(_FITS)
