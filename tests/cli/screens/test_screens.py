"""What a screen shows of records, trainings and progress is what they hold, and fits on it."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from pathlib import Path

import pytest

from hires.cli.screens import screen
from hires.cli.screens.printable import behind, printable_output
from hires.cli.screens.progress import StepProgress, SweepProgress, show_planning
from hires.cli.screens.show_training import training_lines
from hires.cli.start_run import explain
from hires.core.config.run_config import RunConfig
from hires.core.store import checkpoints
from hires.core.store.checkpoints import Best
from hires.core.store.records import read_record
from hires.core.store.rundir import RunDir
from hires.launcher.attempt_queue import Ended
from hires.launcher.interface import FrozenRun, Outcome
from hires.report.columns import Column
from tests.helpers.compared_runs import compared_run
from tests.helpers.run_folders import saved_stages

HOSTILE = "\x1b]0;owned\x07\x1b[31mred\x9b2J\u202etxt.exe\u2066\u200b\x00\r\ud800\u2028"


UNSEEN = set("\x1b\x07\x9b\u202e\u2066\u200b\x00\r\ud800\u2028")


def printed(*texts: str) -> str:
    """Returns what reaches the terminal of some texts."""
    with contextlib.redirect_stdout(io.StringIO()) as output, printable_output():
        for text in texts:
            sys.stdout.write(text)
    return output.getvalue()


def test_what_a_terminal_would_obey_is_replaced_and_letters_of_all_languages_stay(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = printed(f"a\tb {HOSTILE}", "\nnext\n")
    assert not UNSEEN & set(text)
    assert text.startswith("a\tb \N{REPLACEMENT CHARACTER}]0;owned")
    assert text.endswith("\nnext\n")
    text = "Größe 画像 µs ─ 1\u00a0000 \N{MULTIPLICATION SIGN} é e\u0301\n"
    assert printed(text) == text
    # A state is in its own colour, and nothing else is: neither another text nor another colour.
    assert printed("\x1b[32mdone\x1b[0m\n") == "\x1b[32mdone\x1b[0m\n"
    for other in ("\x1b[32mowned\x1b[0m", "\x1b[31mdone\x1b[0m", "\x1b[32mdone \x07\x1b[2J\x1b[0m"):
        assert not {"\x07", "\x1b"} & set(printed(other))


def test_hires_itself_draws_behind_the_filter():
    with contextlib.redirect_stdout(io.StringIO()) as output, printable_output():
        with printable_output():
            behind(sys.stdout).write("\x1b[H")
        assert sys.stdout.isatty() is False
    assert output.getvalue() == "\x1b[H"


COLUMNS = (Column("model", "model"), Column("rate", "median", "img/s", digits=2))


def table_of(capsys, monkeypatch, width, columns, rows, **how):
    monkeypatch.setenv("COLUMNS", str(width))
    screen.print_table("T", columns, rows, **how)
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [20, 24, 40, 100])
def test_no_line_is_wider_than_the_screen_and_the_columns_to_keep_stay(capsys, monkeypatch, width):
    columns = ["run", "cause", Column("rate", "median", "img/s", digits=2), "state"]
    rows = [["resnet50-224x224-sp-fp32-0123abcd", "the loss is nan " * 9, "123.45", "failed"]] * 2
    text = table_of(capsys, monkeypatch, width, columns, rows, keep=("state", "rate"))
    table = text.split("(")[0]
    assert max(len(line) for line in table.splitlines()) <= width
    assert table.count("failed") == (2 if width > 24 else 0)
    assert ("123.45" in table) == (width >= 40)
    assert "cause" in text  # in the table, or among what is left out
    monkeypatch.delenv("COLUMNS")
    screen.print_table("T", columns, rows)
    assert rows[0][1].strip() in capsys.readouterr().out  # in a file no table is cut


def test_colours_are_for_terminals_and_for_who_wants_them(capsys, monkeypatch):
    def shown():
        screen.print_table("", ["run", "state"], [["a", "done"], ["b", "failed (oom)"]])
        return capsys.readouterr().out

    plain = shown()
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[32mdone\x1b[0m" in shown()
    assert "\x1b[31mfailed (oom)\x1b[0m" in shown()
    assert re.sub(r"\x1b\[\d+m", "", shown()) == plain  # colours move nothing
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown() == plain
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert "\x1b" in shown()
    monkeypatch.setenv("TERM", "dumb")
    assert shown() == plain


NAMES = ["<b>cat</b>", "dog $x$", "=2+2"]


COUNTS = [[8, 2, 0], [1, 9, 0], [0, 0, 0]]


def evaluated_run(folder, names=NAMES, counts=COUNTS):
    run = compared_run(folder, [[0.5]], task={"name": "evaluate"}, weights="net.pt")
    for path in (run, run / "a0"):
        record = json.loads((path / "record.json").read_text())
        record["evaluation"] = {"images": 20, "top1": 0.85}
        (path / "record.json").write_text(json.dumps(record))
    classes = [{"class": n, "name": name} for n, name in enumerate(names)]
    held = {"confusion": counts, "classes": classes}
    (run / "a0" / "evaluation.json").write_text(json.dumps(held))
    return run


def saved(run, step):
    saved_stages([], run, step)


def test_end_of_a_training_names_its_weights(tmp_path, hires):
    run = compared_run(tmp_path / "results", [[0.5]])
    assert training_lines(read_record(run), run) == []
    saved(run, 12)
    [last] = training_lines(read_record(run), run)
    assert last == f"weights={run} are those after step 12"
    saved(run, 8)
    checkpoints.write_best(run, Best(8, "top1", 0.875))
    best, _ = training_lines(read_record(run), run)
    assert best == f"weights={run}/best are the best ones: top1 0.875 after step 8"
    shown = hires("show", str(run)).out
    assert "step000008 (0 B, attempt a0, the best: top1 0.875)" in shown
    assert best in shown


def test_confusion_is_a_table_on_the_screen(tmp_path, capsys):
    run = evaluated_run(tmp_path)
    screen.print_record(read_record(run), run)
    lines = capsys.readouterr().out.partition("Confusion")[2].splitlines()
    assert [line.split() for line in lines[2:4]] == [["dog"], ["class", NAMES[0], "$x$", "=2+2"]]
    assert next(line.split()[-3:] for line in lines if "cat" in line[:14]) == ["8", "2", "0"]


class Screen(io.StringIO):
    """Text that a terminal or a file would get."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: terminal  # type: ignore[method-assign]


