"""Does ``hires bench`` hand everything on to the benchmark's own process?"""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_options_and_exit_code_are_the_benchmarks(hires, monkeypatch):
    seen = []

    def run(command, check):
        seen.append(command)
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(subprocess, "run", run)
    assert hires("bench", "layouts", "image=512", "--json", "--help").code == 7
    assert seen == [
        [sys.executable, "-m", "hires.bench.layouts_bench", "image=512", "--json", "--help"]
    ]


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_help_lists_the_benchmarks(hires, words):
    answer = hires("bench", *words)
    assert answer.code == 0
    assert "\n  layouts " in answer.out
