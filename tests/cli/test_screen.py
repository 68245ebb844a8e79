"""Do tables fit where they are printed?"""

from __future__ import annotations

import pytest
import yaml

from hires.cli import screen
from hires.core.config import RunConfig, from_dict
from hires.report.tables import Column

COLUMNS = (Column("model", "model"), Column("rate", "median", "img/s", digits=2))


def test_numbers_are_flush_right_below_their_unit(capsys):
    screen.print_table("Throughput", COLUMNS, [["resnet50", "9.50"], ["unet", "12.25"]])
    title, _, *rows = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert title == "Throughput"
    assert [row for row in rows if row[:1] in ("m", "r", "u")] == [
        "median",
        "model      [img/s]",
        "resnet50      9.50",
        "unet         12.25",
    ]


def test_row_too_wide_for_the_terminal_stands_upright(capsys, monkeypatch):
    monkeypatch.setattr(screen, "_PLAIN_WIDTH", 20)
    screen.print_table("Throughput", COLUMNS, [["resnet50", "9.50"]])
    assert capsys.readouterr().out == ("Throughput\n  model   resnet50\n  median  9.50 img/s\n\n")


@pytest.mark.parametrize("image", [224, [75, 61]])
def test_printed_config_is_the_config(capsys, image):
    screen.print_config(RunConfig(image=image))
    text = capsys.readouterr().out
    assert from_dict(yaml.safe_load(text)) == RunConfig(image=image)
    assert f"image: {RunConfig(image=image).image}\n" in text
