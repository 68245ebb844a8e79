"""Whatever stands in the place of a file of a run folder: every verb answers in time, without a
traceback or an escape sequence, names the file, and shows the other runs."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import traceback
from pathlib import Path

import pytest

from hires.core.store import campaign as campaign_file
from hires.core.store import file_names, message_entries, message_sums
from hires.core.store.campaign import Campaign, ExcludedPoint, PlannedPoint
from tests.helpers.commands import SMALL
from tests.helpers.file_faults import (
    ODD_VALUES,
    STRUCTURAL,
    files_of,
    places_in,
    values_of,
    with_value,
    write_values,
)
from tests.helpers.hostile import hostile_campaign

UNSEEN = set("\x00\x1b\x07\r\u202e\u2028\ud800")
RUN_WORDS = ("run", *SMALL, "parallel=sp", "campaign=bad")


def add_files(run: Path) -> None:
    """Adds the files to a complete run that only some launchers and keys make."""
    attempt, saved = run / "a0", run / file_names.CHECKPOINTS / "step000001"
    (attempt / file_names.ALIVE).mkdir(exist_ok=True)
    saved.mkdir(parents=True)
    step = {"rank": 0, "step": 2, "clock": "c", "begin_s": 1.0, "dropped": 0}
    step["spans"] = [["forward", "F0", 0.0, 0.5, ""], ["halo", "F0", 0.1, 0.2, "halo to 1"]]
    manifest = {"schema": 1, "step": 1, "attempt": 0, "task": "train", "layout": "x"}
    for path, values in {
        attempt / file_names.JOB: {"launcher": "slurm", "job": "77", "index": None},
        attempt / file_names.CANCEL: {},
        attempt / file_names.CONTROL: {"line": ["127.0.0.1", 1], "key": "0"},
        attempt / file_names.VERIFY: {"equal": True},
        attempt / file_names.TIMELINE: step,
        attempt / file_names.ALIVE / "rank0000.json": {"rank": 0, "step": 1, "since_s": 1.0},
        saved / file_names.CHECKPOINT: {**manifest, "files": {"stage00.safetensors": 1}},
        run.parent / file_names.POINTS: {"run": run.name, "attempt": 0},
        attempt / file_names.HANG: "rank 0 waits",
        attempt / file_names.ALIVE / "rank0000": "",
        run / file_names.JOB_SCRIPT: "#!/bin/bash",
        run / file_names.JOB_LOG: "started",
        saved / "stage00.safetensors": "x",
    }.items():
        path.write_text((values if isinstance(values, str) else json.dumps(values)) + "\n")
    rows = [{"operation": "send", "kind": "halo", "size": 3, "count": 2, "bytes": 16}]
    way = {"backend": "gloo", "algorithm": "message", "issue_s": 0.1, "wait_s": 0.2}
    comm = {"kind": "comm", "rank": 0, "first": 1, "steps": 2, "step_s": 1.0, "planned": rows}
    comm["rows"] = [{**row, **way} for row in rows]
    with (attempt / file_names.METRICS).open("a") as file:
        file.write(json.dumps(comm) + "\n")
    for path in (run / file_names.RECORD, attempt / file_names.RECORD):
        values = {**json.loads(path.read_text()), "comm": message_sums.summed([comm])}
        path.write_text(json.dumps(values))
    header = {"clock": "c", "dropped": 0, "operations": ["send"], "events": {}}
    entry = message_entries.ENTRY.pack(0, 0, -1, 64, 5.0, 5.25, 6.0, 7.0)
    message_entries.write(attempt, 0, {**header, "ways": {"0": ["gloo", "message"]}}, entry)
    points = [PlannedPoint(run.name, [*SMALL], 1), PlannedPoint("none-0123abcd", ["seed=9"])]
    excluded = [ExcludedPoint(["image=7"], "it does not fit", "image=8")]
    sweeps = [{"argv": ["hires", "sweep"], "time": "2031-01-01T00:00:00+00:00"}]
    campaign_file.write(run.parent, Campaign("bad", sweeps, points, excluded))


def command_lines(run: Path) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Returns quick command lines that change nothing, and others."""
    show = ("show", str(run))
    quick = [
        ("status",),
        ("status", "--json"),
        ("list", "runs"),
        ("list", "runs", "--json"),
        show,
        *((*show, option) for option in ("--json", "--timeline", "--comm", "--reproduce")),
        (*show, "--trace", "trace.json"),
        (*show, "--diff", str(run)),
        ("show", "good/" + run.name),
        ("logs", str(run)),
        ("compare", "good", "bad"),
        ("compare", "bad", "good", "--json"),
        (*RUN_WORDS, "--dry-run"),
    ]
    others = [
        ("run", *SMALL, "seed=5", "campaign=bad", "--dry-run"),
        ("sweep", *SMALL, "parallel=single,sp", "campaign=bad", "--dry-run"),
        ("cancel", "bad"),
        ("retry", "bad", "--state", "cancelled"),
        ("export", "--to", "csv", "--out", "csv"),
        ("report", "--format", "csv"),
        RUN_WORDS,
    ]
    return quick, others


