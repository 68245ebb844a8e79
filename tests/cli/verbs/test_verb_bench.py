"""``hires bench`` hands everything on to the benchmark, which it becomes."""

from __future__ import annotations

import os
import sys

import pytest

from hires.core.python_command import module_command


def test_options_are_the_benchmarks(hires, monkeypatch):
    seen = []

    class Replaced(BaseException):
        pass

    def become(program, words):
        seen.append((program, words))
        raise Replaced

    monkeypatch.setattr(os, "execv", become)
    with pytest.raises(Replaced):
        hires("bench", "layouts", "image=512", "--json", "--help")
    words = module_command("hires.bench.layouts_bench", "image=512", "--json", "--help")
    assert seen == [(sys.executable, words)]


@pytest.mark.slow
def test_exit_code_is_the_benchmarks(python):
    assert python("-m", "hires", "bench", "comm", "--timeout", "0").code == 2


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_help_lists_the_benchmarks(hires, words):
    answer = hires("bench", *words)
    assert answer.code == 0
    assert "\n  layouts " in answer.out
