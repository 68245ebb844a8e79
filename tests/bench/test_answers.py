"""Does every benchmark's answer say where it comes from, and is it told and kept alike?"""

from __future__ import annotations

import argparse
import json

import pytest

from hires.bench import answers
from hires.bench.answers import Form, add_output, columns, header, keep, markdown, origin, tell
from hires.core.errors import ConfigError, RunError

FORM = Form("small", lambda found: f"ok: {found['ok']}\n", lambda name, _: f"# {name}\n")


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_output(parser, FORM.name)
    return parser.parse_args(words)


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_answer_is_printed_and_decides_the_exit_code(ok, code, capsys):
    assert tell(FORM, [], parse, lambda _, command: origin(command, ok=ok)) == code
    assert capsys.readouterr().out == f"ok: {ok}\n"


def test_answer_without_a_question_is_a_success(capsys):
    assert tell(FORM, ["--json"], parse, lambda _, command: origin(command)) == 0
    assert json.loads(capsys.readouterr().out)["command"] == "hires bench small --json"


def test_folder_holds_the_answer_and_a_readme(tmp_path, capsys):
    folder = tmp_path / "made" / "here"
    words = ["--json", "--out", str(folder)]
    assert tell(FORM, words, parse, lambda _, command: origin(command, ok=True)) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((folder / "small.json").read_text())
    assert (folder / "README.md").read_text() == "# here\n"


def test_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*choose --out FOLDER"):
        keep(FORM, tmp_path / "file" / "folder", {})


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ConfigError("--rows 0 is too few"), 2, "--rows 0 is too few\n"),
        (RunError("a rank failed"), 1, "a rank failed\n"),
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C\n"),
    ],
)
def test_error_is_told_and_decides_the_exit_code(error, code, told, capsys):
    def measure(*_):
        raise error

    assert tell(FORM, [], parse, measure) == code
    assert capsys.readouterr() == ("", told)


def test_commit_is_looked_up_before_anything_is_measured(monkeypatch, capsys):
    # A benchmark takes an hour, in which the checkout may move on to code that nobody measured.
    order = []
    monkeypatch.setattr(answers.provenance, "collect", lambda: order.append("commit") or {})
    tell(FORM, [], parse, lambda *_: order.append("measure") or {"ok": True})
    assert order == ["commit", "measure"]


def test_header_names_command_machine_commit_and_time():
    found = {
        "command": "hires bench small",
        "time": "today",
        "load_average": [0.5, 1.0, 2.0],
        "git": None,
        "hires": "1.0",
        "torch": "2.0",
        "python": "3.0",
        "hardware": {"cpu": "some processor", "cores": 2, "memory": 2**33},
    }
    assert header("small", found) == [
        "# small",
        "",
        "    hires bench small",
        "",
        "* machine: some processor, 2 cores, 8 GiB; load average at the end 0.50, 1.00, 2.00",
        "* commit: no checkout; hires 1.0, torch 2.0, Python 3.0",
        "* time: today",
    ]
    assert header("small", found, load=False, torch=False)[4:6] == [
        "* machine: some processor, 2 cores, 8 GiB",
        "* commit: no checkout; hires 1.0, Python 3.0",
    ]


def test_cells_are_aligned_on_the_screen_and_in_markdown():
    rows = [("row", "ms", "what"), ("a", "12.5", "x"), ("longer", "3", "yz")]
    assert columns(rows, "lrl") == [
        "row       ms  what",
        "a       12.5  x",
        "longer     3  yz",
    ]
    assert markdown(rows, "lrl") == [
        "| row | ms | what |",
        "| --- | ---: | --- |",
        "| a | 12.5 | x |",
        "| longer | 3 | yz |",
    ]
