"""Does the check of a folder find what a run would refuse, change or ignore?"""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from hires.core.config.data_config import DataConfig
from hires.core.config.model_config import ModelConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, RunError
from hires.data import checked_image
from hires.data.data_check import check_data
from hires.data.source import open_source

COLOUR = (40, 50, 3)


@pytest.fixture
def folder(tmp_path: Path, pixels) -> Path:
    """Returns a folder of two classes with four good images each, all different."""
    for place in range(8):
        file = tmp_path / "data" / "ab"[place % 2] / f"{place}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(*COLOUR, seed=place)).save(file)
    return tmp_path / "data"


def found(folder: Path, config: RunConfig | None = None, **how) -> dict[str, list[str]]:
    """Returns the files of every finding, by its severity and first words."""
    report = check_data(str(folder), config or RunConfig(), **how)
    return {
        f"{one.severity}: {' '.join(one.text.split()[:3])}": one.files for one in report.findings
    }


def test_good_folder_has_no_findings(folder):
    report = check_data(str(folder), RunConfig())
    assert (report.ok, report.findings, report.classes) == (True, [], {"a": 4, "b": 4})
    [kind] = report.kinds()
    assert (kind["format"], kind["colours"], kind["bits"], kind["images"]) == ("PNG", "RGB", 8, 8)


def test_all_unreadable_files_are_listed_with_their_reasons(folder, pixels):
    whole = (folder / "a/0.png").read_bytes()
    (folder / "a/cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "a/empty.jpg").touch()
    (folder / "a/text.tif").write_text("hello")
    floats = 9 * pixels(8, 8, 3, dtype=np.float32)
    tifffile.imwrite(folder / "a/float.tif", floats, photometric="rgb")
    report = check_data(str(folder), RunConfig())
    assert not report.ok
    [finding] = report.findings
    names = [line.partition(":")[0] for line in finding.files]
    assert names == ["a/cut.png", "a/empty.jpg", "a/float.tif", "a/text.tif"]
    assert "a/empty.jpg: the file is empty" in finding.files
    assert "floats reach from" in finding.files[2]


def test_paths_are_relative_to_a_folder_of_one_letter(tmp_path, pixels, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("red/a.png", "red/b.png", "d/c.png"):
        file = Path("d", name)
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(*COLOUR, seed=name == "d/c.png")).save(file)
    Path("d/red/x1.png").touch()
    Path("d/red/red.txt").touch()
    files = [file for own in found(Path("d")).values() for file in own]
    assert files == ["red/x1.png: the file is empty", "red/b.png: red/a.png", "red/red.txt"]
    assert check_data("d", RunConfig()).images[0].path == "d/c.png"


def test_empty_classes_are_all_named_and_end_a_run(folder):
    for name in ("empty", "none"):
        (folder / name).mkdir()
    report = check_data(str(folder), RunConfig())
    assert not report.ok
    assert report.findings[0].files == ["empty", "none"]


def test_colours_bits_and_orientation_that_differ_are_told(folder, pixels):
    Image.fromarray(pixels(40, 50)).save(folder / "a/grey.png")
    Image.fromarray(pixels(40, 50, 4)).save(folder / "a/alpha.png")
    Image.fromarray(pixels(40, 50, 4), "CMYK").save(folder / "a/cmyk.jpg")
    Image.fromarray(pixels(*COLOUR, seed=9)).convert("P").save(folder / "a/palette.png")
    tifffile.imwrite(folder / "a/deep.tif", pixels(*COLOUR, dtype=np.uint16))
    turned = Image.Exif()
    turned[274] = 6
    Image.fromarray(pixels(*COLOUR, seed=10)).save(folder / "a/turned.jpg", exif=turned)
    Image.fromarray(pixels(*COLOUR, seed=11)).save(folder / "a/named.jpg", "PNG")
    (folder / "a/notes.txt").write_text("notes")
    assert found(folder) == {
        "warning: shown rotated or": ["a/turned.jpg"],
        "note: with an alpha": ["a/alpha.png"],
        "note: in CMYK, converted": ["a/cmyk.jpg"],
        "note: with a palette,": ["a/palette.png"],
        "note: grey among images": ["a/grey.png"],
        "note: of another bit": ["a/deep.tif: 16"],
        "note: of another format": ["a/named.jpg: PNG"],
        "note: ignored, because they": ["a/notes.txt"],
    }


def test_sixteen_bits_of_a_colour_png_are_not_all_read(folder):
    def chunk(kind: bytes, data: bytes) -> bytes:
        import struct
        import zlib

        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress((b"\0" + bytes(range(12))) * 2))
    data = b"\x89PNG\r\n\x1a\n" + header + body + chunk(b"IEND", b"")
    (folder / "a/deep.png").write_bytes(data)
    assert found(folder)["warning: with 16 bits"] == ["a/deep.png"]


def test_same_pixels_are_found_however_they_are_stored(folder, pixels):
    shutil.copy(folder / "a/0.png", folder / "a/copy.png")
    shutil.copy(folder / "a/0.png", folder / "b/copy.png")
    tifffile.imwrite(folder / "b/again.tif", pixels(*COLOUR, seed=1), photometric="rgb")
    texts = {one.text: one.files for one in check_data(str(folder), RunConfig()).findings}
    assert texts == {
        "with the pixels of an image of another class": ["b/copy.png: a/0.png"],
        "with the pixels of another image, which counts twice": [
            "a/copy.png: a/0.png",
            "b/again.tif: b/1.png",
        ],
    }


