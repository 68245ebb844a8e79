"""What holds for every verb, found by scanning ``hires.cli.verbs``: help whose examples can be
typed, exit codes, ``--json``, narrow screens, colours, completion, and no escape sequence."""

from __future__ import annotations

import collections
import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from safetensors.numpy import save_file

from hires.bench import bench_main
from hires.cli import planning, verbs
from hires.cli.choices import groups
from hires.cli.main import VERBS, module_of, parser_of
from hires.cli.screen import list_lines, table_lines
from hires.cli.start_run import StepProgress
from hires.cli.verbs import verb_weights
from hires.core.errors import CommError, ConfigError, HiresError, PlanError
from hires.core.streams import printable_output
from hires.data.make_data import make_data
from tests.helpers.commands import HOSTILE, REPOSITORY, SMALL, UNSEEN, tables_of

FOUND = sorted(path.stem.removeprefix("verb_") for path in Path(verbs.__path__[0]).glob("verb_*"))
SUBVERBS = {verb: [*getattr(module_of(verb), "SUBVERBS", ())] for verb in FOUND}
LINES = {
    " ".join((verb, *sub)): parser_of(verb, sub)
    for verb in FOUND
    for sub in [(), *((word,) for word in SUBVERBS[verb])]
}
"""Every verb, alone and with each of its sub-verbs, with the parser of what follows."""
CALLED = [line for line in LINES if " " in line or not SUBVERBS[line]]
OPTIONS = {line: parser._option_string_actions for line, parser in LINES.items()}
WITHOUT_JSON = {"completion", *(f"completion {shell}" for shell in SUBVERBS["completion"])}
GOOD = {
    "run": (*SMALL, "parallel=sp"),
    "sweep": (*SMALL, "parallel=sp", "seed=0,1", "--dry-run"),
    "plan": (*SMALL, "parallel=sp"),
    "show": ("RUN",),
    "report": ("--format", "csv"),
    "compare": ("RUN", "RUN"),
    "export": ("--to", "csv", "--out", "out"),
    "weights show": ("w.safetensors",),
    "weights import": ("w.safetensors", "--out", "out.safetensors", SMALL[0]),
    "weights export": ("w.safetensors", "--out", "out.safetensors"),
    "logs": ("RUN",),
    "cancel": ("RUN",),
    "list": ("runs",),
    "data make": ("d", "--classes", "2", "--count", "2", "--size", "16"),
    "data check": ("images",),
    "bench layouts": ("--only", "single"),
    "bench precision": ("--only", "hires fp32"),
    "bench choose": ("--only", "resnet18", "image=32"),
    # These start ranks or torch for their answer, which their own tests read.
    **dict.fromkeys(("quantize", "verify", "doctor"), ("--cfg", "job")),
}
"""Words with which a line ends with 0 where there is one complete run; others need none."""
WRONG = {
    "compare": ("nosuch", "nosuch"),
    "export": ("nosuch", "--to", "csv", "--out", "out"),
    "data make": ("d", "nosuch"),
}
"""Words of which one means nothing; for others ``nosuch`` is enough."""
AS_THEY_ARE = {*WITHOUT_JSON, "quantize", "verify", "doctor", "logs"}
"""Lines whose answers are scripts, YAML and logs, which are not folded."""
FAILS = 4
"""Rounds with which a benchmark cannot be measured."""


class Measured:
    """Stands for the module of the benchmark that this process becomes."""

    @staticmethod
    def measure(task):
        if task["rounds"] == FAILS:
            raise PlanError("because")
        yield {"groups": {}, "facts": ["device: cpu"]}


@pytest.fixture
def good(finished, tmp_path, monkeypatch):
    """Returns the words of a line, with the complete run in the place of RUN."""

    class Process(planning.TorchProcess):
        tensors: ClassVar = collections.defaultdict(list)

        def write_weights(self, *words):
            return {"tensors": 1, "bytes": 16}

    def become(program, words):
        return bench_main.run(json.loads(Path(words[-1]).read_text()), Measured)

    monkeypatch.setattr(verb_weights, "TorchProcess", Process)
    monkeypatch.setattr(verb_weights, "shapes_of", lambda graph: {"a": [4]})
    monkeypatch.setattr("os.execv", become)
    save_file({"a": np.zeros(4, np.float32)}, tmp_path / "w.safetensors")
    make_data("textures", tmp_path / "images", classes=1, count=1, size=[16, 16], seed=0)

    def words(line: str, *more: str) -> list[str]:
        named = [str(finished) if word == "RUN" else word for word in GOOD.get(line, ())]
        return [*line.split(), *named, *more]

    return words


def test_help_names_every_verb_and_exit_code(hires, monkeypatch):
    answer = hires("--help")
    assert all(re.search(f"\n  {verb} +[a-z].*\\w\n", answer.out) for verb in FOUND)
    assert "0 ok, 1 run failed, 2 bad config, 3 infeasible plan" in answer.out
    assert hires("--version").out.startswith("hires 0.")
    monkeypatch.setenv("COLUMNS", "40")
    about, *_ = hires("--help").out.split("\nexamples:")
    assert max(map(len, about.splitlines())) <= 40


