"""What holds for every verb, found by scanning ``hires.cli.verbs``: help whose examples can be
typed, exit codes, ``--json``, narrow screens, colours, completion, and no escape sequence."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hires.cli import main as main_module
from hires.cli import verbs
from hires.cli.compose.choices import groups
from hires.cli.main import VERBS, main, module_of
from hires.core.errors import CommError, ConfigError, HiresError, PlanError
from tests.helpers.commands import SMALL, tables_of

FOUND = sorted(path.stem.removeprefix("verb_") for path in Path(verbs.__path__[0]).glob("verb_*"))
PARSERS = {verb: module_of(verb).PARSER for verb in FOUND if verb not in ("bench", "tune")}
"""Of the verbs that have options of their own; those of the others are a benchmark's."""
OPTIONS = {verb: parser._option_string_actions for verb, parser in PARSERS.items()}
GROUPS = {"data": "make", "weights": "show"}
"""Verbs whose first word is an action."""
GOOD = {
    "run": (*SMALL, "parallel=sp"),
    "sweep": (*SMALL, "parallel=sp", "seed=0,1", "--dry-run"),
    "plan": (*SMALL, "parallel=sp"),
    "show": ("RUN",),
    "report": ("--format", "csv"),
    "compare": ("RUN", "RUN"),
    "export": ("--to", "csv", "--out", "out"),
    "weights": ("show", "w.safetensors"),
    "status": (),
    "list": ("runs",),
    "data": ("make", "d", "--classes", "2", "--count", "2", "--size", "16"),
}
"""Words with which verbs end with 0 where there is one complete run."""
MEASURING = {"quantize", "verify", "doctor"}
"""Verbs that start ranks or torch for their answer: their own tests read their JSON."""
HOSTILE = "\x1b]0;owned\x07\x1b[31mred\x9b2J\u202etxt.exe\u2066\u200b\x00\r\ud800\u2028"
UNSEEN = set("\x1b\x07\x9b\u202e\u2066\u200b\x00\r\ud800\u2028")


@pytest.fixture
def good(finished, tmp_path):
    """Returns the words of a verb, with the complete run in the place of RUN."""
    save_file({"a": np.zeros(4, np.float32)}, tmp_path / "w.safetensors")

    def words(verb: str, *more: str) -> list[str]:
        named = [str(finished) if word == "RUN" else word for word in GOOD[verb]]
        return [verb, *named, *more]

    return words


def help_of(capsys, *words: str) -> str:
    """Returns a help text, after which argparse ends the process."""
    code: object = 0
    try:
        code = main([*words, "--help"])
    except SystemExit as end:
        code = end.code
    assert code == 0
    return capsys.readouterr().out


def test_help_names_every_verb_and_exit_code(hires):
    assert sorted(VERBS) == FOUND
    answer = hires("--help")
    assert answer.code == 0
    assert all(f"\n  {verb} " in answer.out for verb in VERBS)
    assert "0 ok, 1 run failed, 2 bad config, 3 infeasible plan" in answer.out
    assert hires("--version").out.startswith("hires 0.")


@pytest.mark.parametrize("verb", FOUND)
def test_help_examples_completion_and_mistakes(verb, hires, capsys, tmp_path):
    text = help_of(capsys, verb)
    assert f"usage: hires {verb}" in text
    # An option that is not there ends with 2 and one line, as JSON too.
    answer = hires(verb, "--nosuch" if verb in PARSERS else "nosuch")
    assert (answer.code, answer.out) == (2, "")
    assert (answer.err[:7], answer.err.count("\n"), "nosuch" in answer.err) == ("hires: ", 1, True)
    if verb not in PARSERS:
        return
    if "--json" in OPTIONS[verb]:
        body = json.loads(hires(verb, "--nosuch", "--json").out)["error"]
        assert (body["type"], body["exit_code"]) == ("ConfigError", 2)
        assert body["text"] in answer.err
        assert (verb in GOOD) != (verb in MEASURING)
    # The shell offers the options of the help.
    shown = help_of(capsys, verb, GROUPS[verb]) if verb in GROUPS else text
    options = shown.split("examples:")[0].partition("options:")[2]
    lines = [line.strip() for line in options.splitlines() if line.strip().startswith("-")]
    named = {name for line in lines for name in re.findall(r"--[a-z-]+", line.split("  ")[0])}
    assert named | {"--help"} == {*hires("_complete", verb, "--").out.split()}
    # Every example can be typed.
    examples = text.partition("examples:\n")[2].splitlines() if verb != "completion" else []
    for example in examples:
        line = re.split(r"\s{2,}", example.strip())[0].replace("/data/results", str(tmp_path))
        program, other, *words = shlex.split(line)
        assert program == "hires"
        PARSERS[other].read(words)  # raises a ConfigError
    assert f"hires {verb}" in "".join(examples[:1]) or verb == "completion"


