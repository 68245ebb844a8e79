"""Is the kernel's count of processes that it killed for lack of memory found and compared?"""

from __future__ import annotations

from pathlib import Path

import pytest

from hires.launcher.supervision import out_of_memory
from hires.launcher.supervision.out_of_memory import OomCount


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "memory.events"
    file.write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    monkeypatch.setattr(out_of_memory, "_own_files", lambda: [tmp_path / "missing", file])
    return file


def test_kill_since_the_start_is_evidence(counter):
    count = OomCount()
    assert count.rose() is None
    counter.write_text("oom 4\noom_kill 3\n")
    assert count.rose() == f"oom_kill in {counter} rose from 2 to 3"


def test_group_that_vanished_is_no_evidence(counter):
    count = OomCount()
    counter.unlink()
    assert count.rose() is None


def test_this_machine_has_a_counter_or_none():
    assert OomCount().rose() is None
