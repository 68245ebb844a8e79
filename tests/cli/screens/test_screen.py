"""Do tables fit where they are printed?"""

from __future__ import annotations

import re
import sys

import pytest
import yaml

from hires.cli.screens import screen
from hires.core.config.run_config import RunConfig, from_dict
from hires.report.columns import Column
from hires.report.tables import tables

COLUMNS = (Column("model", "model"), Column("rate", "median", "img/s", digits=2))


def test_numbers_are_flush_right_below_their_unit(capsys):
    screen.print_table("Throughput", COLUMNS, [["resnet50", "9.50"], ["unet", "12.25"]])
    title, _, *rows = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert title == "Throughput"
    assert [row for row in rows if row[:1] in ("m", "r", "u")] == [
        "median",
        "model     [img/s]",
        "resnet50     9.50",
        "unet        12.25",
    ]


def test_single_row_too_wide_for_the_terminal_stays_a_table(capsys, monkeypatch):
    spread = {"median": 20.81, "p10": 20.5, "p90": 21.0}
    record = {
        **dict.fromkeys(("model", "precision"), "fp32"),
        "state": "done",
        "layout": "sp+gems",
        "image": [2048, 2048],
        "world": 4,
        "throughput": {"img_per_s": spread, "step_s": {**spread, "median": 0.0961}, "samples": 3},
        "memory": [{"rank": 0, "peak_bytes": 2**30}],
        "images_per_step": 2,
    }
    monkeypatch.setenv("COLUMNS", "80")
    screen.print_record(record)
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= 80
    # The heading is above its value: one line of headings, one of units, a rule, one row.
    lines = text.split("Memory")[0].splitlines()
    heads = next(line for line in lines if "layout" in line)
    row = next(line for line in lines if "sp+gems" in line)
    assert heads.index("layout") == row.index("sp+gems")
    # What a user compares stays, and a line names the rest.
    assert "20.81" in row
    assert "0.0961" in row
    assert re.search(r"\(left out: .*step p90", text)
    assert "1024.0" in text


def printed(capsys, monkeypatch, width, columns, rows, **how):
    monkeypatch.setenv("COLUMNS", str(width))
    screen.print_table("T", columns, rows, **how)
    return capsys.readouterr().out


def test_memory_of_four_ranks_fits_a_terminal_of_80_columns(capsys, monkeypatch):
    names = ("peak_bytes", "predicted_bytes", "params_bytes", "grads_bytes", "optimizer_bytes")
    sizes = dict.fromkeys(names, 10**10)
    place = {"replica": 0, "stage": [1], "tile": [[1, 0]], "source": "device"}
    memory = tables({"memory": [{"rank": rank, **place, **sizes} for rank in range(4)]})[1]
    text = printed(capsys, monkeypatch, 80, memory.columns, memory.text_rows())
    assert max(len(line) for line in text.splitlines()) <= 80
    # One table: the last columns are left out, and a line says how they are seen.
    assert [line.split()[0] for line in text.splitlines() if "9536.7" in line] == [*"0123"]
    [note] = re.findall(
        r"^ \(left out: .*optimiser; COLUMNS=(\d+) shows all\)$", text, re.MULTILINE
    )
    whole = printed(capsys, monkeypatch, note, memory.columns, memory.text_rows())
    assert whole.count("9536.7") == 20
    assert "left out" not in whole
    assert max(len(line) for line in whole.splitlines()) == int(note)


def test_in_a_file_no_table_is_cut(capsys):
    rows = [["name", "x" * 500, "1"], ["name", "y", "2"]]
    screen.print_table("T", ["a", "b", "c"], rows)
    assert "x" * 500 in capsys.readouterr().out


@pytest.mark.parametrize("width", [20, 24, 40, 60, 80, 100])
def test_no_line_is_wider_than_the_screen_and_the_columns_to_keep_stay(capsys, monkeypatch, width):
    columns = ["run", "cause", Column("rate", "median", "img/s", digits=2), "state"]
    rows = [["resnet50-224x224-sp-fp32-0123abcd", "the loss is nan " * 9, "123.45", "failed"]] * 2
    text = printed(capsys, monkeypatch, width, columns, rows, keep=("state", "rate"))
    table = text.split("(")[0]
    assert max(len(line) for line in table.splitlines()) <= width
    assert table.count("failed") == (2 if width > 24 else 0)
    assert ("123.45" in table) == (width >= 40)
    assert "cause" in text  # in the table, or among what is left out


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


def test_tables_of_a_run_that_did_not_end_say_so(capsys):
    spread = {"median": 1.0, "p10": 1.0, "p90": 1.0}
    names = dict.fromkeys(("model", "layout", "precision"), "x")
    throughput = {"img_per_s": spread, "step_s": spread, "samples": 3}
    record = {"state": "cancelled", "throughput": throughput, "memory": [], **names}
    record |= {"image": [8, 8], "world": 1, "images_per_step": 1}
    screen.print_record(record)
    assert capsys.readouterr().out.startswith("cancelled: the tables hold what was measured until")
    record["throughput"]["samples"] = 0
    screen.print_record(record)
    assert capsys.readouterr().out == ""


def test_a_prediction_says_where_it_lies_and_how_many_there_are(capsys):
    made = {"kind": "pixels", "images": 11, "reduce": "argmax", "not_finite": 2}
    made |= {"table": "a1/predictions.csv", "folder": "a1/predictions"}
    record = {"state": "done", "prediction": made, "model": "unet", "layout": "sp"}
    screen.print_record(record, "results/one")
    out = capsys.readouterr().out
    assert out.startswith(
        "predictions of 11 images: results/one/a1/predictions.csv, pixels in "
        "results/one/a1/predictions\n"
    )
    assert re.search(r"11 +pixels +argmax +2 .*a1/predictions.csv", out)


@pytest.mark.parametrize("image", [224, [75, 61]])
def test_printed_config_is_the_config(capsys, image):
    screen.print_config(RunConfig(image=image))
    text = capsys.readouterr().out
    assert from_dict(yaml.safe_load(text)) == RunConfig(image=image)
    assert f"image: {RunConfig(image=image).image}\n" in text


@pytest.mark.parametrize(
    ("skipped", "text"),
    [
        (7, "fp16: 7 steps overflowed and were skipped, the last loss scale is 512\n"),
        (1, "fp16: 1 step overflowed and was skipped, the last loss scale is 512\n"),
        (None, ""),
    ],
)
def test_record_names_the_skipped_steps(skipped, text, capsys):
    screen.print_record({"state": "failed", "skipped_steps": skipped, "loss_scale": 512})
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("compiled", [True, False, None])
def test_record_of_a_compiled_run_says_what_its_memory_was_predicted_for(compiled, capsys):
    memory = [{"rank": 0, "peak_bytes": 109 * 2**20, "predicted_bytes": 2 * 2**20}]
    screen.print_record({"state": "done", "memory": memory, "compiled": compiled})
    assert ("engine.compile=off" in capsys.readouterr().out) == (compiled is True)


def test_scales_of_a_calibration_are_named(capsys, tmp_path):
    """The tables of a calibration show throughput and memory only; its result is a file."""
    screen.print_record({"state": "done", "attempt": 1}, tmp_path)
    assert "scales" not in capsys.readouterr().out
    (tmp_path / "a1").mkdir()
    (tmp_path / "a1/scales.json").write_text("{}")
    screen.print_record({"state": "done", "attempt": 1}, tmp_path)
    assert f"scales: {tmp_path}/a1/scales.json" in capsys.readouterr().out
