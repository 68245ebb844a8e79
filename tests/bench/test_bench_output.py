"""Does every benchmark's answer say where it comes from, and is it told and kept alike?"""

from __future__ import annotations

import argparse
import json
import signal

import pytest

from hires.bench import bench_output
from hires.bench.bench_output import (
    BenchTable,
    Form,
    add_output,
    header,
    keep,
    markdown,
    origin,
    run_benchmark,
)
from hires.core.errors import ConfigError, RunError
from hires.core.text_table import aligned


def tables(result: dict) -> list[BenchTable]:
    return [BenchTable("Rows", ("row", "ms"), [["a", "12.5"], ["b", "3"]], "lr")]


FORM = Form("small", tables, facts=lambda result: [f"ok: {result.get('ok')}"])
SCREEN = """\
ok: {}

Rows
row    ms
a    12.5
b       3
"""


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_output(parser, FORM.name)
    return parser.parse_args(words)


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_answer_is_printed_and_decides_the_exit_code(ok, code, capsys):
    assert (
        run_benchmark(FORM, [], parse, lambda _, command, progress: origin(command, ok=ok)) == code
    )
    assert capsys.readouterr().out == SCREEN.format(ok)


def test_answer_without_a_question_is_a_success(capsys):
    assert run_benchmark(FORM, ["--json"], parse, lambda _, command, progress: origin(command)) == 0
    assert json.loads(capsys.readouterr().out)["command"] == "hires bench small --json"


def test_folder_holds_the_answer_and_a_readme(tmp_path, capsys):
    folder = tmp_path / "made" / "here"
    words = ["--json", "--out", str(folder)]
    assert (
        run_benchmark(FORM, words, parse, lambda _, command, progress: origin(command, ok=True))
        == 0
    )
    assert json.loads(capsys.readouterr().out) == json.loads((folder / "small.json").read_text())
    assert (folder / "README.md").read_text().startswith("# here\n")
    assert "| a | 12.5 |" in (folder / "README.md").read_text()


def test_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*choose --out FOLDER"):
        keep(FORM, tmp_path / "file" / "folder", {})


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ConfigError("--rows 0 is too few"), 2, "--rows 0 is too few\n"),
        (RunError("a rank failed"), 1, "a rank failed\n"),
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C or SIGTERM\n"),
    ],
)
def test_error_is_told_and_decides_the_exit_code(error, code, told, capsys):
    def measure(*_):
        raise error

    assert run_benchmark(FORM, [], parse, measure) == code
    assert capsys.readouterr() == ("", told)


@pytest.mark.parametrize("end", ["Ctrl-C", "SIGTERM", "error"])
def test_benchmark_that_is_stopped_shows_and_keeps_what_it_measured(end, tmp_path, capsys):
    def measure(_, command, progress):
        progress.sample({"round": 0})
        progress.update(origin(command, ok=True))
        progress.sample({"round": 1})
        if end == "error":
            raise RunError("a rank failed")
        if end == "Ctrl-C":
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGTERM)

    code = run_benchmark(FORM, ["--out", str(tmp_path / "kept")], parse, measure)
    assert code == (1 if end == "error" else 130)
    shown = capsys.readouterr()
    assert shown.out == SCREEN.format(True)
    assert shown.err.splitlines()[-1] == "what was measured until then:"
    assert "* stopped before its end" in (tmp_path / "kept/README.md").read_text()
    assert not json.loads((tmp_path / "kept/small.json").read_text())["complete"]
    lines = (tmp_path / "kept/samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [0, 1]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_commit_is_looked_up_before_anything_is_measured(monkeypatch, capsys):
    # A benchmark takes an hour, in which the checkout may move on to code that nobody measured.
    order = []
    monkeypatch.setattr(bench_output.provenance, "collect", lambda: order.append("commit") or {})
    run_benchmark(FORM, [], parse, lambda *_: order.append("measure") or {"ok": True})
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
    assert header("small", {**found, "complete": False})[-1] == "* stopped before its end"


def test_cells_are_aligned_on_the_screen_and_in_markdown():
    rows = [("row", "ms", "what"), ("a", "12.5", "x"), ("longer", "3", "yz")]
    assert aligned(rows, "lrl") == [
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
