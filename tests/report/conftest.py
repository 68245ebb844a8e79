"""A campaign in which every plot has something to show; no test changes it."""

from __future__ import annotations

import pytest

from hires.report import tables
from tests.helpers.report_runs import sized_campaign


@pytest.fixture(scope="session")
def sized_paths(tmp_path_factory):
    """The folders of its runs."""
    return sized_campaign(tmp_path_factory.mktemp("sized") / "results")


@pytest.fixture(scope="session")
def campaign(sized_paths):
    """Its frames."""
    return tables.load(sized_paths)
