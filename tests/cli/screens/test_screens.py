"""What a screen shows of records, trainings and progress is what they hold, and fits on it."""

from __future__ import annotations

import contextlib
import io
import sys

import pytest

from hires.cli.screens import screen
from hires.cli.screens.printable import printable_output
from hires.cli.screens.progress import StepProgress
from hires.report.columns import Column

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


@pytest.mark.parametrize("width", [20, 40])
def test_no_line_is_wider_than_the_screen_and_the_columns_to_keep_stay(capsys, monkeypatch, width):
    columns = ["run", "cause", Column("rate", "median", "img/s", digits=2), "state"]
    rows = [["resnet50-224x224-sp-fp32-0123abcd", "the loss is nan " * 9, "123.45", "failed"]] * 2
    monkeypatch.setenv("COLUMNS", str(width))
    screen.print_table("T", columns, rows, keep=("state", "rate"))
    text = capsys.readouterr().out
    table = text.split("(")[0]
    assert max(len(line) for line in table.splitlines()) <= width
    assert table.count("failed") == (2 if width > 24 else 0)
    assert ("123.45" in table) == (width >= 40)
    assert "cause" in text  # in the table, or among what is left out


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
