import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hires.core.errors import RunError
from hires.report import tables
from hires.report.columns import ACCURACY, PREDICTION, memory_rows, values

ROOT = Path(__file__).parents[2]
SPREAD = {"median": 12.3456, "p10": 11.0, "p90": 13.0}


@pytest.fixture
def record():
    sizes = {"params_bytes": 3 << 20, "grads_bytes": 2 << 20, "optimizer_bytes": None}
    place = {"replica": 0, "stage": [0], "tile": [[0, 1]], "peak_bytes": 3 << 29, "source": "rss"}
    place |= {"predicted_bytes": 1 << 30}
    nothing = {**dict.fromkeys([*place, *sizes]), "stage": [None], "tile": [None]}
    return {
        "state": "done",
        "cause": None,
        "model": "resnet50",
        "image": [75, 61],
        "layout": "sp",
        "precision": "bf16",
        "world": 2,
        "images_per_step": 8,
        "throughput": {"img_per_s": SPREAD, "step_s": SPREAD, "samples": 10},
        "memory": [{"rank": 0, **place, **sizes}, {"rank": 1, **nothing}],
    }


def test_throughput_markdown_has_units_and_is_aligned(record):
    title, _, heads, rule, row = tables.tables(record)[0].to_markdown().splitlines()
    assert title == "## Throughput"
    assert len(heads) == len(rule) == len(row)
    assert heads.startswith("| model    | image | layout | precision | ranks | images/step |")
    assert rule.startswith("| -------- | ----- | ------ | --------- | ----: | ----------: |")
    assert row.startswith("| resnet50 | 75x61 | sp     | bf16      |     2 |           8 |")
    shown = dict(zip(cells(heads), cells(row), strict=True))
    assert shown["median [img/s]"] == "12.35"
    assert shown["step p90 [s]"] == "13.0000"


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_memory_markdown_is_in_mib_and_dashes_what_is_unknown(record):
    lines = tables.tables(record)[1].to_markdown().splitlines()
    assert cells(lines[2])[4:8] == ["peak [MiB]", "predicted [MiB]", "error [%]", "measured by"]
    known = ["1536.0", "1024.0", "-33.3", "rss", "3.0", "2.0", "-"]
    assert cells(lines[4]) == ["0", "0", "0", "0,1", *known]
    assert cells(lines[5]) == ["1"] + ["-"] * 10


def test_place_in_both_directions_is_one_cell():
    entries = [{"tile": [0, 2]}, {"tile": [[1, 0], None]}, {"tile": [None, None]}]
    tiles = [row["tile"] for row in memory_rows({"memory": entries})]
    assert tiles == ["0 / 2", "1,0 / none", None]


def test_csv_has_plain_numbers(record):
    row = next(csv.DictReader(io.StringIO(tables.tables(record)[0].to_csv())))
    assert row["img_per_s_median"] == "12.3456"
    assert row["image"] == "75x61"
    rows = list(csv.DictReader(io.StringIO(tables.tables(record)[1].to_csv())))
    assert rows[0]["peak_bytes"] == str(3 << 29)
    assert rows[0]["tile"] == "0,1"
    assert rows[1]["peak_bytes"] == ""


def test_run_without_samples_has_dashes(record):
    record["throughput"] = {"img_per_s": None, "step_s": None, "samples": 0}
    assert tables.tables(record)[0].text_rows()[0][6:] == ["-"] * 6 + ["0"]


def test_bar_in_a_cell_does_not_end_it(record):
    record["layout"] = "a|b"
    assert "| a\\|b " in tables.tables(record)[0].to_markdown()


def test_write_makes_four_files(record, tmp_path):
    written = tables.write(tmp_path, record)
    names = ["memory.csv", "memory.md", "throughput.csv", "throughput.md"]
    assert sorted(path.name for path in written) == names
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_run_that_is_not_done_has_no_tables(record, tmp_path, state):
    assert tables.write(tmp_path, {**record, "state": state}) == []
    assert not list(tmp_path.iterdir())


def test_write_without_room_is_explained(record, tmp_path):
    with pytest.raises(RunError, match=r"cannot write .*throughput\.csv"):
        tables.write(tmp_path / "gone", record)


def test_by_hand_prints_and_writes(record, tmp_path, capsys):
    (tmp_path / "record.json").write_text(json.dumps(record))
    assert tables.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert (
        out
        == (tmp_path / "throughput.md").read_text() + "\n" + (tmp_path / "memory.md").read_text()
    )


def test_module_is_a_command(record, tmp_path):
    """As launch.sh calls it: a module without its last lines does nothing and says nothing."""
    (tmp_path / "record.json").write_text(json.dumps(record))
    command = [sys.executable, "-m", "hires.report.tables", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("## Throughput\n")
    assert "## Memory" in done.stdout


def test_by_hand_before_the_end(tmp_path, capsys):
    assert tables.main([str(tmp_path)]) == 1
    assert "no attempt has ended yet" in capsys.readouterr().err


def test_numbers_of_an_evaluation_have_their_interval_beside_them():
    found = {"mean_iou": 0.5, "mean_iou_ci95": [0.4, 0.625], "psnr": 31.5, "psnr_ci95": None}
    row = values(ACCURACY, {"evaluation": found})
    assert [row[f"mean_iou{end}"] for end in ("", "_low", "_high")] == [0.5, 0.4, 0.625]
    assert [row[f"psnr{end}"] for end in ("", "_low", "_high")] == [31.5, None, None]
    order = [column.key for column in ACCURACY]
    assert order.index("mean_iou_high") == order.index("mean_iou") + 2


def test_predictions_have_their_time_per_megapixel():
    record = {
        "throughput": {"step_s": {"median": 6.0}},
        "images_per_step": 2,
        "image": [1000, 1500],
    }
    assert values(PREDICTION, record)["s_per_mp"] == 2.0
    for key in record:
        rest = {name: value for name, value in record.items() if name != key}
        assert values(PREDICTION, rest)["s_per_mp"] is None
