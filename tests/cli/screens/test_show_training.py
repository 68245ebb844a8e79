"""Is it shown where the weights of a training are, and which classes were taken for which?"""

from __future__ import annotations

import json

import pytest

from hires.cli.screens.screen import print_record
from hires.cli.screens.show_training import confusion_table, training_lines
from hires.core.store import checkpoints
from hires.core.store.checkpoints import Best
from hires.core.store.records import read_record
from hires.report.frames import load
from hires.report.page import render
from hires.report.plots.base import PlotData, draw
from hires.report.summaries import summaries
from tests.helpers.compared_runs import compared_run
from tests.helpers.run_folders import saved_stages

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
    print_record(read_record(run), run)
    lines = capsys.readouterr().out.partition("Confusion")[2].splitlines()
    assert [line.split() for line in lines[2:4]] == [["dog"], ["class", NAMES[0], "$x$", "=2+2"]]
    assert next(line.split()[-3:] for line in lines if "cat" in line[:14]) == ["8", "2", "0"]


@pytest.mark.parametrize("counts", [[[1] * 13] * 13, [[1, 2], [3]], "x", [[None, 1], [1, 1]]])
def test_confusion_of_many_classes_or_damaged_is_left_out(tmp_path, counts):
    run = evaluated_run(tmp_path, [str(n) for n in range(len(counts))], counts)
    assert confusion_table(read_record(run), run) is None


def test_confusion_is_a_heat_map_whose_names_are_escaped(tmp_path):
    frames = load([evaluated_run(tmp_path)])
    plots = draw(PlotData(frames))
    [plot] = [one for one in plots if one.name == "confusion"]
    assert plot.figure is not None, plot.missing
    assert "85 % right" in plot.caption
    assert "<b>cat</b> as dog $x$ 2 times" in plot.caption
    page = render(frames, summaries(frames), plots, plots, None)
    assert "<b>cat" not in page
    assert "&lt;b&gt;cat" in page


def test_damaged_confusion_is_a_note(tmp_path):
    run = evaluated_run(tmp_path, counts=[[1, 2], [3]])
    frames = load([run])
    [plot] = [one for one in draw(PlotData(frames)) if one.name == "confusion"]
    assert plot.figure is None
    assert any("confusion matrix is damaged" in note.text for note in frames.all_notes())