@pytest.mark.parametrize("verb", GOOD)
def test_json_is_one_object(verb, hires, good):
    answer = hires(*good(verb, "--json"))
    assert answer.code == 0, answer.err
    assert isinstance(json.loads(answer.out), dict)


TABLES = ("plan", "show", "compare", "status", "list")


@pytest.mark.parametrize(
    ("verb", "width"), [("plan", 80), *((verb, 40) for verb in TABLES if verb != "plan")]
)
def test_no_table_is_wider_than_a_narrow_screen(verb, width, hires, good, monkeypatch):
    whole = hires(*good(verb)).out
    monkeypatch.setenv("COLUMNS", str(width))
    answer = hires(*good(verb))
    assert answer.code == 0, answer.err
    assert max(map(len, tables_of(answer.out))) <= width < max(map(len, whole.splitlines()))


@pytest.mark.parametrize("what", ["keys", "aliases", "operators", "parallel.halo"])
def test_lists_fold_on_a_narrow_screen(what, hires, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")  # `list keys` ended in a traceback
    assert hires("list", what).code == 0
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, hires("list", what).out.splitlines())) <= 80


def test_colours_are_for_terminals_and_move_nothing(hires, good, monkeypatch):
    for verb in TABLES:
        plain = hires(*good(verb)).out
        assert "\x1b" not in plain
        with monkeypatch.context() as patch:
            patch.setenv("FORCE_COLOR", "1")
            coloured = hires(*good(verb)).out
            assert re.sub(r"\x1b\[\d+m", "", coloured) == plain
            assert ("\x1b[32mdone" in coloured) == (verb in ("status", "list"))
            patch.setenv("NO_COLOR", "1")
            assert hires(*good(verb)).out == plain


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["rn"], "did you mean run?"),
        (["xyzzy"], "choose one of run, sweep"),
        (["parallel=sp"], "hires run parallel=sp"),
        (["--verbose"], "a verb comes first"),
        (["run", "--steps=3"], "write it as steps=VALUE"),
        (["bench", "layuots"], "did you mean layouts?"),
        (["tune", "com"], "unknown measurement 'com'"),
    ],
)
def test_mistakes_end_with_2_and_one_paragraph(hires, words, meant):
    answer = hires(*words)
    assert (answer.code, answer.out) == (2, "")
    assert meant in answer.err
    assert answer.err.startswith("hires: ")
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [(HiresError, 1), (CommError, 1), (ConfigError, 2), (PlanError, 3)],
)
def test_error_class_decides_the_exit_code(hires, monkeypatch, error, code):
    def fail(words):
        raise error("because")

    monkeypatch.setattr("hires.cli.verbs.verb_list.main", fail)
    answer = hires("list", "--json")
    assert (answer.code, answer.err) == (code, "hires: because\n")
    body = {"type": error.__name__, "text": "because", "exit_code": code}
    assert json.loads(answer.out) == {"error": body}