@pytest.mark.parametrize("line", LINES)
def test_help_fits_the_screen_and_its_options_and_examples_can_be_typed(
    line, hires, tmp_path, monkeypatch
):
    verb, *_ = words = line.split()
    for width in (40, 60, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        answer = hires(*words, "--help")
        assert (answer.code, answer.err) == (0, "")
        about, _, examples = answer.out.partition("\nexamples:\n")
        assert about.startswith(f"usage: hires {verb}")
        assert max(map(len, about.splitlines())) <= width
    # The shell offers the options of the help.
    options = about.partition("\noptions:\n")[2]
    named = {*re.findall(r"^  (?:-\w[^-]*, )?(--[a-z-]+)", options, re.MULTILINE)}
    assert named | {"--help"} == {*hires("_complete", *words, "--").out.split()}
    if words == [verb]:
        assert {*SUBVERBS[verb]} <= {*hires("_complete", verb, "").out.split()}
    # Every example can be typed.
    for example in examples.splitlines() if verb != "completion" else ():
        typed = re.split(r"\s{2,}", example.strip())[0].replace("/data/results", str(tmp_path))
        program, other, *others = shlex.split(typed)
        assert program == "hires"
        parser_of(other, others).read(others)  # raises a ConfigError
    assert f"hires {verb}" in examples or verb == "completion"


@pytest.mark.parametrize("line", LINES)
def test_mistakes_end_with_2_and_one_paragraph(line, hires, good):
    for more in (["--nosuch"], WRONG.get(line, ["nosuch"])):
        answer = hires(*line.split(), *more)
        assert (answer.code, answer.out) == (2, "")
        assert (answer.err[:7], answer.err.count("\n")) == ("hires: ", 1)
        assert "nosuch" in answer.err
        if line not in WITHOUT_JSON:
            error = json.loads(hires(*line.split(), *more, "--json").out)["error"]
            assert (error["type"], error["exit_code"]) == ("ConfigError", 2)
            assert error["text"] in answer.err
    for name, option in OPTIONS[line].items() if line in CALLED else ():
        if option.nargs is None and name.startswith("--"):
            answer = hires(*good(line, name, "nosuch"))
            refused = option.choices or name in ("--results", "--config-dir")
            assert answer.code in ((2,) if refused else (0, 1, 2)), name
            assert answer.code != 2 or name in answer.err or "nosuch" in answer.err


@pytest.mark.parametrize("line", CALLED)
def test_answers_are_one_object_as_json_and_fit_the_screen(line, hires, good, monkeypatch):
    hires(*good(line))  # of what it makes, a second answer says that it is there
    answer = hires(*good(line))
    assert (answer.code, "\x1b" in answer.out) == (0, False), answer.err
    with monkeypatch.context() as patch:
        patch.setenv("FORCE_COLOR", "1")
        coloured = hires(*good(line)).out
        assert re.sub(r"\x1b\[\d+m", "", coloured) == answer.out
        assert ("\x1b[32mdone" in coloured) == (line in ("status", "list"))
        options = {("--json",), *([("--json", "--cfg", "job")] if "--cfg" in OPTIONS[line] else ())}
        for more in options if line not in WITHOUT_JSON else ():
            assert isinstance(json.loads(hires(*good(line, *more)).out), dict)
        if "--rounds" in OPTIONS[line]:
            failed = hires(*good(line, "--json", "--rounds", str(FAILS)))
            assert json.loads(failed.out)["error"]["exit_code"] == failed.code == 3
        patch.setenv("NO_COLOR", "1")
        assert hires(*good(line)).out == answer.out
    for width in (40, 60, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        narrow = hires(*good(line))
        assert narrow.code == 0
        if line not in AS_THEY_ARE:
            most = max(width, 70 if line in ("plan", "cancel", "retry") else 50)  # of sentences
            assert max(map(len, tables_of(narrow.out)), default=0) <= most, narrow.out


def test_lists_fold_on_a_narrow_screen(hires, monkeypatch):
    for what in ("keys", "aliases", "operators", "parallel.halo"):
        monkeypatch.setenv("COLUMNS", "40")  # `list keys` ended in a traceback
        assert hires("list", what).code == 0
        monkeypatch.setenv("COLUMNS", "80")
        assert max(map(len, hires("list", what).out.splitlines())) <= 80


def test_mistakes_say_what_was_meant(hires):
    for words, meant in (
        (["rn"], "did you mean run?"),
        (["xyzzy"], "choose one of bench, cancel"),
        (["parallel=sp"], "hires run parallel=sp"),
        (["--verbose"], "a verb comes first"),
        (["run", "--steps=3"], "write it as steps=VALUE"),
        (["bench", "layuots"], "did you mean layouts?"),
        (["bench", "--rounds", "1", "comm"], "write it first"),
        (["tune", "com"], "did you mean comm?"),
    ):
        answer = hires(*words)
        assert (answer.code, answer.out, meant in answer.err) == (2, "", True)
        assert (answer.err[:7], answer.err.count("\n")) == ("hires: ", 1)


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
    command = f"{sys.executable} -m hires list | true"
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
    slow |= {"importlib.metadata"}  # half of that
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
    tasks = []
    monkeypatch.setattr("os.execv", lambda program, words: tasks.append(Path(words[-1])) or 0)
    for words, facts in (
        (("bench", "comm", "--ranks", "3"), {"kind": "comm", "ranks": [3], "out": ""}),
        (("tune", "comm", "--noise", "0.2"), {"kind": "tune", "noise": 0.2, "force": False}),
    ):
        assert hires(*words).code == 0
        assert facts.items() <= json.loads(tasks[-1].read_text()).items()
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


def test_current_folder_that_was_removed_is_named(hires, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for words in (("plan", "image=32"), ("list", "runs")):
        answer = hires(*words)
        assert answer.code == 2
        assert "the current folder was removed; change to one that is there" in answer.err
