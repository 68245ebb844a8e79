"""Is progress told once per step of the whole world, and never on standard output?"""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from hires.cli.screens.progress import StepProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(steps: int, world: int = 2):
    for step in range(steps):
        for rank in range(world):
            loss = 2.0 - step if rank else None
            yield {"kind": "step", "rank": rank, "step": step, "step_s": 0.5 + rank, "loss": loss}


@pytest.fixture(autouse=True)
def _stdout_stays_empty(capsys):
    yield
    assert capsys.readouterr().out == ""


def test_plain_lines_show_first_and_last_step_of_a_quick_run():
    stream = io.StringIO()
    with StepProgress(2, 6, 50, stream) as progress:
        for line in lines(50):
            progress(line)
    # The slowest rank decides: 6 images in 1.5 s.
    first, last = stream.getvalue().splitlines()
    assert first.startswith("step 1/50")
    assert "4 img/s" in first
    assert last.startswith("step 50/50")


def test_step_counts_when_every_rank_has_it():
    stream = io.StringIO()
    with StepProgress(2, 6, 3, stream) as progress:
        progress({"kind": "ready", "rank": 0})
        progress({"kind": "step", "rank": 0, "step": 0, "step_s": 0.5, "loss": None})
        assert stream.getvalue() == ""
        progress({"kind": "step", "rank": 1, "step": 0, "step_s": 0.5, "loss": 1.0})
        assert stream.getvalue().startswith("step 1/3")


def test_long_runs_get_fewer_lines(monkeypatch):
    clock = iter(range(0, 100_000, 5))  # a step takes five seconds
    own = SimpleNamespace(monotonic=lambda: float(next(clock)))
    monkeypatch.setattr("hires.cli.screens.progress.time", own)
    stream = io.StringIO()
    with StepProgress(1, 6, 2000, stream) as progress:
        for line in lines(2000, world=1):
            progress(line)
    assert 20 < len(stream.getvalue().splitlines()) < 150


def test_bar_on_a_terminal():
    stream = Terminal()
    with StepProgress(2, 6, 3, stream) as progress:
        for line in lines(3):
            progress(line)
    text = stream.getvalue()
    assert "3/3" in text
    assert "4 img/s" in text
