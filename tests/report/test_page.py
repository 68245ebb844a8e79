"""Is the page whole, closed to the network, and deaf to what runs say?"""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from hires.report.report import write_report
from tests.helpers.hostile import ATTACK, LONG, hostile_campaign
from tests.helpers.report_runs import report_run

WITHIN = ("#", "data:,", "data:image/png;base64,")
"""How a reference begins that fetches nothing."""
FORMATS = ("html", "csv", "md", "tex", "parquet")


class Seen(HTMLParser):
    """Tags with their attributes, in order."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def page_of(folder, paths):
    made = write_report(paths, [paths[0].parent], FORMATS, folder)
    return (folder / "index.html").read_text(encoding="utf-8"), made


@pytest.fixture(scope="module")
def good(tmp_path_factory, sized_paths):
    return page_of(tmp_path_factory.mktemp("good") / "out", sized_paths)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    return page_of(folder / "out", hostile_campaign(folder / "results"))


def test_page_holds_plots_tables_and_a_box_for_every_run(good):
    text, made = good
    seen = Seen(text)
    assert made.num_runs == 11
    assert made.notes == []
    assert sum(tag == "figure" for tag, _ in seen.tags) == 10
    assert sum(values.get("class") == "box" for _, values in seen.tags) == 11
    assert text.count("hires run parallel=") > 40
    assert "the loss is nan at step 2" in text
    assert "Not drawn, because it was not run or not recorded" in text


def test_policy_allows_the_own_script_and_no_network(good):
    text, _ = good
    [policy] = [
        values["content"]
        for tag, values in Seen(text).tags
        if tag == "meta" and values.get("http-equiv") == "Content-Security-Policy"
    ]
    [script] = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy


def test_ids_are_different_and_labels_lead_to_them(good):
    tags = Seen(good[0]).tags
    ids = [values["id"] for _, values in tags if "id" in values]
    assert len(ids) == len(set(ids))
    for _, values in tags:
        for key in ("aria-labelledby", "aria-controls", "for"):
            assert values.get(key, ids[0]) in ids


def test_hostile_runs_are_text(hostile):
    text, made = hostile
    assert made.notes
    tags = Seen(text).tags
    assert sum(tag == "script" for tag, _ in tags) == 1
    assert not any(tag in ("img", "a") and values.get("onerror") for tag, values in tags)
    assert not any(key.startswith("on") for _, values in tags for key in values)
    assert not any(str(v.get("href", "")).startswith("javascript") for _, v in tags)
    assert ATTACK not in text
    assert "49" not in re.findall(r"javascript:window.hacked=1.{0,40}", text)[0]
    assert LONG[:3000] not in text


def test_hostile_runs_leave_the_good_one_in_all_tables(hostile):
    text, made = hostile
    names = {path.name for path in made.files}
    assert {"index.html", "throughput.csv", "memory.tex", "communication.parquet"} <= names
    assert len(text) < 5_000_000
    for path in made.files:
        if path.suffix in (".md", ".tex", ".csv"):
            kept = path.read_text(encoding="utf-8")
            assert "\x1b" not in kept
            assert "\u202e" not in kept
            assert "\x00" not in kept
        if path.suffix == ".md":
            assert "<script" not in path.read_text(encoding="utf-8")


def test_report_of_a_pending_run_says_what_is_missing(tmp_path):
    run = report_run(tmp_path / "results")
    for path in sorted(run.rglob("*"), reverse=True):
        if path.name != "config.yaml":
            path.rmdir() if path.is_dir() else path.unlink()
    text, made = page_of(tmp_path / "out", [run])
    assert "No run is complete" in text
    assert len(made.left_out) == 16
