"""Does ``hires report`` take what a person types, and say what came of it?"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.helpers.report_runs import report_run
from tests.helpers.run_folders import begin, end, make_run


@pytest.fixture
def run(hires):
    return report_run(Path("results"), "pp")


def test_report_of_all_campaigns_is_a_page_and_its_files(hires, run):
    answer = hires("report")
    assert answer.code == 0, answer.err
    assert answer.out.splitlines()[-1].endswith("open report/index.html")
    assert "not drawn: " in answer.out
    assert Path("report/tables/throughput.csv").is_file()
    assert Path("report/plots/timeline.svg").is_file()


def test_formats_are_those_that_are_asked_for(hires, run):
    answer = hires("report", run.name[-8:], "--format", "tex,png", "--out", "paper", "--json")
    files = [Path(name) for name in json.loads(answer.out)["files"]]
    assert {file.suffix for file in files} == {".tex", ".png"}
    assert all(file.is_file() and file.parts[0] == "paper" for file in files)


def test_json_tells_what_was_not_drawn(hires, run):
    told = json.loads(hires("report", "default", "--format", "html", "--json").out)
    assert told["runs"] == 1
    assert any(line.startswith("Precision against error: ") for line in told["not_drawn"])


def test_unknown_format_is_answered_with_the_nearest(hires, run):
    answer = hires("report", "--format", "htm")
    assert answer.code == 2
    assert "did you mean html?" in answer.err


def test_nothing_to_report_says_where_it_looked(hires):
    answer = hires("report", "--results", "elsewhere")
    assert answer.code == 2
    assert "elsewhere" in answer.err


def test_folder_that_cannot_be_written_is_named(hires, run):
    Path("taken").write_text("")
    answer = hires("report", "--out", "taken")
    assert answer.code == 2
    assert "taken" in answer.err
    assert "--out DIR" in answer.err


def test_points_are_those_of_whole_campaigns(hires, run):
    report_run(Path("results"), "single")
    points = [{"run": path.name, "overrides": []} for path in run.parent.iterdir()]
    (run.parent / "campaign.json").write_text(json.dumps({"points": points}))
    table = Path("report/tables/points.csv")
    assert hires("report", "default", "--format", "csv").code == 0
    assert table.read_text().count("done") == 2
    # The other run of the campaign is not looked at, so nobody knows how it is; the table goes.
    assert hires("report", str(run), "--format", "csv").code == 0
    assert not table.exists()


def test_campaign_of_excluded_points_alone_has_a_report(hires):
    Path("results/none").mkdir(parents=True)
    excluded = {"overrides": ["image=9"], "reason": "too small"}
    Path("results/none/campaign.json").write_text(json.dumps({"excluded": [excluded]}))
    for name in (["none"], ["results/none"], []):
        assert hires("report", *name, "--format", "csv,html").code == 0
        assert "too small" in Path("report/tables/points.csv").read_text()


def test_deeply_nested_campaign_is_a_note(hires, run):
    (run.parent / "campaign.json").write_text('{"points": ' + "[" * 100_000)
    answer = hires("report", "--format", "csv")
    assert answer.code == 0
    assert "campaign.json" in answer.out


def test_run_that_left_no_word_is_looked_after(hires):
    begin(make_run(Path("results")), pid=2**22 + 1)
    assert hires("report", "--format", "csv").code == 0
    assert "lost" in Path("report/tables/failures.csv").read_text()


def test_run_that_is_tried_again_is_no_failure_yet(hires):
    run = make_run(Path("results"))
    end(begin(run), "failed", reason="nan", cause="the loss is nan")
    begin(run, 1)
    assert hires("report", "--format", "csv").code == 0
    [row] = csv.DictReader(Path("report/tables/failures.csv").read_text().splitlines())
    assert (row["state"], row["attempt"], row["reason"]) == ("running", "0", "nan")


@pytest.mark.slow
def test_report_needs_no_torch(python, tmp_path):
    report_run(tmp_path / "results", "sp+gems")
    script = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from hires.cli.main import main\n"
        "sys.exit(main(['report', '--format', 'all']))\n"
    )
    answer = python("-c", script)
    assert answer.code == 0, answer.err
