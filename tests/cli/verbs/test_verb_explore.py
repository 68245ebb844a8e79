"""What ``hires explore`` says about files of calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hires.cli.main import main


def explored(tmp_path: Path, text: str, *options: str) -> int:
    file = tmp_path / "program.yaml"
    file.write_text(text)
    return main(["explore", str(file), *options])


def test_program_of_the_docs_deadlocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = (Path(__file__).parents[3] / "docs" / "proof.md").read_text()
    block = page.partition("$ cat crossed.yaml\n")[2].partition("\n\n    $ hires explore")
    text = "\n".join(line[4:] for line in block[0].splitlines())
    assert explored(tmp_path, text) == 3
    answer = page.partition("$ hires explore crossed.yaml\n")[2].partition("\n\nThe verdict")[0]
    expected = [line[4:] for line in answer.splitlines()]
    assert capsys.readouterr().out.splitlines() == expected


def test_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert explored(tmp_path, "ranks: {0: [barrier], 1: [barrier]}") == 0
    assert "every interleaving ends" in capsys.readouterr().out
    assert explored(tmp_path, "ranks: {0: [send 1, recv 1], 1: [send 0, recv 0]}") == 3
    assert "deadlock, unless every message is buffered" in capsys.readouterr().out
    three = "ranks: {0: [recv any, recv 1], 1: [send 0], 2: [send 0]}"
    assert explored(tmp_path, three, "--json") == 3
    values = json.loads(capsys.readouterr().out)
    assert values["deadlock"]
    assert not values["always"]
    assert explored(tmp_path, "ranks: {0: [broadcast 0], 1: [broadcast 1]}") == 3
    assert "the ranks do not agree" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "ranks: 3", "[]", "ranks: {0: [brrier]}", "ranks: {1: []}"])
def test_files_that_are_no_program_are_refused(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
):
    assert explored(tmp_path, text) == 2
    assert capsys.readouterr().err.count("program.yaml") == 1


@pytest.mark.parametrize(
    ("name", "why"), [("none.yaml", "No such file"), ("", "it is a folder, and no file in it")]
)
def test_file_that_cannot_be_read_is_no_run_folder(
    tmp_path: Path, name: str, why: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["explore", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert why in error
    assert "name a file of calls, as `ranks: {0: [barrier]" in error
    assert "run folder" not in error


def test_handle_that_nothing_opened_has_no_choices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert explored(tmp_path, "ranks: {0: [wait a]}") == 2
    assert "'a' is no open handle; there are none" in capsys.readouterr().err
