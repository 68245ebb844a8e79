"""Pages of real runs, and a browser that opens them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.helpers.browser import Browser, browser

RUN = ("model=resnet18", "batch=4", "steps=4", "measure.warmup=1", "campaign=real")
TIMEOUT_S = 900
"""Of one command line; sixteen small runs take two or three minutes on two cores."""


def hires(folder: Path, *words: str) -> int:
    """Runs one command line of hires in a folder and returns its exit code."""
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "hires", *words]
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, check=False, timeout=TIMEOUT_S
    )
    return done.returncode


@pytest.fixture(scope="session")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder in which sixteen real runs were made; some of them failed."""
    folder = tmp_path_factory.mktemp("real")
    layouts = "parallel=single,sp,pp,sp+pp"
    # Two points fail: deep stages leave one value per channel at 32x32.
    assert hires(folder, "sweep", *RUN, "image=32,48", layouts, "precision=fp32") == 1
    assert hires(folder, "sweep", *RUN, "image=32", "parallel=single,sp", "precision=bf16") == 0
    assert hires(folder, "sweep", *RUN, "image=32", "parallel=sp+gems,dp", "task=train,infer") == 0
    # These fail: a learning rate that makes the loss no number.
    assert hires(folder, "sweep", *RUN, "image=32", "parallel=single,pp", "optimizer.lr=1e30") == 1
    # And these cannot run at all.
    limits = ("image=64,96", "parallel=single,pp", "memory.limit=100MiB")
    assert hires(folder, "sweep", *RUN, *limits) in (0, 3)
    return folder


@pytest.fixture(scope="session")
def page(campaign: Path) -> Path:
    """Returns the page of the campaign."""
    assert hires(campaign, "report", "real") == 0
    return campaign / "report" / "index.html"


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
