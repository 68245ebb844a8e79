"""``hires show`` prints what the ranks of a run did, and how to make it again."""

from __future__ import annotations

import json
import shlex
import shutil
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


def test_run_without_a_counted_step_says_why_and_what_would_work(hires, finished):
    assert "no throughput" not in hires("show", str(finished)).out
    record = json.loads((finished / "record.json").read_text())
    left_out = [{"step": 6, "why": "warm-up"}]
    record["throughput"] |= {"samples": 0, "discarded": left_out, "img_per_s": None, "step_s": None}
    (finished / "record.json").write_text(json.dumps(record))
    [line] = [
        line for line in hires("show", str(finished)).out.splitlines() if "no throughput" in line
    ]
    assert "of the 1 step of this attempt none counts" in line
    assert line.endswith("use a smaller measure.warmup or more steps")


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


def test_name_that_several_runs_fit_is_refused_with_theirs(hires, finished):
    run, other = finished, finished.with_name(f"{finished.name[:-8]}0123abcd")
    shutil.copytree(run, other)
    for word, why in (
        ("resnet18", "may be any of 2 runs"),
        ("default", f"as default/{min(run.name, other.name)}; `hires list runs --camp"),
        ("nothing", "is no campaign and no run"),
    ):
        answer = hires("show", word)
        assert (answer.code, why in answer.err) == (2, True), answer.err
    (run / "config.yaml").unlink()
    answer = hires("show", str(run))  # it was called no run
    assert (answer.code, "has attempts and no config.yaml" in answer.err) == (2, True), answer.err
