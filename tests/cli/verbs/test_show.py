"""``hires show`` prints what the ranks of a run did, and how to make it again."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from hires.core.ranks.timeline import FORWARD, OPTIMISER, Recorder
from tests.helpers.commands import SMALL


def test_run_is_shown_with_its_tables_placement_and_time_line(hires, finished):
    run = finished
    for rank in range(2):
        recorder = Recorder()
        recorder.begin_step()
        for kind, action in ((FORWARD, "F0"), ("backward", "B0"), (OPTIMISER, "")):
            with recorder.span(kind, action):
                pass
        recorder.write(run / "a0", rank)
    answer = hires("show", run.name[-8:])
    assert answer.code == 0, answer.err
    assert answer.out.startswith(f"{run.absolute()}, attempt a0: done\n")
    parts = ("Throughput", "Memory", "again: hires run", "placement (ranks)\n  stage 0\n  [ 0 ]")
    places = [answer.out.index(part) for part in (*parts, "time line of a step", "measured, step")]
    assert places == sorted(places)
    answer = hires("show", str(run), "--trace", "trace.json")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("trace.json: 6 spans; open it in https://ui.perfetto.dev")
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} == {"F0", "B0", "optimiser"}
    answer = hires("show", str(run), "--trace", "trace.json", "--json")
    assert json.loads(answer.out) == {"trace": "trace.json", "spans": 6}
    answer = hires("show", run.name, "--timeline")
    assert answer.out.startswith("planned, every pass equally long\n  rank 0: F0f")
    assert answer.out.count("  rank 1: ") == 2
    for wrong in (["--timeline", "--json"], ["--trace", str(run)], ["--trace", "none/t.json"]):
        assert hires("show", str(run), *wrong).code == 2


def test_reproduce_prints_the_line_and_what_differs_now(hires, finished):
    answer = hires("show", str(finished), "--reproduce")
    assert answer.code == 0, answer.err
    assert answer.out.splitlines()[0] == f"hires run {' '.join(SMALL)} parallel=sp"
    assert "commit, versions and machine are as they were" in answer.out
    record = json.loads((finished / "record.json").read_text())
    record["provenance"] |= {"git": "0123456789abcdef", "torch": "1.0", "host": "elsewhere"}
    record["reproduce"] = "hires run 'image=[3,4]'; touch made $(touch made)"
    (finished / "record.json").write_text(json.dumps(record))
    answer = hires("show", str(finished), "--reproduce")
    words = shlex.split(answer.out.splitlines()[0])
    assert words == ["hires", "run", "image=[3,4];", "touch", "made", "$(touch", "made)"]
    assert ("'image=[3,4];'" in answer.out, "'$(touch'" in answer.out) == (True, True)
    changes = json.loads(hires("show", str(finished), "--reproduce", "--json").out)["changed"]
    assert [change["what"] for change in changes] == ["commit", "torch", "host"]
