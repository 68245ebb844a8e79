"""Does a column that is declared once appear wherever its table does?"""

from __future__ import annotations

import json

from hires.report import frames, tables
from hires.report.columns import MEMORY, SPEED, keys
from hires.report.summaries import summaries
from tests.helpers.report_runs import report_run


def test_columns_of_throughput_and_memory_stand_in_every_table_and_frame(tmp_path):
    run = report_run(tmp_path)
    record = json.loads((run / "record.json").read_text())
    own = {table.name: keys(table.columns) for table in tables.tables(record)}
    held = frames.load([run])
    page = {summary.name: keys(summary.columns) for summary in summaries(held)}
    for name, columns in (("throughput", keys(SPEED)), ("memory", keys(MEMORY))):
        assert set(columns) <= set(own[name])
        known = {
            key for key in columns if held.attempts.get(key, held.memory.get(key)).notna().any()
        }
        assert known <= set(page[name])
    assert set(keys(SPEED)) <= set(held.attempts.columns) & set(held.runs.columns)
    assert set(keys(MEMORY)) <= set(held.memory.columns)


def test_record_of_another_type_is_a_missing_value():
    record = {"throughput": {"img_per_s": ["fast"]}, "memory": [{"rank": -1, "stage": {"a": 1}}, 7]}
    assert set(tables.tables(record)[0].rows[0]) == {None}
    [row] = tables.tables(record)[1].rows
    assert set(row) == {None, "(dict)"}
