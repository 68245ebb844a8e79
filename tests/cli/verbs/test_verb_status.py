"""Does ``hires status`` tell how runs are doing, and end by itself?"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hires.cli.verbs import verb_status
from hires.cli.verbs.verb_status import lines
from hires.launcher.status import state
from hires.launcher.status.run_state import RunState
from tests.helpers.patience import PATIENCE_S
from tests.helpers.run_folders import begin, done, end, make_run, steps, submitted

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A campaign with a run in every state that has a folder, and a plan with two more points."""
    monkeypatch.setattr(state, "AGAIN_S", 0.01)
    results = tmp_path / "results"
    begin(make_run(results, "one-00000001"))
    done(results / "default/one-00000001")
    steps(begin(make_run(results, "two-00000002")), 42)
    end(
        begin(make_run(results, "three-00000003")), "failed", reason="nan", cause="the loss is\nnan"
    )
    make_run(results, "four-00000004")
    plan = {
        "points": [
            {"run": "one-00000001", "overrides": []},
            {"run": "five-00000005", "overrides": []},
        ],
        "excluded": [{"overrides": ["image=9", "batch=1"], "reason": "batch=1 does not divide"}],
    }
    (results / "default/campaign.json").write_text(json.dumps(plan))
    return results / "default"


def table(text: str) -> dict[str, str]:
    """Returns the lines of a table by their first word."""
    return {line.split()[0]: line for line in text.splitlines() if line}


def test_every_point_has_a_line_with_its_state_and_numbers(hires, campaign):
    answer = hires("status")
    assert (answer.code, answer.err) == (0, "")
    rows = table(answer.out)
    assert rows["one-00000001"].split()[2:] == ["done", "100/100", "-", "41.5", "1.5", "GiB", "a0"]
    # 58 steps of half a second are left.
    told = ["default", "running", "42/100", "29", "s", "16", "512.0", "MiB", "a0"]
    assert rows["two-00000002"].split()[1:] == told
    assert "failed (nan)" in rows["three-00000003"]
    assert rows["three-00000003"].endswith("the loss is nan")
    assert "pending" in rows["four-00000004"]
    assert rows["five-00000005"].endswith("planned, and not begun")
    assert "infeasible" in rows["image=9"]
    assert (
        answer.out.splitlines()[-1]
        == "6 runs: 1 done, 1 failed, 1 infeasible, 2 pending, 1 running"
    )


def test_names_choose_campaigns_and_runs(hires, campaign):
    assert len(hires("status", "default").out.splitlines()) == 8
    one = hires("status", "00000002").out
    assert "two-00000002" in one
    assert len(one.splitlines()) == 2
    assert hires("status", str(campaign), "default/one-00000001").out == hires("status").out
    assert hires("status", "default", "--results", str(campaign.parent)).code == 0


@pytest.mark.parametrize("name", ["defualt", "", "no/such", "../etc", "$(touch evil)"])
def test_wrong_name_is_refused_with_what_there_is(hires, campaign, name):
    answer = hires("status", name)
    assert answer.code == 2
    assert "is no campaign and no run: the campaigns under results/ are default" in answer.err
    assert not Path("evil").exists()


def test_name_of_several_runs_is_refused(hires, campaign):
    answer = hires("status", "0000000")
    assert answer.code == 2
    assert "may be any of 4 runs" in answer.err


def test_nothing_at_all_is_no_error(hires):
    answer = hires("status")
    assert (answer.code, "no runs here" in answer.out) == (0, True)


def test_json_has_every_field(hires, campaign):
    runs = {run["name"]: run for run in json.loads(hires("status", "--json").out)["runs"]}
    assert runs["two-00000002"]["step"] == 42
    assert runs["three-00000003"]["reason"] == "nan"
    assert runs["image=9 batch=1"]["path"] is None
    assert set(runs["one-00000001"]) == set(RunState.__dataclass_fields__)


def test_watching_ends_when_nothing_is_left_to_do(hires, tmp_path, monkeypatch):
    run = make_run(tmp_path / "results")
    folder = begin(run)
    monkeypatch.setattr(verb_status.time, "sleep", lambda _: end(folder, "cancelled"))
    answer = hires("status", "--watch")
    assert answer.code == 0
    assert ["running" in answer.out, "cancelled" in answer.out] == [True, True]


