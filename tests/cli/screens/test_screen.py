"""Do tables fit where they are printed?"""

from __future__ import annotations

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


def test_row_too_wide_for_the_terminal_stands_upright(capsys, monkeypatch):
    monkeypatch.setattr(screen, "_PLAIN_WIDTH", 20)
    screen.print_table("Throughput", COLUMNS, [["resnet50", "9.50"]])
    assert capsys.readouterr().out == ("Throughput\n  model   resnet50\n  median  9.50 img/s\n\n")


def test_memory_of_four_ranks_fits_a_terminal_of_80_columns(capsys, monkeypatch):
    monkeypatch.setattr(screen, "_PLAIN_WIDTH", 80)
    names = ("peak_bytes", "predicted_bytes", "params_bytes", "grads_bytes", "optimizer_bytes")
    sizes = dict.fromkeys(names, 10**10)
    place = {"replica": 0, "stage": [1], "tile": [[1, 0]], "source": "device"}
    memory = tables({"memory": [{"rank": rank, **place, **sizes} for rank in range(4)]})[1]
    screen.print_table(memory.title, memory.columns, memory.text_rows())
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text
    assert text.count("9536.7") == 20
    ranks = [line.split()[0] for line in text.splitlines() if "9536.7" in line]
    assert ranks == [*"0123"] * 2  # two tables below each other, each with the ranks


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


@pytest.mark.parametrize("image", [224, [75, 61]])
def test_printed_config_is_the_config(capsys, image):
    screen.print_config(RunConfig(image=image))
    text = capsys.readouterr().out
    assert from_dict(yaml.safe_load(text)) == RunConfig(image=image)
    assert f"image: {RunConfig(image=image).image}\n" in text
