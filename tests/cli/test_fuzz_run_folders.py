"""Whatever stands in place of a file of a run folder: every verb answers, and shows the others."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import shutil
import signal
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from hires.core.store import campaign as campaign_file
from hires.core.store import file_names, message_entries, message_sums
from hires.core.store.campaign import Campaign, ExcludedPoint, PlannedPoint
from tests.cli.conftest import SMALL
from tests.helpers.file_faults import (
    ODD_VALUES,
    STRUCTURAL,
    files_of,
    places_in,
    values_of,
    with_value,
    write_values,
)

MOST_S = 30.0
"""An answer takes well below a second; one that waits for a pipe takes for ever."""
ESCAPES = set("\x00\x1b\x07\r\u202e")
CHANGING = ("run", "retry", "cancel", "report", "export", "sweep", "list after")
"""Verbs that change the results, or take long."""
Cause = Callable[[Path], None]
RUN_WORDS = (*SMALL, "campaign=bad")


class HangsError(AssertionError):
    """A verb does not answer."""


@contextlib.contextmanager
def answers_in_time():
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
def tree(hires, traced, fake_ranks, tmp_path, monkeypatch):
    """Returns the run whose files are damaged; another campaign has a run that is well."""
    monkeypatch.setattr("hires.launcher.cancel.WAIT_S", 0.2)
    for campaign in ("good", "bad"):
        assert hires("run", *SMALL, f"campaign={campaign}").code == 0
    results = tmp_path / "results"
    [run] = (path.parent for path in (results / "bad").glob("*/record.json"))
    attempt = run / "a0"
    for name, values in {
        file_names.JOB: {"launcher": "slurm", "job": "77", "index": None, "pack": 1},
        file_names.CANCEL: {},
        file_names.CONTROL: {"line": ["127.0.0.1", 1], "key": "0"},
        file_names.VERIFY: {"equal": True},
    }.items():
        (attempt / name).write_text(json.dumps(values))
    step = {"rank": 0, "step": 2, "clock": "c", "begin_s": 1.0, "dropped": 0}
    step["spans"] = [["forward", "F0", 0.0, 0.5, ""], ["halo", "F0", 0.1, 0.2, "halo to 1"]]
    (attempt / file_names.TIMELINE).write_text(json.dumps(step) + "\n")
    rows = [{"operation": "send", "kind": "halo", "size": 3, "count": 2, "bytes": 16}]
    way = {"backend": "gloo", "algorithm": "message", "issue_s": 0.1, "wait_s": 0.2}
    comm = {"kind": "comm", "rank": 0, "first": 1, "steps": 2, "step_s": 1.0, "planned": rows}
    comm["rows"] = [{**row, **way} for row in rows]
    with (attempt / file_names.METRICS).open("a") as file:
        file.write(json.dumps(comm) + "\n")
    for path in (run, attempt):
        record = json.loads((path / file_names.RECORD).read_text())
        record["comm"] = message_sums.summed([comm])
        (path / file_names.RECORD).write_text(json.dumps(record))
    header = {
        "clock": "c",
        "dropped": 0,
        "operations": ["send"],
        "ways": {"0": ["gloo", "message"]},
    }
    entry = message_entries.ENTRY.pack(0, 0, -1, 64, 5.0, 5.25, 6.0, 7.0)
    message_entries.write(attempt, 0, {**header, "events": {}}, entry)
    (attempt / file_names.HANG).write_text("rank 0 waits\n")
    (attempt / file_names.ALIVE).mkdir(exist_ok=True)
    (attempt / file_names.ALIVE / "rank0000").touch()
    status = {"rank": 0, "step": 1, "action": "F0", "what": "halo", "since_s": 1.0}
    (attempt / file_names.ALIVE / "rank0000.json").write_text(json.dumps(status))
    (run / file_names.JOB_SCRIPT).write_text("#!/bin/bash\n")
    (run / file_names.JOB_LOG).write_text("started\n")
    saved = run / file_names.CHECKPOINTS / "step000001"
    saved.mkdir(parents=True)
    (saved / "stage00.safetensors").write_bytes(b"x")
    manifest = {"schema": 1, "step": 1, "attempt": 0, "task": "train", "layout": "x"}
    manifest["files"] = {"stage00.safetensors": 1}
    (saved / file_names.CHECKPOINT).write_text(json.dumps(manifest))
    points = [PlannedPoint(run.name, [*SMALL], 1), PlannedPoint("none-0123abcd", ["seed=9"])]
    excluded = [ExcludedPoint(["image=7"], "it does not fit", "image=8")]
    sweeps = [{"argv": ["hires", "sweep"], "time": "2031-01-01T00:00:00+00:00"}]
    campaign_file.write(run.parent, Campaign("bad", sweeps, points, excluded))
    (run.parent / file_names.POINTS).write_text(json.dumps([{"run": run.name, "attempt": 0}]))
    return run


def verbs(run: Path) -> dict[str, tuple[str, ...]]:
    """Returns command lines that read run folders; those in front change nothing."""
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
        "show --comm --json": ("show", folder, "--comm", "--json"),
        "show --messages": ("show", folder, "--messages", "messages.csv"),
        "show --reproduce": ("show", folder, "--reproduce"),
        "show --diff": ("show", folder, "--diff", folder),
        "show good": ("show", "good/" + run.name),
        "compare": ("compare", "good", "bad"),
        "compare back": ("compare", "bad", "good", "--json"),
        "logs": ("logs", folder),
        "export": ("export", "--to", "csv", "--out", "csv"),
        "report": ("report", "--format", "csv"),
        "dry run": ("run", *RUN_WORDS, "--dry-run"),
        "dry run of another": ("run", *SMALL, "seed=5", "campaign=bad", "--dry-run"),
        "sweep": ("sweep", *SMALL, "parallel=single,sp", "campaign=bad", "--dry-run"),
        "cancel": ("cancel", "bad"),
        "retry": ("retry", "bad", "--state", "cancelled"),
        "index": ("index",),
        "run": ("run", *RUN_WORDS),
        "list after": ("list", "runs"),
    }


SHOW_OTHERS = ("status", "status --json", "list", "list --json", "list after")


def ask(hires, name: str, words: tuple[str, ...]) -> str:
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
    if ESCAPES & set(text):
        return f"escapes: {[line for line in text.splitlines() if ESCAPES & set(line)][:2]}"
    if name in SHOW_OTHERS and "good" not in text and "-845a4aa5" not in text and not answer.code:
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
        self.wrong: list[str] = []

    def keep(self) -> None:
        """Takes the results as they are for whole ones."""
        shutil.rmtree(self.copy)
        shutil.copytree(self.results, self.copy, symlinks=True)

    def restore(self) -> None:
        """Makes the results whole again."""
        shutil.rmtree(self.results)
        shutil.copytree(self.copy, self.results, symlinks=True)

    def check(self, path: Path, fault: str, cause: Cause, names: Iterable[str]) -> None:
        """Damages a file, and keeps what is wrong with the answers of some verbs."""
        self.restore()
        cause(path)
        every = verbs(self.run)
        for name in names:
            if wrong := ask(self.hires, name, every[name]):
                where = path.relative_to(self.results)
                self.wrong.append(f"{where}, {fault}: {name}: {wrong}")

    @property
    def files(self) -> list[Path]:
        """Every file and folder of the run, its campaign and the results, when they are whole."""
        self.restore()
        return files_of(self.results, self.run)


@pytest.fixture
def whole(hires, tree, tmp_path):
    return Tree(hires, tree, tmp_path / "whole")


def value_faults(path: Path) -> list[tuple[str, Cause]]:
    """Returns faults that put an odd value into a place of a file."""
    if not path.is_file() or not (values := values_of(path)):
        return []
    return [
        (f"{place}={name}", functools.partial(write_values, values=with_value(values, place, odd)))
        for place in places_in(values)
        for name, odd in ODD_VALUES.items()
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_some_faults_of_every_file(whole):
    """Of the whole matrix, which is slow, one cell in forty: other ones for each file."""
    readers = [name for name in verbs(whole.run) if name not in CHANGING]
    chance = random.Random(13)
    for path in whole.files:
        fault = chance.choice(list(STRUCTURAL))
        whole.check(path, fault, STRUCTURAL[fault], chance.sample(readers, 4))
        whole.restore()
        if odd := value_faults(path):
            whole.check(path, *chance.choice(odd), chance.sample(readers, 4))
    assert not whole.wrong, "\n".join(whole.wrong)


def test_file_that_cannot_be_used_is_named(whole):
    assert whole.hires("index").code == 0  # so that lists need no folder
    whole.keep()
    show, status, runs = ("show", str(whole.run)), ("status",), ("list", "runs")
    common = ("pipe", "half", "nested", "folder", "list")
    cases = {
        "config.yaml": ((show, runs), ("pipe", "nested", "folder", "not UTF-8", "list")),
        "record.json": ((show, status, runs), (*common, "not UTF-8")),
        "a0/record.json": ((show, status, runs), (*common, "number")),
        "plan.json": ((show,), (*common, "not UTF-8")),
        "a0/exit.json": ((status, runs), common),
        "a0/timeline.jsonl": (((*show, "--timeline"),), common),
        "a0/messages/rank0000.messages": (((*show, "--messages", "m.csv"),), common),
    }
    for file, (command_lines, faults) in cases.items():
        for fault in faults:
            whole.restore()
            STRUCTURAL[fault](whole.run / file)
            for words in command_lines:
                answer = whole.hires(*words)
                assert file in answer.out + answer.err, (file, fault, words, answer)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", STRUCTURAL)
def test_every_structural_fault_of_every_file(whole, fault):
    for path in whole.files:
        whole.check(path, fault, STRUCTURAL[fault], verbs(whole.run))
    assert not whole.wrong, "\n".join(whole.wrong)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(8))
def test_many_odd_values(whole, seed):
    chance = random.Random(seed)
    for path in whole.files:
        whole.restore()
        odd = value_faults(path)
        for fault, cause in chance.sample(odd, min(20, len(odd))):
            whole.check(path, fault, cause, verbs(whole.run))
    assert not whole.wrong, "\n".join(whole.wrong)


@contextlib.contextmanager
def denied(target: Path):
    """Refuses all that opens, lists or looks at a path, or at one below it."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in [(os, n) for n in ("open", "stat", "lstat", "scandir", "listdir")] + [
            (io, "open")
        ]:
            real = getattr(module, name)

            def refusing(path=".", *words, real=real, **options):
                with contextlib.suppress(TypeError, ValueError):
                    if not isinstance(path, int) and Path(path).is_relative_to(target):
                        raise PermissionError(13, "Permission denied", str(path))
                return real(path, *words, **options)

            patch.setattr(module, name, refusing)
        yield


@pytest.mark.timeout(300)
def test_files_without_permission(whole):
    """Root may read all, so the calls themselves refuse."""
    readers = ("status", "list", "show", "compare", "index", "dry run of another", "logs")
    for path in whole.files:
        whole.restore()
        with denied(path):
            for name in random.Random(str(path)).sample(readers, 2):
                if wrong := ask(whole.hires, name, verbs(whole.run)[name]):
                    whole.wrong.append(f"{path.name}: {name}: {wrong}")
    assert not whole.wrong, "\n".join(whole.wrong)
