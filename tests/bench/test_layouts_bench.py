"""Does ``hires bench layouts`` run for real, and does it refuse what makes no sense?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from hires.bench.layouts_bench import BENCHMARK
from tests.conftest import REPOSITORY
from tests.helpers.patience import PATIENCE_S


@pytest.mark.slow
@pytest.mark.dist
def test_all_rows_run_and_are_right(python, tmp_path):
    folder = tmp_path / "kept"
    # Its norms see enough pixels that gradients have little noise, which would excuse errors.
    small = ["--model", "preact_resnet11", "--image", "32", "--batch", "2", "--microbatches", "2"]
    quick = ["--rounds", "1", "--warmup", "0", "--no-memory", "--json", "--out", str(folder)]
    quick += ["--device", "cpu"]
    answer = python("-m", "hires.bench.layouts_bench", *small, *quick)
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert found["ok"]
    for task, wanted in (("train", {"tiles 2x1", "pp 1f1b", "dp"}), ("infer", {"tiles 1x2", "pp"})):
        rows = {row["name"]: row for row in found["tasks"][task]}
        assert wanted < set(rows)
        for row in rows.values():
            assert row["step_s"]["median"] > 0
            assert row["ok"], row
            assert (row["error"] is None) == (row["name"] == "half images")
            assert row["error"] is None or row["error"]["gradient"] < 1e-4
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "layouts.json"]


@pytest.mark.slow
@pytest.mark.dist
def test_bench_that_is_stopped_shows_and_keeps_its_rounds(tmp_path):
    folder = tmp_path / "kept"
    words = ["--model", "preact_resnet11", "--image", "32", "--only", "dp", "--task", "infer"]
    words += ["--rounds", "10000", "--warmup", "0", "--no-memory", "--out", str(folder)]
    words += ["--device", "cpu"]
    command = [sys.executable, "-m", "hires", "bench", "layouts", *words]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, env=environ, **pipes) as bench:
        try:
            while not (folder / "layouts.json").exists() and bench.poll() is None:
                time.sleep(0.05)
            bench.send_signal(signal.SIGTERM)
            assert bench.wait(PATIENCE_S) == 130
            assert "two modules" in bench.stdout.read()
        finally:
            bench.kill()
    kept = json.loads((folder / "layouts.json").read_text())
    assert not kept["complete"]
    counts = {row["name"]: len(row["samples_s"]) for row in kept["tasks"]["infer"]}
    assert counts.keys() > {"single", "dp", "two modules"}
    assert min(counts.values()) == max(counts.values()) >= 1


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--model", "vgg16"], 2, "vgg16 is unknown"),
        (["--image", "big"], 2, "must be n or HxW"),
        (["--image", "0"], 2, "must be n or HxW"),
        (["--only", "sp,tp"], 2, "--only tp is unknown; choose from sp,pp,dp"),
        (["--device", "tpu"], 2, "--device tpu is unknown; use auto, cpu, cuda, simulated"),
        (["--rounds", "0"], 2, "--rounds 0 must be at least 1"),
        (["--warmup", "-1"], 2, "--warmup -1 must be at least 0"),
        (["--model", "resnet18", "--image", "1x8", "--task", "infer"], 3, "use at most 1"),
    ],
)
def test_bad_options_are_told_before_any_rank_starts(words, code, told, monkeypatch, capsys):
    monkeypatch.setattr(
        "hires.bench.layouts_bench.stream_ranks", lambda *_, **__: pytest.fail("a rank started")
    )
    assert BENCHMARK.main(words) == code
    assert told in capsys.readouterr().err
