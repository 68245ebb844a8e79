"""Tables of runs and campaigns hold the measured numbers with units, safely in every format."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from hires.core.errors import RunError
from hires.core.store.campaign import Campaign, PlannedPoint
from hires.report import tables
from hires.report.columns import TABLES, Column, Table, keys
from hires.report.record import RecordedRank, cells_of
from hires.report.report import write_report
from hires.report.tables import load
from tests.helpers.report_runs import change, report_run

ROOT = Path(__file__).parents[2]
SPREAD = {"median": 12.3456, "p10": 11.0, "p90": 13.0}


def record(**changes):
    rank = {"replica": 0, "stage": [0], "tile": [[0, 1]], "peak_bytes": 3 << 29, "source": "rss"}
    rank |= {"predicted_bytes": 1 << 30, "params_bytes": 3 << 20, "grads_bytes": 2 << 20}
    rank |= {"optimizer_bytes": None}
    nothing = {**dict.fromkeys(rank), "stage": [None], "tile": [None]}
    return {
        "state": "done", "cause": None, "model": "resnet50", "image": [75, 61], "layout": "sp",
        "precision": "bf16", "world": 2, "images_per_step": 8, "attempt": 0,
        "throughput": {"img_per_s": SPREAD, "step_s": SPREAD, "samples": 10},
        "memory": [{"rank": 0, **rank}, {"rank": 1, **nothing}],
        **changes,
    }  # fmt: skip


THROUGHPUT_MD = """\
## Throughput

| model    | image | layout | precision | ranks | images/step | median [img/s] | p10 [img/s] \
| p90 [img/s] | step median [s] | step p10 [s] | step p90 [s] | samples |
| -------- | ----- | ------ | --------- | ----: | ----------: | -------------: | ----------: \
| ----------: | --------------: | -----------: | -----------: | ------: |
| resnet50 | 75x61 | a\\|b   | bf16      |     2 |           8 |          12.35 |       11.00 \
|       13.00 |         12.3456 |      11.0000 |      13.0000 |      10 |
"""
MEMORY_MD = """\
## Memory per rank

