"""Does a measurement beside other programs show, and a quiet machine of two cores not?"""

from __future__ import annotations

import pytest

from hires.bench import bench_noise, sweep
from hires.bench.bench_noise import ProgramCounter, disturbance, noise_facts
from hires.bench.message_race import BenchCell
from hires.bench.sweep import left_s
from tests.helpers.bench_rows import row


def rows(others, noises=(0.05,) * 10):
    cells = [row("all_reduce", 64 << i, {"shm": 1.0}, noise=n) for i, n in enumerate(noises)]
    return [{**cell, "other_programs": others} for cell in cells]


def test_other_programs_count_where_ranks_lack_cores():
    assert "23 other programs at a time shared 2 cores with 2 ranks" in disturbance(rows(23.0), 2)
    assert disturbance(rows(23.0), 64) == ""
    assert disturbance(rows(0.5), 2) == ""  # what belongs to the ranks of a quiet machine


def test_noise_of_some_cells_shows_beside_a_small_median():
    # 3 of 20 cells are garbage: the median is 4 %.
    noisy = rows(0.0, (0.04,) * 17 + (0.6,) * 3)
    assert "a tenth of all medians of rounds differ by 60 % or more" in disturbance(noisy, 2)
    text, why = noise_facts(noisy, 5)
    assert "differ by 4.0 %, in a tenth of the cells by 60.0 % or more" in text
    assert "DISTURBED" in why
    # As on a quiet machine of two cores: 5 % in the middle, 23 % in a tenth.
    assert noise_facts(rows(0.4, (0.05,) * 17 + (0.23,) * 3), 5)[1:] == []


def test_few_rounds_are_named():
    assert "3 rounds hide a disturbed one, use --rounds 5" in noise_facts(rows(0.0), 3)[0]


@pytest.mark.parametrize(("text", "expected"), [("9 9 9 6/126 22\n", 3.0), ("1 1 1 2/9 3\n", 0.0)])
def test_ranks_and_this_program_are_no_others(tmp_path, monkeypatch, text, expected):
    (tmp_path / "loadavg").write_text(text)
    monkeypatch.setattr(bench_noise, "_LOAD", tmp_path / "loadavg")
    monkeypatch.setattr(bench_noise, "PERIOD_S", 0.001)
    with ProgramCounter() as programs:
        assert programs.others(2) == expected
        assert programs.others(2) == expected


def test_system_without_a_count_gives_its_load(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_noise, "_LOAD", tmp_path / "none")
    monkeypatch.setattr(bench_noise.os, "getloadavg", lambda: (5.5, 1.0, 1.0))
    assert ProgramCounter().others(2) == 3.5


def test_cell_is_shown_only_once_it_is_kept(monkeypatch, caplog):
    # Ctrl-C after "1 of 2" must not lose that cell.
    caplog.set_level("INFO")
    cells = [BenchCell("all_reduce", size) for size in (64, 4096)]
    made = [row("all_reduce", cell.num_bytes, {"shm": 1.0}) for cell in cells]
    monkeypatch.setattr(sweep, "stream_started_ranks", lambda *args, **options: iter(made))
    rows, shown = [], []
    for _ in sweep.sweep(sweep.WorldOptions(start="torchrun"), cells, ["shm"], rows):
        shown.append((len(rows), len(caplog.records)))
    assert shown == [(1, 0), (2, 1)]
    assert "1 of 2: all_reduce 64 B" in caplog.text


def test_start_of_the_ranks_is_no_part_of_what_is_left():
    # 10 s until the first cell, 2 s for each one after it.
    assert left_s(10.0, 10.0, 1, 5) is None
    assert left_s(12.0, 10.0, 2, 5) == 6.0
    assert left_s(18.0, 10.0, 5, 5) == 0.0
