"""Spans are kept as they happened, bounded, and read back on one clock."""

from __future__ import annotations

import time

import pytest

from hires.core.ranks import timeline
from hires.core.ranks.timeline import FORWARD, HALO, Recorder, Span, StepSpans
from hires.core.store import provenance
from hires.report import timelines


def spans_of(recorder: Recorder) -> list[Span]:
    return recorder.steps[-1].spans


def test_what_happens_inside_an_action_belongs_to_it():
    recorder = Recorder()
    recorder.begin_step()
    with recorder.span(FORWARD, "F3"):
        recorder.note(HALO, time.perf_counter(), "a receive from rank 1")
    assert recorder.action == ""
    halo, forward = spans_of(recorder)
    assert (halo.kind, halo.action, halo.what) == (HALO, "F3", "a receive from rank 1")
    assert (forward.kind, forward.action) == (FORWARD, "F3")
    with pytest.raises(ValueError, match="broken"), recorder.span(FORWARD, "F0"):
        raise ValueError("broken")
    assert (spans_of(recorder)[-1].action, recorder.action) == ("F0", "")  # kept if it fails
    assert forward.begin <= halo.begin <= halo.end <= forward.end


def test_only_the_last_steps_and_so_many_spans_stay(monkeypatch):
    monkeypatch.setattr(timeline, "MAX_SPANS", 2)
    recorder = Recorder(kept_steps=2)
    recorder.note(HALO, 0.0)
    assert not recorder.steps
    for _ in range(5):
        recorder.begin_step()
    assert [step.step for step in recorder.steps] == [3, 4]
    for _ in range(5):
        recorder.note(HALO, 0.0)
    assert (len(spans_of(recorder)), recorder.steps[-1].dropped) == (2, 3)


def test_written_steps_are_read_back_with_what_was_logged_in_them(tmp_path):
    (tmp_path / "logs").mkdir()
    for rank in (1, 0):
        recorder = Recorder()
        recorder.begin_step()
        recorder.note(HALO, recorder.clock.now())
        with recorder.span(FORWARD, "F0", "of a test"):
            pass
        recorder.write(tmp_path, rank, lambda begin_s, end_s: (2, 64, "shm mailbox"))
    steps = timelines.read_timeline(tmp_path)
    assert [(step.rank, step.step) for step in steps] == [(0, 0), (1, 0)]
    assert steps[0].clock == steps[1].clock == provenance.clock_name()
    halo, forward = steps[0].spans
    assert forward[:2] == (FORWARD, "F0")
    assert forward.what == "of a test"
    assert 0 <= forward.begin_s <= forward.end_s < 60
    # Spans of communication alone hold messages.
    assert (halo.calls, halo.num_bytes, halo.way) == (2, 64, "shm mailbox")
    assert (forward.calls, forward.num_bytes, forward.way) == (0, 0, "")


def test_ranks_of_one_machine_keep_their_distance_and_machines_begin_together():
    span = Span(FORWARD, "F0", 0.0, 1.0)
    steps = [
        StepSpans(0, 0, "here", 100.0, [span]),
        StepSpans(1, 0, "here", 100.25, [span]),
        StepSpans(2, 0, "there", 7.5, [span]),
    ]
    moved = timelines.aligned(steps)
    assert [step.spans[0].begin_s for step in moved] == [0.0, 0.25, 0.0]
    assert timelines.length_s(moved) == 1.25
