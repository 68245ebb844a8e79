"""``hires tune comm`` becomes the measurement, which keeps what it measured in a folder."""

from __future__ import annotations

import os

import pytest

from hires.bench import comm_tuning
from hires.core.python_command import module_command


def test_measurement_takes_the_options(hires, monkeypatch):
    seen = []

    class Replaced(BaseException):
        pass

    def become(program, words):
        seen.append(words)
        raise Replaced

    monkeypatch.setattr(os, "execv", become)
    with pytest.raises(Replaced):
        hires("tune", "comm", "--ranks", "2,4")
    assert seen == [module_command("hires.bench.comm_tuning", "--ranks", "2,4")]


def test_unknown_name_is_refused(hires):
    answer = hires("tune", "com")
    assert answer.code == 2
    assert "unknown measurement 'com'" in answer.err
    assert hires("tune").code == 0


def test_folder_has_a_default(monkeypatch):
    seen = []
    monkeypatch.setattr(comm_tuning.BENCHMARK.__class__, "main", lambda *given: seen.append(given))
    for words, expected in (([], ["--out", "comm-tuning"]), (["--out=x"], ["--out=x"])):
        monkeypatch.setattr("sys.argv", ["tune", *words])
        comm_tuning.main()
        assert seen[-1][1:] == (expected, "hires tune comm")
