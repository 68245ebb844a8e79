"""Verbs answer where the files of a run are damaged or mean harm, and show the other runs; every
reader of a file has its faults in ``tests/core/store/test_damaged_files.py``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from hires.core.store import file_names
from tests.helpers.commands import SMALL, UNSEEN
from tests.helpers.file_faults import STRUCTURAL
from tests.helpers.hostile import hostile_campaign

FILES = (
    file_names.CONFIG, file_names.RECORD, file_names.PLAN, file_names.FROZEN,
    f"a0/{file_names.EXIT}", f"a0/{file_names.LOGS}/rank0000.{file_names.METRICS}",
)  # fmt: skip

FAULTS = ("half", "escapes", "folder", "list", "not UTF-8", "pipe")


def harmless(hires, *words, codes=range(5)):
    answer = hires(*words)
    assert answer.code in codes, answer.err
    assert "Traceback" not in answer.err
    assert not UNSEEN & {*answer.out + answer.err}
    assert answer.code == 0 or answer.err.strip()
    assert len(answer.out) < 2_000_000
    return answer.out


def test_damaged_files_leave_the_other_runs_in_every_verb(hires, finished, tmp_path):
    results = tmp_path / "results"
    for name in ("good", "bad"):
        shutil.copytree(results / "default", results / name)
    shutil.rmtree(results / "default")
    run, verbs = results / "bad" / finished.name, ("status", "list runs", "compare good bad")
    for name, fault in zip(FILES, FAULTS, strict=True):
        whole = (run / name).read_bytes()
        STRUCTURAL[fault](run / name)
        for verb in (*verbs[:2], f"show {run}", verbs[2]):
            answer = harmless(hires, *verb.split())
            assert "good" in answer or verb not in verbs[:2], (name, fault)
        harmless(hires, "run", *SMALL, "parallel=sp", "campaign=bad", "--dry-run")
        harmless(hires, "export", "--to", "csv", "--out", "csv", codes=(0,))
        if (run / name).is_dir() and not (run / name).is_symlink():
            shutil.rmtree(run / name)
        (run / name).unlink(missing_ok=True)
        (run / name).write_bytes(whole)


def test_runs_of_somebody_who_means_harm_are_listed_shown_and_exported(hires):
    hostile = hostile_campaign(Path("results"))
    runs = json.loads(harmless(hires, "list", "runs", "--json", codes=(0,)))["runs"]
    assert len(runs) >= len(hostile) - 1
    where = ("--where", "loss > 0 or layout == 'sp'", "--sort=-loss")
    harmless(hires, "list", "runs", *where, codes=(0,))
    for run in hostile[:-1]:  # the last one is a pipe, which show waits for
        harmless(hires, "show", str(run))
    harmless(hires, "export", "--to", "csv", "--out", "out", codes=(0,))
    assert not UNSEEN & {*Path("out/runs.csv").read_text()}
