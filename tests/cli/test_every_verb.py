"""What holds for every verb, found by scanning ``hires.cli.verbs``: help whose examples can be
typed, exit codes, ``--json``, narrow screens, colours, completion, and no escape sequence."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hires.cli import verbs
from hires.cli.compose.choices import groups
from hires.cli.main import VERBS, main, module_of
from hires.cli.screens.screen import list_lines, table_lines
from hires.cli.start_run import StepProgress
from hires.core.errors import CommError, ConfigError, HiresError, PlanError
from hires.core.terminal import printable_output
from tests.helpers.commands import HOSTILE, REPOSITORY, SMALL, UNSEEN, tables_of

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
    "logs": ("RUN",),
    "retry": (),
    "cancel": ("RUN",),
    "list": ("runs",),
    "data": ("make", "d", "--classes", "2", "--count", "2", "--size", "16"),
}
"""Words with which verbs end with 0 where there is one complete run."""
MEASURING = {"quantize", "verify", "doctor"}
"""Verbs that start ranks or torch for their answer: their own tests read their JSON."""


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
    with contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return capsys.readouterr().out


def test_help_names_every_verb_and_exit_code(hires):
    answer = hires("--help")
    assert all(re.search(f"\n  {verb} +[a-z].*\\w\n", answer.out) for verb in FOUND)
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


def test_json_is_one_object(hires, good):
    for verb in GOOD:
        answer = hires(*good(verb, "--json"))
        assert answer.code == 0, answer.err
        assert isinstance(json.loads(answer.out), dict)
        if "--cfg" in OPTIONS[verb]:  # it was YAML
            assert isinstance(json.loads(hires(*good(verb, "--json", "--cfg", "job")).out), dict)


def test_tables_fit_a_narrow_screen_and_colours_move_nothing(hires, good, monkeypatch):
    for verb in ("plan", "show", "compare", "status", "list"):
        plain = hires(*good(verb)).out
        assert "\x1b" not in plain
        with monkeypatch.context() as patch:
            patch.setenv("FORCE_COLOR", "1")
            coloured = hires(*good(verb)).out
            assert re.sub(r"\x1b\[\d+m", "", coloured) == plain
            assert ("\x1b[32mdone" in coloured) == (verb in ("status", "list"))
            patch.setenv("NO_COLOR", "1")
            assert hires(*good(verb)).out == plain
        with monkeypatch.context() as patch:
            width = 80 if verb == "plan" else 50
            patch.setenv("COLUMNS", str(width))
            narrow = tables_of(hires(*good(verb)).out)
            assert max(map(len, narrow)) <= width < max(map(len, plain.splitlines()))


def test_lists_fold_on_a_narrow_screen(hires, monkeypatch):
    for what in ("keys", "aliases", "operators", "parallel.halo"):
        monkeypatch.setenv("COLUMNS", "40")  # `list keys` ended in a traceback
        assert hires("list", what).code == 0
        monkeypatch.setenv("COLUMNS", "80")
        assert max(map(len, hires("list", what).out.splitlines())) <= 80


def test_mistakes_end_with_2_and_one_paragraph(hires):
    for words, meant in (
        (["rn"], "did you mean run?"),
        (["xyzzy"], "choose one of bench, cancel"),
        (["parallel=sp"], "hires run parallel=sp"),
        (["--verbose"], "a verb comes first"),
        (["run", "--steps=3"], "write it as steps=VALUE"),
        (["bench", "layuots"], "did you mean layouts?"),
        (["tune", "com"], "unknown measurement 'com'"),
    ):
        answer = hires(*words)
        assert (answer.code, answer.out, meant in answer.err) == (2, "", True)
        assert (answer.err[:7], answer.err.count("\n")) == ("hires: ", 1)


def test_folder_that_is_not_there_is_refused(hires, tmp_path, monkeypatch):
    words = {"data": ["check", "."], "weights": ["show", "x"], "compare": ["a", "b"]}
    words |= {"list": ["runs"], "export": ["a", "--to", "csv"], "status": []}
    for option in ("--config-dir", "--results"):
        found = [verb for verb in OPTIONS if option in OPTIONS[verb]]
        assert len(found) > 5
        for verb in found:
            more = [] if option == "--config-dir" else ["a"]
            path = tmp_path / f"{verb}{option}"
            answer = hires(verb, *words.get(verb, more), option, str(path))
            assert (answer.code, str(path) in answer.err) == (2, True), verb
    monkeypatch.setenv("HIRES_CONF", str(tmp_path / "missing"))
    answer = hires("list", "models")
    assert (answer.code, "HIRES_CONF" in answer.err) == (2, True)


def test_class_of_an_error_decides_the_exit_code_and_a_bug_keeps_its_traceback(hires, monkeypatch):
    def ends_with(error):
        def fail(words):
            raise error

        monkeypatch.setattr("hires.cli.verbs.verb_list.main", fail)
        return hires("list", "--json")

    for error, code in ((HiresError, 1), (CommError, 1), (ConfigError, 2), (PlanError, 3)):
        answer = ends_with(error("because"))
        assert (answer.code, answer.err) == (code, "hires: because\n")
        body = {"type": error.__name__, "text": "because", "exit_code": code}
        assert json.loads(answer.out) == {"error": body}
    assert ends_with(KeyboardInterrupt()).code == 130
    with pytest.raises(ZeroDivisionError):
        ends_with(ZeroDivisionError())


def test_reader_that_stops_early_is_no_error():
    command = f"{sys.executable} -m hires list | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
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


def test_completion_offers_what_can_follow(hires, tmp_path):
    folder = Path("results/mine/one-0123abcd")
    folder.mkdir(parents=True)
    (folder / "config.yaml").touch()
    layouts = ["parallel=sp+lp", "parallel=sp+lp+dp", "parallel=sp+lp+local_dp"]
    for words, offered in (
        ([], sorted(VERBS)),
        (["run", "parallel=sp+l"], layouts),
        (["run", "--ag"], ["--again"]),
        (["sweep", "experiment=lay"], ["experiment=layouts"]),
        (["sweep", "--order", ""], ["grouped", "interleaved"]),
        (["nonsense", "x"], []),
        (["status", ""], ["mine", str(folder)]),
    ):
        answer = hires("_complete", *words)
        assert (answer.code, answer.err, answer.out.split()) == (0, "", offered), words
    for shell in ("zsh", "fish"):
        assert "_complete" in hires("completion", shell).out
    # In a real bash
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
        assert (done.stderr, replies <= {*done.stdout.split()}) == ("", True)


def test_words_of_the_command_line_reach_no_terminal_as_escapes(hires):
    for words in (
        ("run", f"campaign={HOSTILE}"),
        ("run", f"model={HOSTILE}"),
        ("list", "runs", "--where", HOSTILE),
        (HOSTILE,),
        (f"--{HOSTILE}",),
        *((verb, HOSTILE) for verb in ("show", "report", "status", "logs", "cancel", "list")),
        ("show", "a\0b"),
    ):
        answer = hires(*words)
        assert answer.code in range(1, 5)
        assert not UNSEEN & set(answer.out + answer.err)
        assert "Traceback" not in answer.err


def test_bench_and_tune_become_the_benchmark_that_they_name(hires, monkeypatch):
    def become(program, words):
        raise SystemExit(words[-1])

    monkeypatch.setattr("os.execv", become)
    for words, facts in (
        (("bench", "comm", "--ranks", "3"), {"kind": "comm", "ranks": [3], "out": ""}),
        (("tune", "comm", "--noise", "0.2"), {"kind": "tune", "noise": 0.2, "force": False}),
    ):
        with pytest.raises(SystemExit) as caught:
            hires(*words)
        assert facts.items() <= json.loads(Path(str(caught.value)).read_text()).items()
    monkeypatch.undo()
    assert "\n  layouts " in hires("bench").out
    assert "batch: 3\n" in hires("bench", "layouts", "--cfg", "job", "batch=3").out


def test_what_a_terminal_would_obey_is_replaced_and_letters_of_all_languages_stay(monkeypatch):
    def printed(text: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as output, printable_output():
            sys.stdout.write(text)
        return output.getvalue()

    monkeypatch.setenv("FORCE_COLOR", "1")
    text = printed(f"a\tb {HOSTILE}\nnext\n")
    assert not UNSEEN & set(text)
    assert text.startswith("a\tb \N{REPLACEMENT CHARACTER}]0;owned")
    assert text.endswith("\nnext\n")
    text = "Größe 画像 µs ─ 1\u00a0000 é e\u0301\n"
    assert printed(text) == text
    # Cells of tables go around that: states are in colours.
    lines = "\n".join(table_lines([("state", "note"), ("done", f"\x1b[2J{HOSTILE}")]))
    assert not UNSEEN & set(lines.replace("\x1b[32mdone\x1b[0m", ""))


def test_narrow_table_names_what_it_leaves_out_and_cuts_no_name(monkeypatch):
    row = ("a" * 30, "fp32", "b c " * 9, "1234.5")
    rows = [("run", "precision", "note", "img/s"), row, ("c" * 30, "fp32", "d", "1.5")]
    assert table_lines(rows)[0].split() == ["run", "precision", "note", "img/s"]
    assert table_lines(rows)[2].split()[:3] == ["a" * 30, "fp32", "b"]
    for width, left_out in ((70, ""), (56, "every row"), (40, "left out: note, img/s")):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = table_lines(rows, "lllr")
        assert max(map(len, lines)) <= width
        assert "a" * 30 in lines[2]  # names were folded inside
        assert left_out in " ".join(lines)
        assert ("every row: precision fp32" in " ".join(lines)) == (width < 70)
    assert table_lines(rows[:2])[-1].split() == ["img/s", "1234.5"]  # a list
    monkeypatch.setenv("COLUMNS", "20")
    assert list_lines([("a", "one two three four five")])[1] == "   four five"


def test_step_counts_when_every_rank_has_it(capsys):
    stream = io.StringIO()
    with StepProgress(2, 6, 50, stream) as shown:
        shown({"kind": "ready", "rank": 0})
        for step in range(50):
            for rank in range(2):
                assert (stream.getvalue() == "") == (step == 0)
                loss = 2.0 - step if rank else None
                line = {"kind": "step", "rank": rank, "step": step, "step_s": 0.5 + rank}
                shown({**line, "loss": loss})
    # The slowest rank decides: 6 images in 1.5 s. A quick run has its first and last step.
    begin, end = stream.getvalue().splitlines()
    assert (begin.startswith("step 1/50"), "4 img/s" in begin) == (True, True)
    assert end.startswith("step 50/50")
    assert capsys.readouterr().out == ""  # standard output is for the result
