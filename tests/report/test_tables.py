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
from hires.report.columns import MEMORY, SPEED, Column, Table, keys, memory_rows, safe_csv
from hires.report.summaries import encoded, latex_text, markdown_text, summaries

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
## Memory

| rank | replica | stage | tile | peak [MiB] | predicted [MiB] | error [%] | measured by \
| parameters [MiB] | gradients [MiB] | optimiser [MiB] |
| ---: | ------: | ----- | ---- | ---------: | --------------: | --------: | ----------- \
| ---------------: | --------------: | --------------: |
|    0 |       0 | 0     | 0,1  |     1536.0 |          1024.0 |     -33.3 | rss         \
|              3.0 |             2.0 |               - |
|    1 |       - | -     | -    |          - |               - |         - | -           \
|                - |               - |               - |
"""


def test_tables_of_a_run_are_these():
    throughput, memory = tables.tables(record(layout="a|b"))
    assert throughput.to_markdown() == THROUGHPUT_MD
    assert memory.to_markdown() == MEMORY_MD
    row = next(csv.DictReader(io.StringIO(throughput.to_csv())))
    assert (row["img_per_s_median"], row["image"], row["layout"]) == ("12.3456", "75x61", "a|b")
    entries = [{"tile": [0, 2]}, {"tile": [[1, 0], None]}, {"tile": [None, None]}]
    tiles = [row["tile"] for row in memory_rows({"memory": entries})]
    assert tiles == ["0 / 2", "1,0 / none", None]  # in both directions


def test_tables_are_written_for_runs_that_are_done_by_a_module_that_is_a_command(tmp_path):
    for state in ("failed", "cancelled"):
        assert tables.write(tmp_path / state, record(state=state)) == []
    with pytest.raises(RunError, match=r"cannot write .*throughput\.csv"):
        tables.write(tmp_path / "gone", record())
    assert tables.main([str(tmp_path)]) == 1  # no attempt has ended
    # As launch.sh calls it: a module without its last lines does nothing and says nothing.
    (tmp_path / "record.json").write_text(json.dumps(record()))
    command = [sys.executable, "-m", "hires.report.tables", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    written = [(tmp_path / f"{name}.md").read_text() for name in ("throughput", "memory")]
    assert done.stdout == "\n".join(written)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".csv"}


def test_tables_of_a_campaign_hold_every_complete_attempt(tmp_path):
    def point(name, *words, attempts=1, repeat=1):
        for attempt in range(attempts):
            folder = tmp_path / name / f"a{attempt}"
            folder.mkdir(parents=True)
            (folder / "exit.json").write_text('{"state": "done"}')
            (folder / "record.json").write_text(json.dumps(record(attempt=attempt)))
        return PlannedPoint(name, list(words), repeat)

    def tables_of(*points):
        return tables.campaign_tables(tmp_path, Campaign("c", points=list(points)))

    one = point("x-0000000a", "batch=4", "image=64", "parallel.stages=2")
    other = point("x-0000000b", "batch=4", "image=64", "parallel.stages=3")
    throughput, memory = tables_of(one, other)
    # What no other column shows is in the table.
    both = [["0000000a", "parallel.stages=2"], ["0000000b", "parallel.stages=3"]]
    assert [row[:2] for row in throughput.rows] == both
    assert [row[0] for row in memory.rows] == ["0000000a"] * 2 + ["0000000b"] * 2
    [throughput, _] = tables_of(point("x-0000000c", "image=64", attempts=4, repeat=3))
    assert [row[:2] for row in throughput.rows] == [["0000000c", n] for n in (1, 2, 3)]
    (tmp_path / "x-0000000b/a0/exit.json").write_text('{"state": "failed"}')
    throughput, memory = tables_of(one, other, PlannedPoint("x-0000000d", []))
    assert len(throughput.rows) == 1
    assert tables_of(other) == []


COLUMNS = [
    Column("run", "run"), Column("x_bytes", "x", "KiB", 1 / 1024, 1), Column("reproduce", "r"),
]  # fmt: skip


def table(text, again="hires run a=b"):
    rows = [[text, 2048, again], ["other", None, again]]
    frame = pd.DataFrame(rows, columns=[column.key for column in COLUMNS])
    return Table("name", "Title", COLUMNS, rows, "Caption.", "none", frame)


def test_tables_of_a_report_have_units_and_a_line_that_makes_each_row_again(campaign):
    tables = {table.name: table for table in summaries(campaign)}
    for name in ("throughput", "memory", "communication", "messages", "precision"):
        assert tables[name].rows
        assert all(str(row[-1]).startswith("hires run ") for row in tables[name].rows)
        heads = [c.heading for c in tables[name].columns if c.key.endswith(("_bytes", "_s"))]
        assert all("[" in heading for heading in heads)
    assert {*keys(SPEED)} <= {*campaign.attempts.columns} & {*campaign.runs.columns}
    assert {*keys(MEMORY)} <= {*campaign.memory.columns}
    throughput = tables["throughput"]
    read = pd.read_parquet(io.BytesIO(encoded(throughput, "parquet")))
    assert list(read.columns) == list(keys(throughput.columns))
    assert (read["img_per_s_median"].dtype.kind, read["ranks"].dtype.kind) == ("f", "i")
    assert len(read) == len(throughput.rows)


FORMULAS = ["=cmd()", "+1", "@x", "\t=x", "-1+cmd()", "-x", "-(1)", "--1", "-1 ", "- / 1,0+x()"]
TEXTS = ["-", "-1", "-2.5", "-1e-5", "-5%", "- / 1,0", "0,1 / -", "none / 1,0", "a=1", 'a,"b"']


def test_csv_holds_no_formula_and_leaves_other_texts_as_they_are():
    for texts, sign in ((FORMULAS, "'"), (TEXTS, "")):
        for text in texts:
            head, first, second = csv.reader(io.StringIO(safe_csv(table(text))))
            assert head == ["run", "x_bytes", "reproduce"]
            assert first == [f"{sign}{text}", "2048", "hires run a=b"]
            assert second[1] == ""


def test_markdown_holds_no_markup():
    text = markdown_text(table("<script>a|b`c*d_e[f]\\g&"))
    assert "&lt;script>a\\|b\\`c\\*d\\_e\\[f\\]\\\\g&amp;" in text
    assert "<" not in text
    assert "| x [KiB] |" in text


def test_latex_is_booktabs_with_everything_escaped():
    text = latex_text(table(r"50%_a&b#$^~{}\x<>|"))
    escaped = r"50\%\_a\&b\#\$\textasciicircum{}\textasciitilde{}\{\}\textbackslash{}x"
    assert escaped + r"\textless{}\textgreater{}\textbar{}" in text
    assert all(word in text for word in (r"\toprule", r"\begin{tabular}{lr}", "x [KiB]"))
    assert "% other: hires run a=b" in text
