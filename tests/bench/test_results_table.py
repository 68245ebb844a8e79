"""`make results` resumes where it was stopped; quoted figures are those of the pages."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess

import pytest

from hires.bench.bench_main import group_tables, page
from hires.bench.rows_bench import choice_facts
from tests.conftest import REPOSITORY
from tests.helpers.bench_jobs import rows_of

SPEC = importlib.util.spec_from_file_location("t", REPOSITORY / "scripts/results_table.py")
SCRIPT = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(SCRIPT)
ORIGIN = {"git": "0123456789ab-dirty-1", "hires": "0", "torch": "2", "python": "3", "time": "now"}
ORIGIN |= {"hardware": {"cpu": "cpu", "cores": 2, "memory": 2**30}, "load_average": [0.5, 1, 2]}
ORIGIN |= {"command": "hires bench model=resnet101 image=512", "complete": True}
STEP_S = {"median": 2.0, "p10": 1.0, "p90": 3.0, "count": 7}
FIGURES = sorted(REPOSITORY.glob("results/*/README.md"))


def copied(folder):
    """Returns a copy of the pages of results, and of the README, that may be changed."""
    for path in (REPOSITORY / "README.md", REPOSITORY / "results/README.md", *FIGURES):
        to = folder / path.relative_to(REPOSITORY)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, to)
    return folder


def test_quoted_figures_are_those_of_their_pages():
    for path, text in SCRIPT.texts().items():
        assert path.read_text(encoding="utf-8") == text, "run scripts/results_table.py"


@pytest.mark.parametrize(
    ("page", "old"),
    [
        ("README.md", "| 1.28 |"),
        ("results/layouts/README.md", "| 1.28 (1.19-1.41) |"),
    ],
)
def test_figure_that_is_changed_by_a_digit_is_noticed(tmp_path, page, old):
    path = copied(tmp_path) / page
    text = path.read_text(encoding="utf-8")
    assert old in text
    digit = next(n for n in range(len(old)) if old[n].isdigit())
    new = old[:digit] + str((int(old[digit]) + 1) % 10) + old[digit + 1 :]
    path.write_text(text.replace(old, new), encoding="utf-8")
    texts = SCRIPT.texts(tmp_path)
    assert any(path.read_text(encoding="utf-8") != text for path, text in texts.items())


def test_lines_are_those_of_what_was_measured_and_is_right(tmp_path):
    def row(name, **more):
        facts = {"threads": 1, "ranks": 2, "images": 1, "predicted_s": None, "what": "", "ok": True}
        return {"name": name, **facts, "step_s": STEP_S, "images_per_s": 1, "cores": 1, **more}

    def write(folder, result):
        path = copied(tmp_path) / f"results/{folder}/README.md"
        path.write_text(page({**ORIGIN, **result}, group_tables(result), folder), encoding="utf-8")
        return [
            line.rpartition(" | 0.5 | cpu, 2 cores; 01234567-dirty | ")[0]
            for line in SCRIPT.texts(tmp_path)[tmp_path / "results/README.md"].splitlines()
            if line.endswith(f"]({folder}/README.md) |")
        ]

    ratio = {"median": 1.5, "p10": 1.4, "p90": 1.6}
    rows = [row("tiles 2x1", speedup=ratio), row("dp", ok=False, wrong="it computes other things")]
    tiles = "| speed of two tiles over one process, training ResNet-101 at 512x512"
    assert write("layouts", {"groups": {"a": rows}}) == [f"{tiles} | 1.50 | 7 | 1.40 to 1.60"]
    assert write("layouts", {"groups": {"a": rows}, "complete": False}) == []
    assert write("layouts", {"groups": {"a": rows}, "command": "hires bench model=unet"}) == []
    # The same row of two images is two lines.
    groups = {"a": rows, "b": rows[:1]}
    lines = write("layouts", {"groups": groups})
    assert lines == [f"{tiles} ({title}) | 1.50 | 7 | 1.40 to 1.60" for title in "ab"]
    us = {"mpi": 9e-6, "shm": 8e-6, "raw:mpi4py": 1e-6}
    groups = {
        f"all_reduce, float32, {ranks} ranks": rows_of("all_reduce", 16, us, ranks, wrong=["shm"])
        for ranks in (2, 4)
    }
    noise = "noise: the medians of rounds differ by 3.4 %, in a tenth of the cells by 5 % or more"
    what = "| us of a blocking all-reduce of 16 B (float32, {} ranks) by mpi, and raw mpi4py"
    assert write("comm", {"groups": groups, "facts": [noise]}) == [
        f"{what.format(ranks)} | 9.0 and 1.0 | 3 | 3.4 % of rounds" for ranks in (2, 4)
    ]
    cases = {"a": [row("1", predicted_s=1.0)]}
    assert write("choose", {"groups": cases, "facts": choice_facts(cases)}) == [
        "| mean error of a predicted step | 50.0% | 1 cases | median 50.0%",
        "| choices within 5% of the best measured layout | 1 of 1 | 1 cases | "
        "mean of Kendall's tau 1.00",
    ]


def test_stopped_or_failed_results_go_on_with_what_is_missing(tmp_path):
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPOSITORY / "scripts/results.sh", tmp_path / "scripts")
    (tmp_path / "python").write_text('#!/bin/sh\n[ "$1" != -c ] || cat commit\n')
    for_hires = """#!/bin/sh
        echo "$1 $2" >>ran
        ! grep -qx "$2" stop || exit 130
        ! grep -qx "$2" fail || exit 1
        echo "$*" >>done"""
    (tmp_path / "hires").write_text(for_hires)
    for name in ("python", "hires"):
        (tmp_path / name).chmod(0o755)

    def results(commit="abc", stop="", fail=""):
        for name, text in (("commit", commit), ("stop", stop), ("fail", fail), ("ran", "")):
            (tmp_path / name).write_text(f"{text}\n" if text else "")
        command = ["sh", "scripts/results.sh", str(tmp_path / "hires")]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.returncode, [
            line.split()[1] for line in (tmp_path / "ran").read_text().splitlines()
        ]

    assert results("abc-dirty-12345678") == (2, [])
    assert results(stop="precision") == (130, ["layouts", "precision"])
    assert results(fail="comm") == (1, ["precision", "comm", "comm", "choose"])
    assert "--table" not in (tmp_path / "done").read_text()  # a table of another commit
    assert results() == (0, ["comm", "comm"])
    assert "bench comm --table build/comm-tuning/table.json" in (tmp_path / "done").read_text()
    assert len(results()[1]) == 5  # all is measured anew