def wrong_answer(hires, words: tuple[str, ...]) -> str:
    """Returns what is wrong with the answer of a verb; empty if nothing is."""
    try:
        answer = hires(*words)
    except (Exception, SystemExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {place.filename}:{place.lineno}: {str(error)[:200]}"
    text = answer.out + answer.err
    if answer.code not in range(5):
        return f"exit code {answer.code}"
    # A run that fails shows the last lines of a rank's log.
    if "Traceback" in text and words[0] not in ("run", "retry"):
        return f"a traceback: {text[-300:]}"
    if UNSEEN & set(text):
        return f"escapes: {[line for line in text.splitlines() if UNSEEN & set(line)][:2]}"
    if words[0] in ("status", "list") and "good" not in text and not answer.code:
        return f"the other runs are missing: {text[:300]}"
    if answer.code and not answer.err.strip():
        return f"exit code {answer.code} without a word"
    return ""


@pytest.mark.timeout(120)  # an answer that waits for a pipe would take for ever
def test_every_file_is_damaged_and_every_verb_answers(
    hires, finished, tmp_path, monkeypatch, fake_ranks
):
    """Two faults for each file of one of two campaigns, and some verbs for each fault."""
    monkeypatch.setattr("hires.launcher.cancel.WAIT_S", 0.2)
    results, whole, wrong = tmp_path / "results", tmp_path / "whole", []
    for name in ("good", "bad"):
        shutil.copytree(results / "default", results / name)
    shutil.rmtree(results / "default")
    run = results / "bad" / finished.name
    add_files(run)
    shutil.copytree(results, whole)
    chance, faults = random.Random(13), itertools.cycle(STRUCTURAL.items())
    quick, others = command_lines(run)
    lines = itertools.cycle(quick)

    def check(path, fault, cause, *verbs) -> None:
        shutil.rmtree(results)
        shutil.copytree(whole, results)
        cause(path)
        for words in verbs:
            if answer := wrong_answer(hires, words):
                wrong.append(f"{path.relative_to(results)}, {fault}: {words}: {answer}")

    files = files_of(results, run)
    for path in files:
        check(path, *next(faults), *itertools.islice(lines, 3))
        copy = whole / path.relative_to(results)
        if copy.is_file() and (values := values_of(copy)):
            at, name = chance.choice([*places_in(values)]), chance.choice([*ODD_VALUES])
            odd = with_value(values, at, ODD_VALUES[name])
            cause = lambda path, odd=odd: write_values(path, odd)  # noqa: E731
            check(path, f"{at}={name}", cause, *itertools.islice(lines, 3))
    for words in others:
        check(chance.choice(files), *next(faults), words)
    assert not wrong, "\n".join(wrong)


def test_runs_of_somebody_who_means_harm_are_listed_shown_and_exported(hires):
    hostile = hostile_campaign(Path("results"))

    def harmless(*words, codes=(0,)):
        answer = hires(*words)
        assert answer.code in codes, answer.err
        assert "Traceback" not in answer.err
        assert not UNSEEN & set(answer.out + answer.err)
        assert len(answer.out) < 2_000_000
        return answer.out

    runs = json.loads(harmless("list", "runs", "--json"))["runs"]
    assert len(runs) >= len(hostile) - 1
    harmless("list", "runs", "--where", "loss > 0 or layout == 'sp'", "--sort=-loss")
    for run in hostile[:-1]:  # the last one is a pipe, which show waits for
        harmless("show", str(run), codes=(0, 1, 2))
    harmless("export", "--to", "csv", "--out", "out")
    assert not UNSEEN & set(Path("out/runs.csv").read_text())