def steps_of(world: int, steps: int):
    for step in range(steps):
        for rank in range(world):
            loss = 2.0 - step if rank else None
            yield {"kind": "step", "rank": rank, "step": step, "step_s": 0.5 + rank, "loss": loss}


def test_step_counts_when_every_rank_has_it(capsys):
    stream = io.StringIO()
    with StepProgress(2, 6, 50, stream) as shown:
        shown({"kind": "ready", "rank": 0})
        first, second, *rest = steps_of(2, 50)
        shown(first)
        assert stream.getvalue() == ""
        for line in (second, *rest):
            shown(line)
    # The slowest rank decides: 6 images in 1.5 s. A quick run has its first and last step.
    begin, end = stream.getvalue().splitlines()
    assert (begin.startswith("step 1/50"), "4 img/s" in begin) == (True, True)
    assert end.startswith("step 50/50")
    terminal = Screen(terminal=True)
    with StepProgress(2, 6, 3, terminal) as shown:
        for line in steps_of(2, 3):
            shown(line)
    assert "3/3" in terminal.getvalue()
    assert capsys.readouterr().out == ""  # standard output is for the result


@pytest.mark.parametrize("terminal", [False, True])
def test_sweep_shows_each_start_and_end(monkeypatch, terminal):
    path = Path("results/default/one-0123abcd")
    task = FrozenRun(path, ("hires", "run"), RunConfig(steps=4))
    output = Screen(terminal)
    monkeypatch.setattr(sys, "stderr", output)
    assert list(show_planning("ab")) == ["a", "b"]
    with SweepProgress(2) as bars:
        bars.started(task, 0)
        bars.line(task, next(steps_of(1, 1)))
        bars.ended(Ended(task, 0, "failed", "rank 0 is [gone]", 2.0))
        bars.ended(Ended(task, None, "failed", "runs already"))
    text = output.getvalue()
    assert "[1/2] one-0123abcd a0: failed" in text
    assert "rank 0 is [gone]" in text
    if terminal:
        assert "planning point 1 of 2" in text
        assert "attempts" in text
    else:
        assert len(text.splitlines()) == 4
        assert text.splitlines()[2].endswith("logs: results/default/one-0123abcd/a0/logs")


PAGE = """no progress: rank 1 does not answer

unmatched: norm of bn3 in B0: rank 1 has not come to it

where every rank stands
  rank 1 does not answer

last communications of each rank
  rank 0: a barrier
"""


def test_run_that_hung_shows_who_was_to_blame(tmp_path, capsys):
    run = RunDir(tmp_path, 0)
    outcome = Outcome("failed", "no progress: rank 1 does not answer", {}, [], 1, "hang")
    explain(outcome, run)  # a page that could not be written is no crash
    assert "the whole page" not in capsys.readouterr().err
    run.attempt_dir.mkdir()
    (run.attempt_dir / "hang.txt").write_text(PAGE)
    explain(outcome, run)
    err = capsys.readouterr().err
    assert err.count("no progress: rank 1 does not answer") == 1
    assert "  unmatched: norm of bn3 in B0: rank 1 has not come to it\n" in err
    assert "last communications" not in err
    assert f"the whole page: {run.attempt_dir / 'hang.txt'}\n" in err