def test_interrupt_ends_with_130_and_a_bug_keeps_its_traceback(hires, monkeypatch):
    def interrupted(words):
        raise KeyboardInterrupt

    monkeypatch.setattr("hires.cli.verbs.verb_list.main", interrupted)
    assert hires("list").code == 130
    monkeypatch.setattr("hires.cli.verbs.verb_list.main", lambda words: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        hires("list")


def test_reader_that_stops_early_is_no_error():
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{sys.executable} -m hires list | head -1"],
        cwd=str(main_module.__file__).rsplit("/hires/", 1)[0],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


LOADED = """
import contextlib, io, sys
from hires.cli.main import main
with contextlib.redirect_stdout(io.StringIO()):
    for words in (["--help"], ["list"], ["_complete", "run", "par"], ["status"]):
        assert main(words) == 0
print("\\n".join(sys.modules))
"""


def test_quick_verbs_load_nothing_that_is_slow_to_load(python):
    # Each of these takes a tenth of a second or more; without them an answer takes about as much.
    slow = {"torch", "numpy", "pandas", "hydra", "omegaconf", "matplotlib", "submitit", "rich"}
    answer = python("-c", LOADED)
    assert answer.code == 0, answer.err
    assert not slow & {*answer.out.split()}


def test_completion_offers_what_can_follow(hires):
    folder = Path("results/mine/one-0123abcd")
    folder.mkdir(parents=True)
    (folder / "config.yaml").touch()
    for words, offered in (
        ([], sorted(VERBS)),
        (
            ["run", "parallel=sp+l"],
            ["parallel=sp+lp", "parallel=sp+lp+dp", "parallel=sp+lp+local_dp"],
        ),
        (["run", "--ag"], ["--again"]),
        (["list", "mod"], ["model"]),
        (["data", ""], ["check", "make"]),
        (["nonsense", "x"], []),
        (["status", ""], ["mine", str(folder)]),
        (["retry", "--state", "f"], ["failed"]),
    ):
        answer = hires("_complete", *words)
        assert (answer.code, answer.err, answer.out.split()) == (0, "", offered), words
    for shell in ("zsh", "fish"):
        assert "_complete" in hires("completion", shell).out


def test_bash_script_completes_in_a_real_bash(hires, tmp_path):
    command = tmp_path / "bin" / "hires"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m hires "$@"\n')
    command.chmod(0o755)
    (tmp_path / "script").write_text(hires("completion", "bash").out)
    for line, replies in (
        ("hires run parallel=sp+lp+", {"sp+lp+dp", "sp+lp+local_dp"}),  # behind bash's = of words
        ("hires run ", {f"{group}=" for group in groups()}),
    ):
        asked = (
            f"PATH={command.parent}:$PATH; . {tmp_path}/script; compopt() {{ :; }}; "
            f'COMP_LINE="{line}"; COMP_POINT={len(line)}; _hires; '
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
        assert done.stderr == ""
        assert replies <= {*done.stdout.split()}


@pytest.mark.parametrize(
    "words",
    [
        ("run", f"campaign={HOSTILE}"),
        ("run", f"model={HOSTILE}"),
        ("compare", HOSTILE, HOSTILE),
        ("list", HOSTILE),
        ("list", "runs", "--where", HOSTILE),
        (HOSTILE,),
        (f"--{HOSTILE}",),
        *((verb, HOSTILE) for verb in ("show", "report", "status", "logs", "cancel", "retry")),
        ("show", "a\0b"),
    ],
)
def test_words_of_the_command_line_reach_no_terminal_as_escapes(hires, words):
    answer = hires(*words)
    assert answer.code in range(1, 5)
    assert not UNSEEN & set(answer.out + answer.err)
    assert "Traceback" not in answer.err


def test_bench_and_tune_become_the_benchmark_that_they_name(hires, monkeypatch):
    seen = []

    def become(program, words):
        seen.append(json.loads(Path(words[-1]).read_text()))
        raise SystemExit(0)

    monkeypatch.setattr("os.execv", become)
    for words in (("bench", "comm", "--ranks", "3"), ("tune", "comm", "--noise", "0.2")):
        with contextlib.suppress(SystemExit):
            hires(*words)
    comm, tune = seen
    assert (comm["kind"], comm["ranks"], comm["out"]) == ("comm", "3", "")
    assert (tune["kind"], tune["noise"], tune["force"]) == ("tune", 0.2, False)
    monkeypatch.undo()
    assert "\n  layouts " in hires("bench").out
