"""Is each step of a row taken apart, and does it hold memory only in its turn?"""

from __future__ import annotations

from hires.bench import step_parts


def test_row_that_trims_runs_a_step_before_the_timed_one_and_then_holds_nothing(monkeypatch):
    done = []
    monkeypatch.setattr(step_parts.HiresSteps, "prepare", lambda self: done.append("prepare"))
    monkeypatch.setattr(step_parts.HiresSteps, "step", lambda self: done.append("step"))
    monkeypatch.setattr(step_parts, "message_log", lambda *of: done.append("log"))
    monkeypatch.setattr(step_parts, "give_back_memory", lambda: done.append("given back"))
    for trims, expected in (
        (False, ["prepare", "log", "step"]),
        (True, ["prepare", "step", "log", "step", "given back"]),
    ):
        done.clear()
        row = object.__new__(step_parts.LoggedSteps)
        row.engine = row.config = None
        row.parameters = {}
        row.calls_s, row.waits_s, row.trims = [], [], trims
        row.prepare()
        row.step()
        row.tidy()
        assert done == expected
