"""Is a sweep told in lines where it is logged, and in bars on a terminal?"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from hires.cli.screens import progress
from hires.cli.screens.progress import SweepProgress, show_planning
from hires.core.config.run_config import RunConfig
from hires.launcher.attempt_queue import Ended
from hires.launcher.interface import FrozenRun

PATH = Path("results/default/one-0123abcd")
TASK = FrozenRun(PATH, ("hires", "run"), RunConfig(steps=4))
STEP = {"kind": "step", "rank": 0, "step": 0, "step_s": 0.5, "loss": 1.0}


class Screen(io.StringIO):
    """Text that a terminal or a file would get."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: terminal  # type: ignore[method-assign]


def told(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> str:
    screen = Screen(terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    assert list(show_planning("ab")) == ["a", "b"]
    with SweepProgress(2) as bars:
        bars.started(TASK, 0)
        bars.line(TASK, STEP)
        bars.ended(Ended(TASK, 0, "failed", "rank 0 is [gone]", 2.0))
        bars.ended(Ended(TASK, None, "failed", "runs already"))
    return screen.getvalue()


def test_points_that_take_long_are_named_with_what_is_done(monkeypatch, capsys):
    begun: list[str] = []
    monkeypatch.setattr(progress, "_PLANNING_EVERY_S", -1.0)
    assert list(show_planning("ab", lambda point: f"layout {point}", begun.append)) == ["a", "b"]
    assert "planning point 2 of 2: layout b" in capsys.readouterr().err
    assert begun == ["point 1 of 2: ", "point 2 of 2: ", ""]


def test_file_gets_one_line_for_each_start_and_end(monkeypatch):
    lines = told(monkeypatch, terminal=False).splitlines()
    assert lines[0] == "one-0123abcd a0: started"
    assert lines[1] == "[1/2] one-0123abcd a0: failed, 2.00 s: rank 0 is [gone]"
    assert lines[2].endswith("logs: results/default/one-0123abcd/a0/logs")
    assert lines[3].startswith("[2/2] one-0123abcd: failed")
    assert len(lines) == 4


def test_terminal_gets_bars_below_the_lines(monkeypatch):
    text = told(monkeypatch, terminal=True)
    assert "planning point 1 of 2" in text
    assert "[1/2] one-0123abcd a0: failed" in text
    assert "rank 0 is [gone]" in text
    assert "attempts" in text
