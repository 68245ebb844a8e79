"""Is the page closed to the network, with all that good runs say and deaf to hostile ones?"""

from __future__ import annotations

import base64
import hashlib
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from hires.report.plots import style
from hires.report.plots.base import registered
from hires.report.report import write_report
from hires.report.tables import load
from tests.helpers.hostile import ATTACK, LONG, hostile_campaign
from tests.helpers.report_runs import report_run

FORMATS = ("html", "csv", "md", "tex", "parquet")


class Tags(HTMLParser):
    """Tags with their attributes, in order."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The files of a campaign with one good run, the page's text and its tags."""
    folder = tmp_path_factory.mktemp("hostile")
    paths = hostile_campaign(folder / "results")
    report = write_report(load(paths, [paths[0].parent]), FORMATS, folder / "out")
    text = (folder / "out" / "index.html").read_text(encoding="utf-8")
    return report, text, Tags(text).tags


def test_policy_allows_the_own_script_and_no_network(report):
    _, text, tags = report
    [policy] = [
        values["content"]
        for tag, values in tags
        if tag == "meta" and values.get("http-equiv") == "Content-Security-Policy"
    ]
    [script] = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy


def test_ids_are_different_and_references_lead_to_them(report):
    _, text, tags = report
    ids = [values["id"] for _, values in tags if "id" in values]
    assert len(ids) == len(set(ids))
    for _, values in tags:
        for key in ("aria-labelledby", "aria-controls", "for"):
            assert values.get(key, ids[0]) in ids
    drawings = re.findall(r"<svg .*?</svg>", text, re.DOTALL)
    assert len(drawings) == sum(tag == "figure" for tag, _ in tags) > 5
    for drawing in drawings:
        ET.fromstring(drawing)
        assert {*re.findall(r"(?:href=\"|url\()#([^\")]*)", drawing)} <= {*ids}
        assert "http:" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", drawing)
        assert style.INK not in drawing
        assert "currentColor" in drawing


def test_hostile_runs_are_text(report):
    made, text, tags = report
    assert made.notes
    assert sum(tag == "script" for tag, _ in tags) == 1
    assert not any(tag in ("img", "a") and values.get("onerror") for tag, values in tags)
    assert not any(key.startswith("on") for _, values in tags for key in values)
    assert not any(str(v.get("href", "")).startswith("javascript") for _, v in tags)
    assert ATTACK not in text
    assert "49" not in re.findall(r"javascript:window.hacked=1.{0,40}", text)[0]
    assert LONG[:3000] not in text
    assert len(text) < 5_000_000


def test_hostile_runs_leave_the_good_one_in_page_and_tables(report, tmp_path):
    made, text, tags = report
    assert made.num_runs == sum(values.get("class") == "box" for _, values in tags)
    assert "hires run parallel=sp image=" in text
    assert {"throughput.csv", "memory.tex", "communication.parquet"} <= {
        path.name for path in made.files
    }
    for path in made.files:
        if path.suffix in (".md", ".tex", ".csv"):
            kept = path.read_text(encoding="utf-8")
            assert not {"\x1b", "\u202e", "\x00"} & {*kept}
            assert path.suffix != ".md" or "<script" not in kept
    run = report_run(tmp_path / "results")  # one that has not begun
    for path in sorted(run.rglob("*"), reverse=True):
        if path.name != "config.yaml":
            path.rmdir() if path.is_dir() else path.unlink()
    pending = write_report(load([run], [run.parent]), ("html",), tmp_path / "out")
    assert "No run is complete" in pending.files[0].read_text(encoding="utf-8")
    assert len(pending.left_out) == len(registered())


def test_cause_of_a_failed_run_is_text(tmp_path):
    cause = "<img src=x onerror=a>"
    run = report_run(tmp_path / "results", state="failed", cause=cause, reason="nan")
    page = write_report(load([run], [run.parent]), ("html",), tmp_path / "out").files[0].read_text()
    assert "<img src=x" not in page
    assert "&lt;img src=x onerror=a&gt;" in page


def test_failure_of_a_campaign_links_to_its_own_run(tmp_path):
    # Both campaigns have a run of that name, and only one failed.
    failed = report_run(tmp_path / "results", campaign="before", state="failed", reason="nan")
    runs = [report_run(tmp_path / "results", campaign="after"), failed]
    page = write_report(load(runs), ("html",), tmp_path / "out").files[0].read_text()
    table = re.search(r'<table id="table-failures".*?</table>', page, re.DOTALL)[0]
    [box] = re.findall(r'href="#(run-\d+)"', table)
    card = re.search(rf'id="{box}".*?</summary>', page, re.DOTALL)[0]
    assert "failed" in card


def test_report_replaces_an_earlier_one_in_its_folder(tmp_path):
    run, out = report_run(tmp_path / "results"), tmp_path / "out"
    own = out / "tables" / "own.csv"
    write_report(load([run]), ("html", "csv"), out)
    own.write_text("a")
    write_report(load([run]), ("md",), out)
    names = {path.name for path in out.rglob("*") if path.is_file()}
    assert {"throughput.md", "memory.md", "own.csv"} <= names
    assert not {"index.html", "throughput.csv"} & names
