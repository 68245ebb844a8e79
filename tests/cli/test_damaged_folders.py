"""Whatever stands in the place of a file of a run folder: every verb answers in time, without a
traceback or an escape sequence, names the file, and shows the other runs."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import random
import shutil
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
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

MOST_S = 30.0
"""An answer takes well below a second; one that waits for a pipe takes for ever."""
UNSEEN = set("\x00\x1b\x07\r\u202e\u2028\ud800")
Cause = Callable[[Path], None]
RUN_WORDS = (*SMALL, "parallel=sp", "campaign=bad")


class HangsError(AssertionError):
    """A verb does not answer."""


@contextlib.contextmanager
def answers_in_time() -> Iterator[None]:
    def hangs(number, frame):
        raise HangsError(f"no answer within {MOST_S:g} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, MOST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def whole(hires, finished, tmp_path, monkeypatch, fake_ranks):
    """Results of two campaigns of one real run each; the files of one are damaged."""
    monkeypatch.setattr("hires.launcher.cancel.WAIT_S", 0.2)
    results = tmp_path / "results"
    for name in ("good", "bad"):
        shutil.copytree(results / "default", results / name)
    shutil.rmtree(results / "default")
    run = results / "bad" / finished.name
    add_files(run)
    return Tree(hires, run, tmp_path / "whole")


def add_files(run: Path) -> None:
    """Adds the files to a complete run that only some launchers and keys make."""
    attempt = run / "a0"
    step = {"rank": 0, "step": 2, "clock": "c", "begin_s": 1.0, "dropped": 0}
    step["spans"] = [["forward", "F0", 0.0, 0.5, ""], ["halo", "F0", 0.1, 0.2, "halo to 1"]]
    (attempt / file_names.ALIVE).mkdir(exist_ok=True)
    saved = run / file_names.CHECKPOINTS / "step000001"
    saved.mkdir(parents=True)
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
    }.items():
        path.write_text(json.dumps(values) + "\n")
    for path, text in {
        attempt / file_names.HANG: "rank 0 waits\n",
        attempt / file_names.ALIVE / "rank0000": "",
        run / file_names.JOB_SCRIPT: "#!/bin/bash\n",
        run / file_names.JOB_LOG: "started\n",
        saved / "stage00.safetensors": "x",
    }.items():
        path.write_text(text)
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


def command_lines(run: Path) -> dict[str, tuple[str, ...]]:
    """Returns command lines that read run folders; those in front change nothing and are quick."""
    folder = str(run)
    return {
        "status": ("status",),
        "status --json": ("status", "--json"),
        "list": ("list", "runs"),
        "list --json": ("list", "runs", "--json"),
        "show": ("show", folder),
        "show --json": ("show", folder, "--json"),
        "show --timeline": ("show", folder, "--timeline"),
        "show --trace": ("show", folder, "--trace", "trace.json"),
        "show --comm": ("show", folder, "--comm"),
        "show --reproduce": ("show", folder, "--reproduce"),
        "show --diff": ("show", folder, "--diff", folder),
        "show good": ("show", "good/" + run.name),
        "logs": ("logs", folder),
        "compare": ("compare", "good", "bad"),
        "compare back": ("compare", "bad", "good", "--json"),
        "dry run": ("run", *RUN_WORDS, "--dry-run"),
        "dry run of another": ("run", *SMALL, "seed=5", "campaign=bad", "--dry-run"),
        "sweep": ("sweep", *SMALL, "parallel=single,sp", "campaign=bad", "--dry-run"),
        "cancel": ("cancel", "bad"),
        "retry": ("retry", "bad", "--state", "cancelled"),
        "export": ("export", "--to", "csv", "--out", "csv"),
        "report": ("report", "--format", "csv"),
        "run": ("run", *RUN_WORDS),
        "list after": ("list", "runs"),
    }


QUICK = 16
"""Command lines of those in front."""
SHOW_OTHERS = ("status", "status --json", "list", "list --json", "list after")


def wrong_answer(hires, name: str, words: tuple[str, ...]) -> str:
    """Returns what is wrong with the answer of a verb; empty if nothing is."""
    try:
        with answers_in_time():
            answer = hires(*words)
    except HangsError as error:
        return str(error)
    except (Exception, SystemExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {place.filename}:{place.lineno}: {str(error)[:200]}"
    text = answer.out + answer.err
    if answer.code not in range(5):
        return f"exit code {answer.code}"
    # A run that fails shows the last lines of a rank's log.
    if "Traceback" in text and name not in ("run", "retry"):
        return f"a traceback: {text[-300:]}"
    if UNSEEN & set(text):
        return f"escapes: {[line for line in text.splitlines() if UNSEEN & set(line)][:2]}"
    if name in SHOW_OTHERS and "good" not in text and not answer.code:
        return f"the other runs are missing: {text[:300]}"
    if answer.code and not answer.err.strip():
        return f"exit code {answer.code} without a word"
    return ""


class Tree:
    """The results of two campaigns, which each fault finds whole."""

    def __init__(self, hires, run: Path, copy: Path) -> None:
        self.hires, self.run, self.copy = hires, run, copy
        self.results = run.parents[1]
        shutil.copytree(self.results, copy, symlinks=True)
        self.lines = command_lines(run)
        self.files = files_of(self.results, run)
        self.wrong: list[str] = []

    def restore(self) -> None:
        """Makes the results whole again."""
        shutil.rmtree(self.results)
        shutil.copytree(self.copy, self.results, symlinks=True)

    def check(self, path: Path, fault: str, cause: Cause, names: Iterable[str]) -> None:
        """Damages a file, and keeps what is wrong with the answers of some verbs."""
        self.restore()
        cause(path)
        for name in names:
            if wrong := wrong_answer(self.hires, name, self.lines[name]):
                where = path.relative_to(self.results)
                self.wrong.append(f"{where}, {fault}: {name}: {wrong}")

    def value_faults(self, path: Path) -> list[tuple[str, Cause]]:
        """Returns faults that put an odd value into a place of a file."""
        self.restore()
        if not path.is_file() or not (values := values_of(path)):
            return []
        return [
            (f"{at}={name}", functools.partial(write_values, values=with_value(values, at, odd)))
            for at in places_in(values)
            for name, odd in ODD_VALUES.items()
        ]


@pytest.mark.timeout(300)
def test_every_file_is_damaged_and_every_verb_answers(whole):
    """Two faults for each file, and some verbs for each fault."""
    chance = random.Random(13)
    faults = itertools.cycle(STRUCTURAL.items())
    names = itertools.cycle([*whole.lines][:QUICK])
    for path in whole.files:
        whole.check(path, *next(faults), itertools.islice(names, 3))
        if odd := whole.value_faults(path):
            whole.check(path, *chance.choice(odd), itertools.islice(names, 3))
    for name in [*whole.lines][QUICK:]:
        path = chance.choice(whole.files)
        whole.check(path, *next(faults), [name])
    assert not whole.wrong, "\n".join(whole.wrong)


@pytest.fixture
def hostile(hires):
    return hostile_campaign(Path("results"))


def harmless(answer, *codes):
    assert answer.code in codes, answer.err
    assert "Traceback" not in answer.err
    assert not UNSEEN & set(answer.out + answer.err)
    assert len(answer.out) < 2_000_000
    return answer


def test_runs_of_somebody_who_means_harm_are_listed_shown_and_exported(hires, hostile):
    runs = json.loads(harmless(hires("list", "runs", "--json"), 0).out)["runs"]
    assert len(runs) >= len(hostile) - 1
    harmless(hires("list", "runs", "--where", "loss > 0 or layout == 'sp'", "--sort=-loss"), 0)
    for run in hostile[:-1]:  # the last one is a pipe, which show waits for
        harmless(hires("show", str(run)), 0, 1, 2)
    harmless(hires("show", str(hostile[0]), "--diff", str(hostile[1])), 0, 1)
    harmless(hires("export", "--to", "csv", "--out", "out"), 0)
    assert not UNSEEN & set(Path("out/runs.csv").read_text())
