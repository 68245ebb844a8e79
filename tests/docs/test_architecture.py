"""Is the page about the house still true of the tree?"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
WANTED = {
    *(
        "network",
        "operator",
        "layout",
        "schedule",
        "backend",
        "launcher",
        "cluster",
        "plot",
        "verb",
    ),
    *("loss", "image format", "table column", "config key", "comparison metric", "benchmark"),
}


def test_every_path_on_the_page_exists():
    paths = re.findall(r"`((?:hires|conf|launch|tests|docs|scripts|results)/[^`]*)`", TEXT)
    assert len(paths) > 60
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_every_package_is_described():
    packages = {path.parent.name for path in ROOT.glob("hires/*/__init__.py")}
    described = set(re.findall(r"^\| `hires/(\w+)` \|", TEXT, re.MULTILINE))
    assert described == packages


def test_what_can_be_added_is_in_the_table():
    rows = set(re.findall(r"^\| (?!to add)([\w ]+) \| .* \| `tests", TEXT, re.MULTILINE))
    assert rows >= WANTED


def test_page_is_one_page():
    assert len(TEXT.splitlines()) < 140