| rank | replica | stage | tile | peak [MiB] | predicted [MiB] | error [%] | measured by \
| parameters [MiB] | gradients [MiB] |
| ---: | ------: | ----- | ---- | ---------: | --------------: | --------: | ----------- \
| ---------------: | --------------: |
|    0 |       0 | 0     | 0,1  |     1536.0 |          1024.0 |     -33.3 | rss         \
|              3.0 |             2.0 |
|    1 |       - | -     | -    |          - |               - |         - | -           \
|                - |               - |
"""


FACTORS = {
    "MiB": 2**-20,
    "MiB/step": 2**-20,
    "ms": 1e3,
    "ms/step": 1e3,
    "points": 100.0,
    "%": 100.0,
}


def test_numbers_are_shown_in_the_unit_of_their_heading():
    for table in TABLES.values():
        for column in table.all_columns:
            factor = FACTORS.get(column.unit, 1.0)
            is_percent = column.key.endswith("_percent")
            assert column.factor == (1.0 if is_percent else factor), (table.name, column.key)


def test_tables_of_a_run_are_these():
    throughput, memory = tables.tables_of_run(tables.record_of(record(layout="a|b")))
    assert throughput.to_markdown() == THROUGHPUT_MD
    assert memory.to_markdown() == MEMORY_MD
    row = next(csv.DictReader(io.StringIO(throughput.to_csv())))
    assert (row["img_per_s_median"], row["image"], row["layout"]) == ("12.3456", "75x61", "a|b")
    entries = ([0, 2], [[1, 0], None], [None, None])
    tiles = [cells_of(RecordedRank(0, tile=tile))["tile"] for tile in entries]
    assert tiles == ["0 / 2", "1,0 / none", None]  # in both directions
    bytes_of = [{"peak_bytes": 1, "predicted_bytes": 4}, {"peak_bytes": 3, "predicted_bytes": 2}]
    ranks = [{"rank": n, "grads_bytes": 0, **one} for n, one in enumerate(bytes_of)]
    whole = tables.record_of(record(memory=ranks))
    assert (whole.peak_bytes, whole.predicted_bytes) == (3, 4)  # of the fullest ranks
    assert whole.memory[0].grads_bytes is None  # before the first step


def test_tables_are_written_for_runs_that_are_done_by_a_module_that_is_a_command(tmp_path):
    for state in ("failed", "cancelled"):
        assert tables.write_run_tables(tmp_path / state, record(state=state)) == []
    with pytest.raises(RunError, match=r"cannot write .*throughput\.csv"):
        tables.write_run_tables(tmp_path / "gone", record())
    assert tables.main([str(tmp_path)]) == 1  # no attempt has ended
    # As launch.sh calls it: a module without its last lines does nothing and says nothing.
    (tmp_path / "record.json").write_text(json.dumps(record()))
    command = [sys.executable, "-m", "hires.report.tables", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    written = [(tmp_path / f"{name}.md").read_text() for name in ("throughput", "memory")]
    assert done.stdout == "\n".join(written)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".csv"}


def test_tables_of_a_campaign_hold_the_attempts_and_the_keys_in_which_they_differ(tmp_path):
    runs = [
        report_run(tmp_path, seed=n, optimizer={"lr": lr}, model={"depth": depth})
        for n, lr, depth in ((0, 0.5, 18), (1, 0.25, 34))  # a label has the depth already
    ]
    points = [PlannedPoint(run.name, [], 1) for run in runs] + [PlannedPoint("x-0000000d", [], 1)]
    campaign = Campaign("c", points=points)
    throughput, memory, *_ = tables.campaign_tables(runs[0].parent, campaign)
    rows = [dict(zip(keys(throughput.columns), row, strict=True)) for row in throughput.rows]
    assert [row["keys"] for row in rows] == ["optimizer.lr=0.5", "optimizer.lr=0.25"]
    assert [row["run"] for row in rows] == [run.name[-8:] for run in runs]
    assert len(memory.rows) == 2
    change(runs[0], state="failed")
    [throughput, *_] = tables.campaign_tables(runs[0].parent, campaign)
    assert len(throughput.rows) == 1
    assert tables.campaign_tables(tmp_path, Campaign("none")) == []


COLUMNS = [
    Column("run", "run"), Column("x_bytes", "x", "KiB", 1 / 1024, 1), Column("reproduce", "r"),
]  # fmt: skip


def table(text, again="hires run a=b"):
    rows = [[text, 2048, again], ["other", None, again]]
    return Table("name", "Title", COLUMNS, rows, "Caption.")


def test_tables_of_a_report_have_units_and_a_line_that_makes_each_row_again(
    campaign, sized_paths, tmp_path
):
    made = {table.name: table for table in tables.tables(campaign.found)}
    for name in ("throughput", "memory", "communication", "messages", "precision"):
        assert made[name].rows
        assert all(str(row[-1]).startswith("hires run ") for row in made[name].rows)
        heads = [c.heading for c in made[name].columns if c.key.endswith(("_bytes", "_s"))]
        assert all("[" in heading for heading in heads)
    throughput = made["throughput"]
    write_report(load(sized_paths), ("parquet",), tmp_path)
    read = pd.read_parquet(tmp_path / "tables/throughput.parquet")
    assert list(read.columns) == list(keys(throughput.columns))
    assert (read["img_per_s_median"].dtype.kind, read["ranks"].dtype.kind) == ("f", "i")
    assert len(read) == len(throughput.rows)


FORMULAS = ["=cmd()", "+1", "@x", "\t=x", "-1+cmd()", "-x", "-(1)", "--1", "-1 ", "- / 1,0+x()"]
TEXTS = ["-", "-1", "-2.5", "-1e-5", "-5%", "- / 1,0", "0,1 / -", "none / 1,0", "a=1", 'a,"b"']


def test_csv_holds_no_formula_and_leaves_other_texts_as_they_are():
    for texts, sign in ((FORMULAS, "'"), (TEXTS, "")):
        for text in texts:
            head, first, second = csv.reader(io.StringIO(table(text).to_csv()))
            assert head == ["run", "x_bytes", "reproduce"]
            assert first == [f"{sign}{text}", "2048", "hires run a=b"]
            assert second[1] == ""


def test_markdown_holds_no_markup():
    text = table("<script>a|b`c*d_e[f]\\g&").to_markdown()
    assert "&lt;script>a\\|b\\`c\\*d\\_e\\[f\\]\\\\g&amp;" in text
    assert "<" not in text
    assert "| x [KiB] |" in text


def test_latex_is_booktabs_with_everything_escaped():
    text = table(r"50%_a&b#$^~{}\x<>|").to_latex()
    escaped = r"50\%\_a\&b\#\$\textasciicircum{}\textasciitilde{}\{\}\textbackslash{}x"
    assert escaped + r"\textless{}\textgreater{}\textbar{}" in text
    assert all(word in text for word in (r"\toprule", r"\begin{tabular}{lr}", "x [KiB]"))
    assert "% other: hires run a=b" in text
