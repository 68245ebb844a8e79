"""What a screen shows of plans, records and progress is what they hold, and fits on it."""

from __future__ import annotations

import contextlib
import io
import sys

from hires.cli.screens import screen
from hires.cli.screens.printable import printable_output
from hires.cli.screens.progress import StepProgress
from hires.cli.screens.show_plan import placement_lines
from hires.report.columns import Column
from tests.helpers.commands import HOSTILE, UNSEEN


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
    # A state is in its own colour, and nothing else is: neither another text nor another colour.
    for text in ("Größe 画像 µs ─ 1\u00a0000 é e\u0301\n", "\x1b[32mdone\x1b[0m\n"):
        assert printed(text) == text
    for other in ("\x1b[32mowned\x1b[0m", "\x1b[31mdone\x1b[0m", "\x1b[32mdone \x07\x1b[2J\x1b[0m"):
        assert not {"\x07", "\x1b"} & set(printed(other))


def test_no_line_is_wider_than_the_screen_and_the_columns_to_keep_stay(capsys, monkeypatch):
    columns = ["run", "cause", Column("rate", "median", "img/s", digits=2), "state"]
    rows = [["resnet50-224x224-sp-fp32-0123abcd", "the loss is nan " * 9, "123.45", "failed"]] * 2
    monkeypatch.setenv("COLUMNS", "40")
    screen.print_table("T", columns, rows, keep=("state", "rate"))
    text = capsys.readouterr().out
    table = text.split("(")[0]
    assert max(len(line) for line in table.splitlines()) <= 40
    assert (table.count("failed"), "123.45" in table) == (2, True)
    assert "cause" in text  # in the table, or among what is left out


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


def facts(replicas: int, *tiles: list[int]) -> dict:
    """The placement of stages with these tile grids, ranks in order."""
    placement = []
    for replica in range(replicas):
        for stage, (rows, cols) in enumerate(tiles):
            for tile in range(rows * cols):
                where = list(divmod(tile, cols)) if rows * cols > 1 else None
                slot = {"rank": len(placement), "replica": replica, "stage": stage, "tile": where}
                placement.append({**slot, "direction": "down", "shard": None})
    stages = [{"index": i, "tiles": list(grid), "shards": 1} for i, grid in enumerate(tiles)]
    return {"placement": placement, "stages": stages, "world": len(placement)}


def test_tiles_stand_as_they_cut_the_image_and_stages_side_by_side():
    assert placement_lines(facts(2, [2, 2], [2, 2], [1, 1])) == [
        "replica 0",
        "stage 0   stage 1   stage 2",
        "[ 0 1 ]   [ 4 5 ]   [ 8 ]",
        "[ 2 3 ]   [ 6 7 ]",
        "replica 1",
        "stage 0     stage 1     stage 2",
        "[  9 10 ]   [ 13 14 ]   [ 17 ]",
        "[ 11 12 ]   [ 15 16 ]",
    ]
    last = placement_lines(facts(100, [1, 2]))[-1]
    assert last == "and 99 more replicas, alike, each 2 ranks further"
