"""Are cells set in columns, whatever they hold?"""

from __future__ import annotations

import pytest

from hires.core.text_table import aligned, columns_of, fitted, folded, shortened


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


def test_letters_of_two_columns_and_of_none_are_set_straight():
    lines = aligned([("name", "n"), ("\u753b\u50cf", "1"), ("cafe\u0301", "2")], "ll")
    assert [columns_of(line.rstrip("n12")) for line in lines] == [6, 6, 6]


@pytest.mark.parametrize("width", range(4, 40))
@pytest.mark.parametrize(
    "text", ["resnet50-sp-fp32-0123abcd", "the loss is nan again", "\u753b" * 30]
)
def test_shortened_text_fits(text, width):
    short = shortened(text, width)
    assert columns_of(short) <= width
    assert short == text or "..." in short


def test_columns_go_before_texts_get_too_short_and_numbers_stay_whole():
    rows = [("run", "note", "img/s"), ("a" * 30, "b" * 30, "1234.5")]
    assert fitted(rows, None, "llr").rows == [list(row) for row in rows]
    fit = fitted(rows, 60, "llr")
    assert (fit.lost, fit.is_whole, fit.needs) == ([], False, 70)
    assert sum(map(len, fit.rows[1])) + 4 == 60
    assert fit.rows[1][2] == "1234.5"
    fit = fitted(rows, 30, "llr", keep=[2])
    assert (fit.places, fit.lost) == ([0, 2], [1])


def test_last_column_is_folded():
    assert folded([("a", "one two three four five")], 20) == [["a", "one two three\nfour five"]]
    assert folded([("a", "b " * 50)], None) == [["a", "b " * 50]]
