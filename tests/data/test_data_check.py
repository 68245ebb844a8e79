"""What a run would refuse, change or ignore is found before it: by data check, plan and start."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tifffile
from PIL import Image

from hires.cli.main import main
from hires.core.config.data_config import DataConfig
from hires.core.config.run_config import RunConfig
from hires.core.config.training_config import LossConfig
from hires.core.errors import RunError
from hires.data import data_check, start_check
from hires.data.data_check import check_data, decoded
from hires.data.make_data import make_data
from hires.data.opening import open_data
from hires.data.order import step_images
from hires.data.start_check import image_findings, require_readable
from tests.helpers.image_files import png

COLOUR = (40, 50, 3)


def write_images(tmp_path, pixels, count, *shape):
    """Returns a folder of two classes with some good images, all different."""
    for place in range(count):
        file = tmp_path / "data" / "ab"[place % 2] / f"{place:02d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(*shape, seed=place)).save(file)
    return tmp_path / "data"


@pytest.fixture
def folder(tmp_path, pixels):
    return write_images(tmp_path, pixels, 8, *COLOUR)


def findings(folder: Path, config: RunConfig | None = None, **how) -> dict[str, list[str]]:
    """Returns the files of every finding, by its severity and first words."""
    report = check_data(str(folder), config or RunConfig(), **how)
    return {
        f"{one.severity}: {' '.join(one.text.split()[:3])}": one.files for one in report.findings
    }


def test_good_folder_has_no_findings_and_its_images_decode_in_bands(folder, pixels, monkeypatch):
    report = check_data(str(folder), RunConfig())
    assert (report.ok, report.findings, report.classes) == (True, [], {"a": 4, "b": 4})
    file = folder / "a.tif"
    tifffile.imwrite(file, pixels(50, 40, 3), rowsperstrip=7, compression="zlib")
    digest = decoded(str(file), RunConfig()).digest
    monkeypatch.setattr(data_check, "BAND_PIXELS", 64)
    assert decoded(str(file), RunConfig()).digest == digest != b""


def test_unreadable_files_are_all_listed_with_their_reasons_by_a_verb_that_fails(
    folder, tmp_path, pixels, capsys
):
    def check(*words):
        capsys.readouterr()
        return main(["data", "check", *map(str, words)]), capsys.readouterr().out

    assert check(folder)[0] == 0
    whole = (folder / "a/00.png").read_bytes()
    (folder / "a/cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "a/empty.jpg").touch()
    (folder / "a/text.tif").write_text("hello")
    floats = 9 * pixels(8, 8, 3, dtype=np.float32)
    tifffile.imwrite(folder / "a/float.tif", floats, photometric="rgb")
    (folder / "none").mkdir()
    code, out = check(folder, "--json")
    empty, listed = json.loads(out)["findings"]
    unreadable = listed["files"]
    names = [line.partition(":")[0] for line in unreadable]
    assert code == 1
    assert "the class 'none' has no images" in empty["text"]
    assert names == ["a/cut.png", "a/empty.jpg", "a/float.tif", "a/text.tif"]
    assert "a/empty.jpg: the file is empty" in unreadable
    assert "floats reach from" in unreadable[2]
    assert check("data=synthetic")[0] == check(folder, "data=digits")[0] == 2
    for part, name in itertools.product(("train", "val"), ("cat", "dog", "eel")):
        file = tmp_path / part / name / f"{name}.png"
        file.parent.mkdir(parents=True)
        Image.new("RGB", (8, 8), (len(part), ord(name[0]), 9)).save(file)
    loss = ["loss=cross_entropy", "loss.ignore_index=0", "loss.weights=[1,1,0]"]
    code, out = check(tmp_path, "data=folder", "data.split=train", "--json", *loss)
    [finding] = [one for one in json.loads(out)["findings"] if "does not count" in one["text"]]
    assert (code, finding["files"]) == (0, ["cat", "eel"])


def test_bits_and_orientation_that_a_run_does_not_read_are_listed(folder, pixels):
    for name, size in (("grey", (40, 50)), ("tall", (50, 30))):
        Image.fromarray(pixels(*size)).save(folder / f"a/{name}.png")
    Image.fromarray(pixels(40, 50, dtype=np.uint16)).save(folder / "a/grey16.png")  # all are read
    rows = (b"\0" + bytes(range(100, 112))) * 2
    (folder / "a/deep.png").write_bytes(png(2, 2, 16, 2, rows))  # Pillow reads 8 of its 16 bits
    turned = Image.Exif()
    turned[274] = 6
    Image.fromarray(pixels(*COLOUR, seed=10)).save(folder / "a/turned.jpg", exif=turned)
    (folder / "a/notes.txt").write_text("notes")
    assert findings(folder) == {
        "warning: shown rotated or": ["a/turned.jpg"],
        "warning: with 16 bits": ["a/deep.png"],
        "note: ignored, because they": ["a/notes.txt"],
    }
    kinds = check_data(str(folder), RunConfig()).kinds()
    assert {(one["colours"], one["bits"], one["images"]) for one in kinds} == {
        ("RGB", 8, 8), ("RGB", 8, 1), ("RGB", 16, 1), ("grey", 8, 2), ("grey", 16, 1),
    }  # fmt: skip
    assert [(one["smallest"], one["largest"]) for one in kinds if one["sizes"] == 2] == [
        ((50, 30), (40, 50))  # by their pixels
    ]


def test_same_pixels_are_found_however_they_are_stored(folder, pixels):
    shutil.copy(folder / "a/00.png", folder / "a/copy.png")
    shutil.copy(folder / "a/00.png", folder / "b/copy.png")
    tifffile.imwrite(folder / "b/again.tif", pixels(*COLOUR, seed=1), photometric="rgb")
    texts = {one.text: one.files for one in check_data(str(folder), RunConfig()).findings}
    assert texts == {
        "with the pixels of an image of another class": ["b/copy.png: a/00.png"],
        "with the pixels of another image, which counts twice": [
            "a/copy.png: a/00.png", "b/again.tif: b/01.png",
        ],
    }  # fmt: skip


def test_sizes_are_judged_as_the_run_fits_them(folder):
    for fit, words in (
        ("error", ["error: not of 19"]),
        ("crop", ["note: cropped or padded"]),
        ("resize", ["warning: shrunk more than", "note: resized to 19"]),
    ):
        config = RunConfig(image=[19, 30], data=DataConfig("folder", fit=fit))
        assert not findings(folder, config)  # the size of the run was not given
        assert list(findings(folder, config, sized=True)) == words


def report_of(kind, path, loss=None, image=(24, 24), **keys):
    """Returns what the check of labels beside pixels finds in a folder."""
    data = DataConfig(name=kind, **keys)
    config = RunConfig(image=[*image], data=data, loss=LossConfig(**(loss or {})))
    return check_data(str(path), config, kind, sized=True)


@pytest.mark.parametrize(
    ("value", "keys", "loss"),
    [
        (255, {"ignore": 255}, {}),
        (0, {}, {"name": "cross_entropy", "ignore_index": 0}),
        (2, {}, {"name": "cross_entropy", "weights": [1.0, 1.0, 0.0]}),
        (1, {}, None),
    ],
)
def test_label_maps_without_a_label_that_counts_are_listed(tmp_path, value, keys, loss):
    make_data("masks", tmp_path, 3, 2, (24, 24), 0)
    Image.fromarray(np.full((24, 24), value, np.uint8)).save(tmp_path / "masks" / "00000.png")
    report = report_of("masks", tmp_path, loss, classes=3, **keys)
    listed = [one.files for one in report.findings if "label that counts" in one.text]
    assert report.ok
    assert listed == ([] if loss is None else [["masks/00000.png"]])


@pytest.mark.parametrize(("tiny", "severity"), [(2, "note"), (3, "warning"), (4, "error")])
def test_slides_without_a_patch_are_found(tiny, severity, tmp_path):
    for count, size in ((4 - tiny, (384, 512)), (tiny, (32, 32))):
        if count:
            make_data("slides", tmp_path / "all" / str(size[0]), 1, count, size, 0)
    # No slide is tissue as a whole, and the tiny ones are one patch.
    report = report_of("slide", tmp_path / "all", image=(32, 32), tissue=0.95)
    [finding] = [one for one in report.findings if "without a patch to learn from" in one.text]
    assert (finding.severity, len(finding.files)) == (severity, tiny)
    broken = sorted((tmp_path / "all").rglob("*.tif"))[0]
    broken.write_bytes(broken.read_bytes()[:2000])
    finding = report_of("slide", tmp_path / "all", image=(32, 32)).findings[0]
    assert (finding.severity, len(finding.files)) == ("error", 1)


@pytest.fixture
def config(tmp_path, pixels):
    """A run over a folder of twelve images, four a step, for three steps."""
    folder = write_images(tmp_path, pixels, 12, 20, 20, 3)
    data = DataConfig(name="folder", path=str(folder))
    return RunConfig(image=[16, 16], batch=4, steps=3, data=data)


def refusal(config: RunConfig, rank: int = 0, world: int = 1, steps: int = 3) -> str:
    """Returns what the check of a rank before its first step says; nothing if all is well."""
    try:
        require_readable(config, open_data(config), range(steps), rank, world)
    except RunError as error:
        return str(error)
    return ""


def spoil(config: RunConfig, place: int) -> Path:
    """Cuts off the image that comes at some place of the run."""
    source = open_data(config)
    order = [i for step in range(3) for i in step_images(config, source, step)]
    file = sorted(Path(str(config.data.path)).rglob("*.png"))[order[place]]
    file.write_bytes(file.read_bytes()[:-200])
    return file


@pytest.mark.parametrize("most", [2**27, 0])
def test_broken_file_is_named_by_one_rank_before_the_first_step(config, pixels, monkeypatch, most):
    monkeypatch.setattr(start_check, "DECODED_BYTES", most)  # others are only opened
    assert refusal(config) == ""
    other = replace(config, data=replace(config.data, fit="error"))
    assert "it has 20 x 20 pixels where image asks for 16 x 16" in refusal(other)
    for number, how in enumerate(({}, {"tile": (16, 16), "compression": "zlib"})):
        file = Path(str(config.data.path), "a", f"x{number}.tif")
        tifffile.imwrite(file, pixels(64, 64, 3), photometric="rgb", **how)
        file.write_bytes(file.read_bytes()[:-50])
        assert "it is cut off" in refusal(config, steps=6)
        file.unlink()
    name = spoil(config, -1)
    assert refusal(config, steps=2) == ""  # a file that no step reads ends nothing
    [text] = filter(None, [refusal(config, rank, 3) for rank in range(3)])
    assert str(name) in text
    assert "truncated" in text
    assert f"`hires data check data=folder data.path={config.data.path}`" in text


def test_start_check_is_bounded_in_seconds_and_the_first_steps_come_first(
    config, monkeypatch, caplog
):
    clock = itertools.count(step=2)  # every look at it is two seconds later
    # Only the check looks at this clock: threads of the tests' process look at the real one.
    monkeypatch.setattr(start_check, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    caplog.set_level(logging.INFO)
    spoil(config, 5)
    assert refusal(config) == refusal(config, rank=0, world=2) == ""
    assert "checked 5 image files in 10 s, no others" in caplog.text
    assert refusal(config, rank=1, world=2) != ""


def planned(config: RunConfig, has_maps: bool = False) -> list[str]:
    return [f"{one.severity}: {one}" for one in image_findings(config, has_maps)]


def test_plan_says_what_is_far_shrunk_or_cannot_be_opened(config, pixels):
    read = "12 of 12 images were opened, 12 read whole: PNG, RGB, 8 bits, values 0 to 255 of 255"
    assert planned(config) == [f"note: {read}"]
    large = Path(str(config.data.path), "a", "large.png")
    Image.fromarray(pixels(40, 33, 3)).save(large)
    shrunk = planned(config)[0]
    assert shrunk.startswith("warning: shrunk more than twice to 16 x 16 pixels")
    assert shrunk.endswith("large.png: 40 x 33")
    large.unlink()
    for fit, how in (("resize", "resized"), ("crop", "cropped or padded")):
        other = replace(config, data=replace(config.data, fit=fit))
        assert planned(other, has_maps=True)[0].startswith(f"note: {how} to 16 x 16 pixels")
        assert len(planned(other)) == 1
    last = spoil(config, -1)
    warning = planned(replace(config, batch=2))[0]
    assert (warning[:8], str(last) in warning) == ("warning:", True)
    assert planned(config)[0].startswith("error:")  # if the run reads it


def test_plan_reads_what_ranks_read_and_says_what_a_network_would_not_see(config, pixels):
    def found(image, **how):
        tifffile.imwrite(Path(str(config.data.path), "a", "00.tif"), image, **how)
        return planned(config)

    dim = pixels(16, 16, 3, dtype=np.uint16) // 20
    warning, note = found(dim, photometric="rgb")
    assert warning.startswith("warning: nearly black")
    assert warning.endswith("00.tif")
    assert f"TIFF, RGB, 16 bits, values {dim.min()} to {dim.max()} of 65535" in note
    config.data.normalize = "dataset"
    assert [note] == found(dim, photometric="rgb")
    spoilt = pixels(16, 16, 3, dtype=np.float32)
    spoilt[15, 15, 0] = np.nan
    assert "values that are not finite (NaN" in found(spoilt, photometric="rgb")[0]
    assert "TIFF, grey, 1 bit, v" in found(pixels(16, 16) > 99, photometric="minisblack")[-1]
    slices = found(pixels(5, 16, 16), photometric="minisblack")
    assert slices[0].startswith("warning: with more pages of one size")
    assert "3 channels, 8 bits" in found(pixels(3, 16, 16), ome=True, metadata={"axes": "CYX"})[0]


def test_plan_reads_whole_what_the_first_steps_read(config, pixels, monkeypatch):
    files = sorted(Path(str(config.data.path)).rglob("*.png"))
    for number, file in enumerate(files):
        image = pixels(16, 16, 3, dtype=np.float32, seed=number)
        tifffile.imwrite(file.with_suffix(".tif"), image, photometric="rgb")
        file.unlink()
    text = "12 of 12 images were opened, {} read whole: TIFF, RGB, 32 bits (float)"
    assert text.format(12) in planned(config)[0]
    source = open_data(config)
    third = source.path([*step_images(config, source, 0)][2])
    spoilt = tifffile.imread(third)
    spoilt[0, 0, 0] = np.nan
    tifffile.imwrite(third, spoilt, photometric="rgb")
    assert planned(config)[0].startswith("error:")
    assert third in planned(config)[0]
    assert text.format(2) in planned(config)[-1]
    assert planned(replace(config, steps=1, batch=2))[0].startswith("warning:")
    monkeypatch.setattr(start_check, "DECODED_BYTES", 16 * 16 * 3 * 4)
    assert text.format(1) in planned(config)[0]
