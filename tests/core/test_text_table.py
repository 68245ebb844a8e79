"""Are cells set in columns, whatever they hold?"""

from __future__ import annotations

from hires.core.text_table import aligned


def test_columns_of_numbers_are_flush_right_unless_the_sides_are_given():
    rows = [("rank", "MiB"), ("0", "9"), ("1", "12")]
    assert aligned(rows) == ["rank  MiB", "   0    9", "   1   12"]
    assert aligned(rows, "lr") == ["rank  MiB", "0       9", "1      12"]


def test_cell_of_several_lines_takes_several_lines():
    rows = [("point", "reason"), ("3", "too many\nranks"), ("4", "none")]
    assert aligned(rows, "rl", " | ") == [
        "point | reason",
        "    3 | too many",
        "      | ranks",
        "    4 | none",
    ]


def test_no_rows_are_no_lines():
    assert aligned([]) == []
