"""Does each format hold a table as it is, whatever stands in it?"""

from __future__ import annotations

import csv
import io

import pandas as pd
import pytest

from hires.report import frames
from hires.report.columns import Column, Table, memory_rows, safe_csv
from hires.report.summaries import encoded, latex_text, markdown_text, summaries
from tests.helpers.report_runs import sized_campaign

COLUMNS = [
    Column("run", "run"),
    Column("x_bytes", "x", "KiB", 1 / 1024, 1),
    Column("reproduce", "r"),
]


def table(text, again="hires run a=b"):
    rows = [[text, 2048, again], ["other", None, again]]
    frame = pd.DataFrame(rows, columns=[column.key for column in COLUMNS])
    return Table("name", "Title", COLUMNS, rows, "Caption.", "none", frame)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return summaries(frames.load(sized_campaign(tmp_path_factory.mktemp("results"))))


def test_all_tables_have_units_and_a_line_that_makes_each_row_again(made):
    assert [s.name for s in made] == [
        "throughput", "memory", "communication", "messages", "precision", "evaluations",
        "validations", "predictions", "failures", "points",
    ]  # fmt: skip
    for summary in made[:5]:
        assert summary.rows
        assert summary.columns[-1].key == "reproduce"
        assert all(str(row[-1]).startswith("hires run ") for row in summary.rows)
        heads = [c.heading for c in summary.columns if c.key.endswith(("_bytes", "_s"))]
        assert all("[" in heading for heading in heads)


def test_csv_has_plain_values_under_names_with_units():
    [head, first, second] = csv.reader(io.StringIO(safe_csv(table('a,"b"'))))
    assert head == ["run", "x_bytes", "reproduce"]
    assert first == ['a,"b"', "2048", "hires run a=b"]
    assert second[1] == ""


@pytest.mark.parametrize(
    "text",
    ["=cmd()", "+1", "@x", "\t=x", "-1+cmd()", "-x", "-(1)", "--1", "-1 ", "- / x", "- / 1,0+x()"],
)
def test_csv_holds_no_formula(text):
    rows = list(csv.reader(io.StringIO(safe_csv(table(text)))))
    assert rows[1][0] == f"'{text}"


@pytest.mark.parametrize(
    "text", ["-", "-1", "-2.5", "-1e-5", "-5%", "- / 1,0", "0,1 / -", "none / 1,0", "a=1", "'x"]
)
def test_csv_leaves_what_is_no_formula_as_it_is(text):
    rows = list(csv.reader(io.StringIO(safe_csv(table(text)))))
    assert rows[1][0] == text


def test_rank_without_a_tile_in_a_direction_has_none():
    entry = {"rank": 1, "tile": [None, [1, 0]], "stage": [0, 1]}
    nowhere = {"rank": 1, "tile": [None, None]}
    one, none = memory_rows({"memory": [entry, nowhere]})
    assert (one["tile"], one["stage"]) == ("none / 1,0", "0 / 1")
    assert none["tile"] is none["stage"] is None


def test_markdown_holds_no_markup():
    text = markdown_text(table("<script>a|b`c*"))
    assert "<script>" not in text
    assert "&lt;script>a\\|b\\`c\\*" in text
    assert "| x [KiB] |" in text
    assert "|     2.0 |" in text


def test_latex_is_booktabs_with_everything_escaped():
    text = latex_text(table(r"50%_a&b#$^~{}\x"))
    assert r"50\%\_a\&b\#\$\textasciicircum{}\textasciitilde{}\{\}\textbackslash{}x" in text
    assert [rule in text for rule in (r"\toprule", r"\midrule", r"\bottomrule")] == [True] * 3
    assert r"\begin{tabular}{lr}" in text
    assert r"\resizebox{\linewidth}{!}{%" in text
    assert r"\end{tabular}}" in text
    assert r"\usepackage{graphicx}" in text.splitlines()[0]
    assert r"x [KiB]" in text
    assert "% other: hires run a=b" in text


def test_parquet_gives_back_types(made):
    read = pd.read_parquet(io.BytesIO(encoded(made[0], "parquet")))
    assert list(read.columns) == [column.key for column in made[0].columns]
    assert read["img_per_s_median"].dtype.kind == "f"
    assert read["ranks"].dtype.kind == "i"
    assert len(read) == len(made[0].rows)


def test_points_without_a_result_come_first():
    words = {"campaign": "c", "overrides": "a=1", "reproduce": "hires run a=1"}
    states = ("done", "pending", "failed", "infeasible", "done")
    found = frames.load([])
    found.planned = pd.DataFrame(
        [{**words, "run": str(n), "state": state} for n, state in enumerate(states)],
        columns=["campaign", "run", "state", "overrides", "reason", "nearest", "reproduce"],
    )
    points = summaries(found)[-1].frame
    assert list(points["run"]) == ["3", "2", "1", "0", "4"]
