"""Ratios of rows: of images, not of steps, and of the fullest rank's memory."""

from __future__ import annotations

from typing import Any

from hires.bench.layouts_table import ratio_cells, row_ratios


def row(name: str, images: int, seconds: list[float], *peaks: int) -> dict[str, Any]:
    """Returns a row of the table of layouts."""
    memory = [{"measured_bytes": peak, "predicted_bytes": peak} for peak in peaks] or None
    measured = {"images": images, "samples_s": seconds, "memory": memory}
    return {"name": name, "not_run": "", **measured}


def test_twice_the_images_in_twice_the_time_is_equal():
    [found] = row_ratios([row("gems", 2, [2.0, 4.0]), row("lp", 1, [1.0, 2.0])])
    assert found["ratio"] == "GEMS over LP"
    assert found["images_per_s"] == {"median": 1.0, "p10": 1.0, "p90": 1.0, "count": 2}
    assert found["peak_bytes"] is None
    assert [*ratio_cells(found).values()][1:3] == ["1.00 (1.00-1.00)", "-"]


def test_memory_is_that_of_the_fullest_rank():
    rows = [row("sp+gems", 2, [1.0], 1 << 20, 4 << 20), row("sp+lp", 1, [1.0], 2 << 20, 1 << 20)]
    [found] = row_ratios(rows)
    assert found["images_per_s"]["median"] == 2.0
    assert [*ratio_cells(found).values()][2:] == [
        "2.00 (4 / 2 MiB)",
        "up to 2.5 and 2.0 (Figures 3.15, 3.16)",
    ]


def test_pair_of_which_one_row_was_not_measured_is_left_out():
    assert row_ratios([row("sp+gems", 2, [1.0])]) == []
