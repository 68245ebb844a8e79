"""Is a broken file found before the first step, and a far shrunk image told by the plan?"""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tifffile
from PIL import Image

from hires.core.config.data_config import DataConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.data import start_check
from hires.data.source import open_data, step_indices
from hires.data.start_check import require_readable, size_finding


@pytest.fixture
def config(tmp_path: Path, pixels) -> RunConfig:
    """Returns a run over a folder of twelve images, four a step, for three steps."""
    for place in range(12):
        file = tmp_path / "data" / "ab"[place % 2] / f"{place:02d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(20, 20, 3, seed=place)).save(file)
    data = DataConfig(name="folder", path=str(tmp_path / "data"))
    return RunConfig(image=[16, 16], batch=4, steps=3, data=data)


def checks(config: RunConfig, rank: int = 0, world: int = 1, steps: int = 3) -> str:
    """Returns what the check of a rank says; nothing if all is well."""
    try:
        require_readable(config, open_data(config), range(steps), rank, world)
    except RunError as error:
        return str(error)
    return ""


def spoil(config: RunConfig, index: int) -> Path:
    """Cuts off one image of the run's folder."""
    files = sorted(Path(str(config.data.path)).rglob("*.png"))
    files[index].write_bytes(files[index].read_bytes()[:-200])
    return files[index]


def test_file_of_the_last_step_is_found_and_named_by_one_rank(config):
    assert checks(config) == ""
    last = step_indices(2, 4, 12, config.seed, True)[-1]
    name = spoil(config, last)
    assert checks(config, steps=2) == ""  # a file that no step reads ends nothing
    told = [checks(config, rank, 3) for rank in range(3)]
    [text] = filter(None, told)
    assert str(name) in text
    assert "truncated" in text
    assert f"`hires data check {config.data.path}`" in text


def test_where_decoding_all_would_take_long_the_others_are_opened(config, monkeypatch):
    monkeypatch.setattr(start_check, "DECODED_BYTES", 0)
    assert checks(config) == ""
    spoil(config, 3)
    assert "truncated" in checks(config)


def test_cut_tiff_is_found_without_decoding_it(tmp_path, config, pixels, monkeypatch):
    monkeypatch.setattr(start_check, "DECODED_BYTES", 0)
    for number, how in enumerate(({}, {"tile": (16, 16), "compression": "zlib"})):
        file = Path(str(config.data.path), "a", f"x{number}.tif")
        tifffile.imwrite(file, pixels(64, 64, 3), photometric="rgb", **how)
        assert checks(config, steps=6) == ""
        file.write_bytes(file.read_bytes()[:-50])
        assert "it is cut off" in checks(config, steps=6)
        file.unlink()


def test_check_is_bounded_in_seconds_and_the_first_steps_come_first(config, monkeypatch, caplog):
    clock = itertools.count(step=2)  # every look at it is two seconds later
    # Only the check looks at this clock: threads of the tests' process look at the real one.
    monkeypatch.setattr(start_check, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    caplog.set_level(logging.INFO)
    schedule = [i for step in range(3) for i in step_indices(step, 4, 12, config.seed, True)]
    spoil(config, schedule[5])
    assert checks(config) == ""
    assert "checked the first 5 of 12 image files in 10 s" in caplog.text
    assert checks(config, rank=1, world=2) != ""
    assert checks(config, rank=0, world=2) == ""
    assert "checked the first 5 of 6 image files" in caplog.text
    monkeypatch.setattr(start_check, "SECONDS", 100)
    checks(config, world=2)
    assert "checked all 6 image files of this rank" in caplog.text


def test_size_that_data_fit_refuses_is_found_too(config):
    refused = replace(config, data=replace(config.data, fit="error"))
    assert "it has 20 x 20 pixels where image asks for 16 x 16" in checks(refused)


def test_synthetic_images_need_no_check():
    assert checks(RunConfig()) == ""
    assert size_finding(RunConfig()) is None


def test_image_that_is_shrunk_more_than_twice_is_a_note_of_the_plan(config, pixels):
    assert size_finding(config) is None
    Image.fromarray(pixels(40, 33, 3)).save(Path(str(config.data.path), "a", "large.png"))
    severity, key, text = size_finding(config) or ("", "", "")
    assert (severity, key) == ("note", "data.fit")
    assert "shrinks 1 of the 13 images" in text
    assert "40 x 33 pixels to 16 x 16" in text
    assert size_finding(replace(config, data=replace(config.data, fit="crop"))) is None
    small = replace(config, image=[8, 8])
    assert "shrinks all images" in (size_finding(small) or ("", "", ""))[2]


def test_file_that_cannot_be_opened_is_an_error_of_the_plan_if_the_run_reads_it(config):
    schedule = [i for step in range(3) for i in step_indices(step, 4, 12, config.seed, True)]
    last = spoil(config, schedule[-1])
    severity, key, text = size_finding(replace(config, batch=2)) or ("", "", "")
    assert (severity, key) == ("warning", "data.path")
    assert str(last) in text
    assert (size_finding(config) or ("",))[0] == "error"
    used = spoil(config, schedule[0])
    severity, _, text = size_finding(replace(config, batch=2)) or ("", "", "")
    assert severity == "error"
    assert str(used) in text