def test_interrupted_watch_ends_without_a_word(tmp_path):
    begin(make_run(tmp_path / "results"))
    process = subprocess.Popen(
        [sys.executable, "-m", "hires", "status", "--watch"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, "")


def test_small_screen_shows_what_is_not_done_and_cuts_long_notes():
    runs = [RunState(Path(f"/r/{i}"), f"run{i}", "c", "done", attempt=0) for i in range(30)]
    runs.append(RunState(Path("/r/x"), "runx", "c", "failed", cause="why " * 100, attempt=1))
    shown = lines(runs, width=80, height=10)
    assert len(shown) <= 10
    assert shown[1].startswith("runx")
    assert max(map(len, shown)) <= 80
    assert shown[-3] == "... and 27 more"
    assert shown[-2].startswith("note: runx: why why")
    assert shown[-2].endswith("...")
    assert shown[-1] == "31 runs: 30 done, 1 failed"


def test_table_stays_a_table_in_a_pipe_of_80_columns(hires, campaign, monkeypatch):
    whole = hires("status").out
    monkeypatch.setenv("COLUMNS", "60")
    answer = hires("status").out
    assert max(map(len, answer.splitlines()[:7])) <= 60 < max(map(len, whole.splitlines()))
    assert "failed (nan)" in answer
    assert "42/100" in answer
    assert "(left out: " in answer


def test_why_a_run_failed_is_below_a_table_without_room_for_it(hires, campaign, monkeypatch):
    # The one column that said why was the first to go.
    monkeypatch.setenv("COLUMNS", "60")
    answer = hires("status").out
    assert "note: three-00000003: the loss is nan\n" in answer
    assert "note: five-00000005: planned, and not begun\n" in answer
    assert "\nnote" not in hires("status", "one-00000001").out
    assert answer.splitlines()[-1].startswith("6 runs: ")


def test_one_run_is_shown_whole_on_a_narrow_screen(hires, campaign, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    lines_ = hires("status", "00000003").out.splitlines()
    assert ["note", "the", "loss", "is", "nan"] in [line.split() for line in lines_]
    assert max(map(len, lines_)) <= 40


def test_help_has_examples(hires, capsys):
    with pytest.raises(SystemExit):
        hires("status", "--help")
    assert "--watch" in capsys.readouterr().out


@pytest.mark.slow
def test_status_of_1500_runs(tmp_path, capsys):
    """Reports what it took; no time is asserted."""
    results = tmp_path / "results"
    for number in range(1500):
        run = make_run(results, f"resnet18-64x64-single-fp32-{number:08x}")
        if number % 5 == 4:
            submitted(run, job=str(number))
            continue
        folder = begin(run)
        steps(folder, 100)
        if number % 5 < 2:
            done(run)
        elif number % 5 == 2:
            end(folder, "failed", reason="hang", cause="no progress: rank 1 does not answer")
    tools = tmp_path / "bin"
    tools.mkdir()
    text = "".join(f"{number}|N/A|PENDING|N/A|Priority\n" for number in range(1500))
    (tools / "all").write_text(text)
    (tools / "squeue").write_text(f"#!/bin/sh\ncat {tools}/all\n")
    (tools / "squeue").chmod(0o755)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done_ = subprocess.run(
        [sys.executable, "-m", "hires", "status"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    wall_s = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    last = done_.stdout.splitlines()[-1]
    assert last == "1500 runs: 600 done, 300 failed, 300 pending, 300 running"
    with capsys.disabled():
        sys.stdout.write(f"\n1500 runs: {cpu_s:.2f} s of CPU, {wall_s:.2f} s in all\n")


@pytest.mark.parametrize(
    ("file", "text", "shown"),
    [
        ("a0/job.json", "{}", "damaged: a0/job.json"),
        ("a0/job.json", '{"job": "7", "index": "x"}', "damaged: a0/job.json"),
        ("a0/exit.json", "{}", "damaged: a0/exit.json"),
        ("a0/exit.json", '{"state": "failed", "cause": [3]}', "damaged: a0/exit.json"),
        ("a0/metrics.jsonl", '{"kind": "step"}\n', "damaged: a0/metrics.jsonl"),
        ("a0/metrics.jsonl", '{"kind": "step", "step": [], "rank": 0}\n', "a0/metrics.jsonl"),
    ],
)
def test_damaged_file_is_named_and_the_other_runs_are_shown(hires, campaign, file, text, shown):
    # Each of these once ended the whole table with a traceback.
    (campaign / "two-00000002" / file).write_text(text)
    answer = hires("status")
    assert answer.code == 0, answer.err
    rows = table(answer.out)
    assert shown in rows["two-00000002"]
    assert rows["one-00000001"].split()[2:4] == ["done", "100/100"]


@pytest.mark.parametrize("text", ['{"state": "done", "attempt": 0, "memory": [3]}', "[", "3"])
def test_damaged_record_of_a_run_that_is_done_is_named(hires, campaign, text):
    (campaign / "one-00000001" / "record.json").write_text(text)
    answer = hires("status")
    assert answer.code == 0, answer.err
    rows = table(answer.out)
    assert "done" in rows["one-00000001"]
    assert rows["one-00000001"].endswith("damaged: record.json")
    assert "running" in rows["two-00000002"]


def test_job_that_never_began_and_whose_file_is_damaged_is_lost(hires, campaign):
    folder = submitted(campaign / "four-00000004")
    (folder / "job.json").write_text('{"job": [1]}')
    row = table(hires("status").out)["four-00000004"]
    assert row.split()[2] == "lost"
    assert row.endswith("damaged: a0/job.json")
