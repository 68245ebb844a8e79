"""``hires bench`` composes rows and becomes what measures them; messages have their own options."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from hires.core.python_command import module_command


class ReplacedError(BaseException):
    """Stands for the process that this one becomes."""


@pytest.fixture
def became(monkeypatch):
    """The commands that this process became."""
    seen = []

    def execv(program, words):
        assert program == sys.executable
        seen.append(words)
        raise ReplacedError

    monkeypatch.setattr(os, "execv", execv)
    return seen


def test_rows_are_composed_for_the_process_that_measures_them(hires, became, tmp_path):
    with pytest.raises(ReplacedError):
        hires("bench", "layouts", "image=64", "--only", "dp", "--rounds", "3", "--json")
    [[*words, file]] = became
    assert words == module_command("hires.bench.bench_main")
    task = json.loads(Path(file).read_text())
    Path(file).unlink()
    assert (task["name"], task["rounds"], task["json"]) == ("layouts", 3, True)
    assert task["command"] == "hires bench layouts image=64 --only dp --rounds 3 --json"
    assert {row["config"]["image"][0] for row in task["rows"]} == {64}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["bench", "comm", "--quick", "--help"], ["bench", "--quick", "--help"]),
        (["tune", "comm", "--ranks", "2,4"], ["tune", "--ranks", "2,4"]),
    ],
)
def test_messages_have_options_of_their_own(hires, became, words, expected):
    with pytest.raises(ReplacedError):
        hires(*words)
    assert became == [module_command("hires.bench.comm_bench", *expected)]


def test_calibration_takes_keys_of_a_network(hires, became):
    with pytest.raises(ReplacedError):
        hires("doctor", "--calibrate", "--json")
    assert became == [module_command("hires.bench.calibrate_machine", "--json")]
    with pytest.raises(ReplacedError):
        hires("doctor", "--calibrate", "model=unet", "image=64")
    *words, option, file = became[1]
    assert [*words, option] == module_command("hires.bench.calibrate_machine", "--config")
    config = json.loads(Path(file).read_text())
    Path(file).unlink()
    assert (config["model"]["name"], config["image"]) == ("unet", [64, 64])
    answer = hires("doctor", "--calibrate", "--nodes", "2")
    assert answer.code == 2
    assert "`hires doctor --calibrate` measures this machine and takes no --config" in answer.err


def test_unknown_names_are_refused(hires):
    for words, name in ((("tune", "com"), "measurement 'com'"), (("bench", "lay"), "'lay'")):
        answer = hires(*words)
        assert answer.code == 2
        assert f"unknown {name}" in answer.err or f"unknown benchmark {name}" in answer.err


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_help_lists_the_benchmarks(hires, words):
    answer = hires("bench", *words)
    assert answer.code == 0
    assert "\n  layouts " in answer.out
    assert hires("tune", *words).code == 0
