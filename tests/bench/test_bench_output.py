"""Does every benchmark's answer say where it comes from, and is it told and kept alike?"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from hires.bench import bench_output
from hires.bench.bench_output import Benchmark, BenchTable, header, option
from hires.core.errors import ConfigError, RunError


def tables(result: dict) -> list[BenchTable]:
    return [
        BenchTable("Rows", [{"row": "a", "ms": "12.5"}, {"row": "b", "ms": "3"}]),
        BenchTable("Nothing yet", []),
    ]


def facts(result: dict) -> list[str]:
    return [f"ok: {result.get('ok')}"]


@dataclass
class Options:
    rows: int = option(3, "rows")
    warmup: int = option(1, "before them", low=0)
    limit: float = option(2.5, "seconds")
    memory: bool = option(True, "measure no memory")


def small(measure: Callable[[Any], Any] = lambda options: iter([{"ok": True}])) -> Benchmark:
    def results(options):
        yield from measure(options)

    return Benchmark("small", "", Options, results, tables, facts=facts)


SCREEN = """\
ok: {}

Rows
row    ms
a    12.5
b       3
"""


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_answer_is_printed_and_decides_the_exit_code(ok, code, capsys):
    assert small(lambda _: [{"ok": ok}]).main([]) == code
    assert capsys.readouterr().out == SCREEN.format(ok)


def test_answer_without_a_question_is_a_success(capsys):
    assert small(lambda _: [{}]).main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["command"] == "hires bench small --json"
    assert small(lambda _: [{}]).main(["--json"], "python3 small.py") == 0
    assert json.loads(capsys.readouterr().out)["command"] == "python3 small.py --json"


def test_folder_holds_the_answer_and_a_readme(tmp_path, capsys):
    folder = tmp_path / "made" / "here"
    assert small().main(["--json", "--out", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((folder / "small.json").read_text())
    readme = (folder / "README.md").read_text()
    assert readme.startswith("# here\n")
    assert "| row | ms |\n| --- | ---: |\n| a | 12.5 |" in readme
    assert "Nothing yet" not in readme


def test_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*choose --out FOLDER"):
        small().keep(tmp_path / "file" / "folder", {})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rows", "0"], "--rows 0 must be at least 1\n"),
        (["--warmup", "-1"], "--warmup -1 must be at least 0\n"),
        (["--limit", "0"], "--limit 0 must be above 0\n"),
    ],
)
def test_option_that_makes_no_sense_is_refused(words, message, capsys):
    assert small(lambda _: pytest.fail("it began")).main(words) == 2
    assert capsys.readouterr() == ("", f"hires: {message}")


def test_options_have_their_types():
    seen = []
    words = ["--rows", "4", "--warmup", "0", "--limit", "3", "--no-memory"]
    assert small(lambda options: [seen.append(options) or {}]).main(words) == 0
    assert seen == [Options(rows=4, warmup=0, limit=3.0, memory=False)]


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

    assert small(measure).main([]) == code
    assert capsys.readouterr() == ("", f"hires: {told}")


@pytest.mark.parametrize("end", ["Ctrl-C", "SIGTERM", "error"])
def test_benchmark_that_is_stopped_shows_and_keeps_what_it_measured(end, tmp_path, capsys):
    ended = []

    def measure(_):
        try:
            yield {"ok": True, "round": 0}
            assert json.loads((tmp_path / "kept/small.json").read_text())["round"] == 0
            yield {"ok": True, "round": 1}
            if end == "error":
                raise RunError("a rank failed")
            if end == "Ctrl-C":
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGTERM)
        finally:
            ended.append(True)

    code = small(measure).main(["--out", str(tmp_path / "kept")])
    assert code == (1 if end == "error" else 130)
    assert ended
    shown = capsys.readouterr()
    assert shown.out == SCREEN.format(True)
    assert shown.err.splitlines()[-1] == "what was measured until then:"
    assert "* stopped before its end" in (tmp_path / "kept/README.md").read_text()
    kept = json.loads((tmp_path / "kept/small.json").read_text())
    assert (kept["complete"], kept["round"]) == (False, 1)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_benchmark_ends_what_it_began_when_the_folder_cannot_be_written(tmp_path, monkeypatch):
    ended = []

    def measure(_):
        try:
            yield {}
        finally:
            ended.append(True)

    (tmp_path / "file").write_text("")
    assert small(measure).main(["--out", str(tmp_path / "file" / "folder")]) == 2
    assert ended


def test_commit_is_looked_up_before_anything_is_measured(monkeypatch, capsys):
    # A benchmark takes an hour, in which the checkout may move on to code that nobody measured.
    order = []
    monkeypatch.setattr(bench_output.provenance, "collect", lambda: order.append("commit") or {})
    small(lambda _: [order.append("measure") or {"ok": True}]).main([])
    assert order[:2] == ["commit", "measure"]


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
    cells = [("a", "12.5", "x"), ("longer", "-3", "yz")]
    table = BenchTable("", [dict(zip(("row", "ms", "what"), row, strict=True)) for row in cells])
    assert table.lines(markdown=False) == [
        "row       ms  what",
        "a       12.5  x",
        "longer    -3  yz",
    ]
    assert table.lines(markdown=True) == [
        "| row | ms | what |",
        "| --- | ---: | --- |",
        "| a | 12.5 | x |",
        "| longer | -3 | yz |",
    ]
