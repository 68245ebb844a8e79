"""Tests of the values that tables and plots take from files."""

from __future__ import annotations

from hires.report.read.plain_values import MAX_KEYS, count, dig, flat, number, value_text


def test_values_that_hold_each_other_a_billion_times_are_walked_a_little():
    values = {"x": 1, "y": 2}
    for _ in range(60):
        values = {"x": values, "y": values}
    assert len(flat(values)) <= MAX_KEYS


def test_numbers_are_finite_and_counts_are_whole():
    assert [number(v) for v in (1, 2.5, float("nan"), float("inf"), True, "3", None, 10**400)] == [
        1.0, 2.5, None, None, None, None, None, None,
    ]  # fmt: skip
    assert [count(v) for v in (0, 3.0, -1, 2.5, 2**63, False)] == [0, 3, None, None, None, None]


def test_way_through_what_is_not_there_is_none():
    assert dig({"a": [{"b": 1}]}, "a", 0, "b") == 1
    assert dig({"a": [1]}, "a", 5) is None
    assert dig("text", "a") is None


def test_values_are_spoken_as_one_types_them():
    assert [value_text(v) for v in (True, None, 2, 1.5, "x", [2, [1, 1]], {"a": 1})] == [
        "true", "null", "2", "1.5", "x", "[2,[1,1]]", "(dict)",
    ]  # fmt: skip
    assert value_text([[[[]]]]) == "[...]"
