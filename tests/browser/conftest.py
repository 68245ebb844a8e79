"""The page of made runs, and a browser that opens it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hires.report.report import write_report
from tests.helpers.browser import Browser, browser
from tests.helpers.report_runs import report_run, sized_campaign


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the page of a campaign in which every plot has something to show."""
    folder = tmp_path_factory.mktemp("page")
    paths = sized_campaign(folder / "results")
    paths += [report_run(folder / "results", name, image=[64, 64]) for name in ("sp grid", "dp")]
    excluded = {"overrides": ["image=999"], "reason": "rank 0 needs more [memory.limit]"}
    (paths[0].parent / "campaign.json").write_text(json.dumps({"excluded": [excluded]}))
    made = write_report(paths, [paths[0].parent], ("html",), folder / "report")
    return made.files[0]


@pytest.fixture(scope="session")
def one_browser() -> Iterator[Browser]:
    """Starts one browser for all tests."""
    with browser() as opened:
        yield opened


@pytest.fixture
def opened(one_browser: Browser, page: Path) -> Browser:
    """Opens the page of the campaign afresh, 1600 pixels wide."""
    one_browser.resize(1600)
    one_browser.open(page)
    return one_browser
