"""Is each step of a row taken apart, and does it hold memory only in its turn?"""

from __future__ import annotations

import contextlib

import pytest

from hires.bench import step_parts
from hires.bench.step_parts import part_cells


def logged_row(monkeypatch, done, *, trims=False):
    """Returns a row whose steps, and what is done around them, are appended to ``done``."""
    monkeypatch.setattr(step_parts.HiresSteps, "prepare", lambda self: done.append("prepare"))
    monkeypatch.setattr(step_parts.HiresSteps, "step", lambda self: done.append("step"))
    monkeypatch.setattr(step_parts, "message_log", lambda *of: done.append("log"))
    monkeypatch.setattr(step_parts, "give_back_memory", lambda: done.append("given back"))

    def seconds(step):
        step()
        done.append("kernels")
        return float(done.count("kernels"))

    monkeypatch.setattr(step_parts, "onednn_seconds", seconds)
    row = object.__new__(step_parts.LoggedSteps)
    row.engine = row.config = None
    row.parameters = {}
    row.kernels_s, row.calls_s, row.waits_s, row.trims = [], [], [], trims
    return row


def take_turn(row):
    row.prepare()
    row.step()
    row.tidy()


def test_row_that_trims_holds_nothing_between_its_turns(monkeypatch):
    for trims, last in ((False, []), (True, ["given back"])):
        done = []
        take_turn(logged_row(monkeypatch, done, trims=trims))
        assert done == ["prepare", "log", "step", "step", "kernels", *last]


def test_kernels_are_timed_in_the_turn_of_each_round(monkeypatch):
    """They were timed once, before the rounds, while the machine was up to twice as fast."""
    row = logged_row(monkeypatch, [])
    for _ in range(4):  # in the preparation and in a round of the warm-up, then in two that count
        take_turn(row)
    assert row.parts(2)["kernels_samples_s"] == [3.0, 4.0]
    assert row.parts(2)["calls_samples_s"] == [0.0, 0.0]
    assert row.parts(0)["kernels_samples_s"] == []


def test_messages_of_the_step_whose_kernels_are_timed_are_not_counted(monkeypatch):
    done = []
    row = logged_row(monkeypatch, done)

    @contextlib.contextmanager
    def logged(log):
        done.append("logged")
        yield
        done.append("end")

    monkeypatch.setattr(step_parts.comm, "logged", logged)
    take_turn(row)
    assert done == ["prepare", "log", "logged", "step", "end", "step", "kernels"]


def taken_apart(*steps_s, kernels_s, calls_s=0.0, waits_s=0.0):
    """Returns the facts of a row, with the same calls and waits in each round."""
    facts = {"name": "hires, 2 tiles fp32", "samples_s": [*steps_s]}
    facts |= {"kernels_samples_s": kernels_s, "calls_samples_s": [calls_s] * len(steps_s)}
    return {**facts, "waits_samples_s": [waits_s] * len(steps_s)}


def test_step_is_taken_apart():
    cells = part_cells(taken_apart(2.0, kernels_s=[1.5], calls_s=0.1, waits_s=0.15))
    parts = {"kernels ms": "1500.0", "calls ms": "100.0", "waits ms": "150.0", "rest ms": "250.0"}
    assert cells == {"row": "hires, 2 tiles fp32", "step ms": "2000.0", **parts}


def test_rest_is_what_kernels_leave_in_their_own_round():
    # The medians are 2.0 and 1.5, but rounds leave 1.0, 0.1 and 0.3.
    cells = part_cells(taken_apart(2.0, 1.6, 6.0, kernels_s=[1.0, 1.5, 5.7]))
    assert (cells["step ms"], cells["kernels ms"]) == ("2000.0", "1500.0")
    assert cells["rest ms"] == "300.0"


def test_rest_below_zero_is_no_number():
    """A README had a rest of -4348.6 ms."""
    cells = part_cells(taken_apart(18.8, kernels_s=[22.0], waits_s=1.0))
    assert cells["rest ms"] == "-"


@pytest.mark.parametrize("lacks", ["kernels_samples_s", "samples_s"])
def test_row_without_kernels_or_samples_has_no_parts(lacks):
    facts = taken_apart(2.0, kernels_s=[1.5])
    del facts[lacks]
    assert part_cells(facts) is None
