"""Does ``hires show`` draw and export what the ranks of a run did?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hires.core.timeline import FORWARD, OPTIMISER, Recorder
from tests.cli.conftest import SMALL

pytestmark = pytest.mark.usefixtures("traced")


@pytest.fixture
def run(hires, fake_ranks) -> Path:
    """A finished run, whose ranks have kept no time line."""
    assert hires("run", *SMALL, "parallel=sp").code == 0
    [config] = Path("results").glob("*/*/config.yaml")
    return config.parent


@pytest.fixture
def timed(run) -> Path:
    """A finished run with the time line of two ranks."""
    for rank in range(2):
        recorder = Recorder()
        recorder.begin_step()
        for kind, action in ((FORWARD, "F0"), ("backward", "B0"), (OPTIMISER, "")):
            with recorder.span(kind, action):
                pass
        recorder.write(run / "a0", rank)
    return run


def test_trace_is_written(hires, timed):
    answer = hires("show", str(timed), "--trace", "trace.json")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("trace.json: 6 spans; open it in https://ui.perfetto.dev")
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} == {"F0", "B0", "optimiser"}


def test_time_line_is_drawn_planned_and_measured(hires, timed):
    answer = hires("show", timed.name, "--timeline")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("planned, every pass equally long\n  rank 0: F0f")
    assert "\nmeasured, step 0: " in answer.out
    assert answer.out.count("  rank 1: ") == 2
    assert "Throughput" not in answer.out


@pytest.mark.parametrize("option", [["--timeline"], ["--trace", "trace.json"]])
def test_run_without_a_time_line_is_refused(hires, run, option):
    answer = hires("show", str(run), *option)
    assert answer.code == 1
    assert "timeline.jsonl holds no timeline" in answer.err
    assert not Path("trace.json").exists()


def test_drawing_is_no_json(hires, timed):
    answer = hires("show", str(timed), "--timeline", "--json")
    assert answer.code == 2
    assert "--trace FILE" in answer.err + answer.out


def test_folder_is_no_trace(hires, timed):
    answer = hires("show", str(timed), "--trace", str(timed))
    assert answer.code == 2
    assert "is a folder" in answer.err


def test_help_has_an_example(hires, capsys):
    with pytest.raises(SystemExit):
        hires("show", "--help")
    assert "--trace trace.json" in capsys.readouterr().out