def test_names_that_differ_in_case_only(folder, pixels):
    Image.fromarray(pixels(*COLOUR, seed=20)).save(folder / "a/x.png")
    Image.fromarray(pixels(*COLOUR, seed=21)).save(folder / "a/X.png")
    assert found(folder) == {"warning: with the name": ["a/x.png: X.png"]}


@pytest.mark.parametrize(
    ("fit", "told"),
    [
        ("error", ["error: not of 19"]),
        ("crop", ["note: cropped or padded"]),
        ("resize", ["warning: shrunk more than", "note: resized to 19"]),
    ],
)
def test_sizes_are_judged_as_the_run_fits_them(folder, pixels, fit, told):
    Image.fromarray(pixels(19, 30, 3)).save(folder / "a/right.png")
    config = RunConfig(image=[19, 30], data=DataConfig("folder", fit=fit))
    assert list(found(folder, config)) == []  # the size of the run was not given
    report = found(folder, config, sized=True)
    assert list(report) == told
    assert len(report[told[-1]]) == 8


def test_samples_that_the_network_cannot_take_are_unreadable(folder):
    config = RunConfig(model=ModelConfig(channels=5))
    [files] = found(folder, config).values()
    assert len(files) == 8
    assert "it has 3 samples per pixel where model.channels=5" in files[0]


def test_uneven_classes(folder, pixels):
    for place in range(37):
        Image.fromarray(pixels(4, 4, 3, seed=place)).save(folder / f"a/more{place}.png")
    [text] = [one.text for one in check_data(str(folder), RunConfig()).findings]
    assert text.startswith("the class a has 41 images, b has 4")


def test_ready_made_pairs_are_told_from_a_folder_of_large_images(tmp_path, pixels):
    for place in range(4):
        for name, size in (("hr/{}.png", 24), ("lr/{}x2.png", 12)):
            file = tmp_path / name.format(place)
            file.parent.mkdir(exist_ok=True)
            Image.fromarray(pixels(size, size, 3, seed=place)).save(file)
    Image.fromarray(pixels(8, 8, 3)).save(tmp_path / "lr/2x2.png")
    (tmp_path / "lr/3x2.png").unlink()
    report = check_data(str(tmp_path), RunConfig(), "pairs")
    texts = {one.text: one.files for one in report.findings}
    [hint] = [text for text in texts if "data=pairs takes both" in text]
    assert hint.endswith(f"use data.path={tmp_path / 'hr'}")
    assert texts["without a partner"] == ["hr/3.png"]
    assert texts["not 2 times as large as their partner, as most are"] == ["hr/2.png: 3 x 3"]
    assert not check_data(str(tmp_path / "hr"), RunConfig(), "pairs").findings


def test_list_names_files_relative_to_it(folder, tmp_path):
    (tmp_path / "list.txt").write_text("# mine\ndata/a/0.png\n\ndata/a/none.png\nlist.txt\n")
    report = check_data(str(tmp_path / "list.txt"), RunConfig())
    assert (report.data, len(report.images), report.ok) == ("list", 3, False)
    assert "data/a/none.png: No such file or directory" in report.findings[0].files
    with pytest.raises(ConfigError, match="is no list of images"):
        check_data(str(folder / "a/0.png"), RunConfig())


def test_folder_without_classes_is_read_as_pairs_and_a_missing_one_is_refused(folder, tmp_path):
    assert check_data(str(folder / "a"), RunConfig()).data == "pairs"
    with pytest.raises(ConfigError, match="does not exist"):
        check_data(str(tmp_path / "none"), RunConfig())
    (tmp_path / "void").mkdir()
    assert not check_data(str(tmp_path / "void"), RunConfig()).ok


def test_large_image_is_decoded_in_bands(tmp_path, pixels, monkeypatch):
    monkeypatch.setattr(checked_image, "BAND_PIXELS", 64)
    file = tmp_path / "a.tif"
    stored = pixels(50, 40, 3)
    for how in ({"tile": (16, 16)}, {"rowsperstrip": 7, "compression": "zlib"}, {}):
        tifffile.imwrite(file, stored, **how)
        banded = checked_image.decoded(str(file), 3, 10**9)
        monkeypatch.setattr(checked_image, "BAND_PIXELS", 10**9)
        assert checked_image.decoded(str(file), 3, 10**9).digest == banded.digest != b""
        monkeypatch.setattr(checked_image, "BAND_PIXELS", 64)


def test_verb_prints_tables_and_fails_if_a_run_would(hires, folder):
    answer = hires("data", "check", str(folder))
    assert (answer.code, answer.err) == (0, "")
    assert "a run can read all of it" in answer.out
    (folder / "a/0.png").write_bytes(b"")
    answer = hires("data", "check", str(folder), "image=32", "model.channels=1")
    assert answer.code == 1
    assert "a/0.png: the file is empty" in answer.out
    facts = json.loads(hires("data", "check", str(folder), "--json").out)
    assert not facts["ok"]
    assert facts["findings"][0]["files"] == ["a/0.png: the file is empty"]
    # The words of a run will do.
    answer = hires("data", "check", "data=folder", f"data.path={folder}", "--json")
    assert json.loads(answer.out) == facts | {"path": str(folder)}
    assert hires("data", "check", "data=synthetic").code == 2


def test_folder_is_named_where_a_run_meets_a_broken_file(folder):
    (folder / "a/0.png").write_bytes(b"\x89PNG")
    data = DataConfig(name="folder", path=str(folder))
    with pytest.raises(RunError, match=r"`hires data check .*/data` lists all such files"):
        open_source(data, (8, 8), 3, seed=0).window(0, (0, 8), (0, 8))
