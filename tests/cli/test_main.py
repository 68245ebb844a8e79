"""How does the command line begin and end?"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hires.cli import main as main_module
from hires.cli.main import VERBS
from hires.core.errors import CommError, ConfigError, HiresError, PlanError, RunError


def test_help_names_every_verb_and_exit_code(hires):
    answer = hires("--help")
    assert answer.code == 0
    assert all(f"\n  {verb} " in answer.out for verb in VERBS)
    assert "0 ok, 1 run failed, 2 bad config, 3 infeasible plan" in answer.out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb, capsys):
    # argparse ends the process after it has printed, so the code is in the exception or returned.
    code: object = 0
    try:
        code = main_module.main([verb, "--help"])
    except SystemExit as end:
        code = end.code
    assert code == 0
    assert f"usage: hires {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "verb", ["run", "sweep", "plan", "verify", "show", "list", "doctor", "completion"]
)
def test_help_of_a_verb_ends_in_examples(capsys, verb):
    with pytest.raises(SystemExit):
        main_module.main([verb, "--help"])
    assert f"examples:\n  {'eval' if verb == 'completion' else 'hires ' + verb}" in (
        capsys.readouterr().out
    )


def test_version(hires):
    assert hires("--version").out.startswith("hires 0.")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["rn"], "did you mean run?"),
        (["xyzzy"], "choose one of run, sweep"),
        (["parallel=sp"], "hires run parallel=sp"),
        (["--verbose"], "a verb comes first"),
        (["run", "--agian"], "--again"),
        (["run", "--steps=3"], "write it as steps=VALUE"),
        (["run", "--cfg"], "expected one argument"),
        (["run", "--cfg", "hydra"], "invalid choice"),
        (["list", "parallell"], "did you mean parallel?"),
        (["data", "mke"], "did you mean make?"),
        (["bench", "layuots"], "did you mean layouts?"),
        (["completion", "basch"], "did you mean bash?"),
        (["show"], "RUN"),
    ],
)
def test_mistakes_exit_2_with_one_paragraph(hires, words, meant):
    answer = hires(*words)
    assert answer.code == 2
    assert answer.out == ""
    assert meant in answer.err
    assert answer.err.startswith("hires: ")
    assert answer.err.count("\n") == 1


def test_options_may_stand_before_and_between_overrides(hires):
    first = hires("run", "--cfg", "job", "steps=20", "batch=4")
    between = hires("run", "steps=20", "--cfg", "job", "batch=4")
    assert first.out == between.out
    assert "steps: 20\n" in first.out


@pytest.mark.parametrize(
    ("error", "code"),
    [(HiresError, 1), (RunError, 1), (CommError, 1), (ConfigError, 2), (PlanError, 3)],
)
def test_error_class_decides_the_exit_code(hires, monkeypatch, error, code):
    def fail(words):
        raise error("because")

    monkeypatch.setattr("hires.cli.verbs.verb_list.main", fail)
    answer = hires("list", "--json")
    assert answer.code == code
    assert answer.err == "hires: because\n"
    body = {"type": error.__name__, "text": "because", "exit_code": code}
    assert json.loads(answer.out) == {"error": body}


def test_bug_of_hires_keeps_its_traceback(hires, monkeypatch):
    monkeypatch.setattr("hires.cli.verbs.verb_list.main", lambda words: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        hires("list")


def test_interrupt_exits_130(hires, monkeypatch):
    def interrupted(words):
        raise KeyboardInterrupt

    monkeypatch.setattr("hires.cli.verbs.verb_list.main", interrupted)
    assert hires("list").code == 130


def test_reader_that_stops_early_is_no_error(tmp_path):
    command = f"{sys.executable} -m hires list | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=main_module.__file__.rsplit("/hires/", 1)[0],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


LOADED = """
import contextlib, io, sys
from hires.cli.main import main
with contextlib.redirect_stdout(io.StringIO()):
    assert main(sys.argv[1:]) == 0
print("\\n".join(sys.modules))
"""


@pytest.mark.parametrize("words", [["--help"], ["list"], ["_complete", "run", "par"], ["status"]])
def test_quick_verbs_load_nothing_that_is_slow_to_load(python, words):
    # Each of these takes a tenth of a second or more; without them an answer takes about as much.
    slow = {"torch", "numpy", "pandas", "hydra", "omegaconf", "matplotlib", "submitit", "rich"}
    answer = python("-c", LOADED, *words)
    assert answer.code == 0, answer.err
    loaded = answer.out.split()
    assert "hires" in loaded
    assert not slow & set(loaded)
    # hires' own modules are small, and every group of keys adds one.
    ours = {name for name in loaded if name.startswith("hires.")}
    before = python("-c", "import sys; print(*sys.modules)").out.split()
    assert len(set(loaded) - ours - set(before)) < 150
