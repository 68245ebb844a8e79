"""Does `hires data check` find what ends a run on label maps, slides, CIFAR-10 and ImageNet?"""

from __future__ import annotations

import json
import shlex

import numpy as np
import pytest
from PIL import Image

from hires.cli.main import main
from hires.core.config.data_config import DataConfig
from hires.core.errors import RunError
from hires.data.mask_shapes import make_masks
from hires.data.slide_shapes import make_slides
from hires.data.source import open_source
from tests.helpers.cifar10_files import cifar10_folder


def check(capsys, *words):
    """Returns the exit code of a check, and what it printed."""
    code = main(["data", "check", *map(str, words)])
    return code, " ".join(capsys.readouterr().out.split())


@pytest.fixture
def masks(tmp_path):
    make_masks(tmp_path / "shapes", 3, 4, (24, 24), 0)
    return tmp_path / "shapes"


def test_good_label_maps_are_read_as_such(masks, capsys):
    code, out = check(capsys, masks, "data=masks", "data.classes=3")
    assert code == 0, out
    assert "4 files, read as data=masks" in out
    assert "a run can read all of it" in out


def test_sizes_ranges_and_broken_label_maps_are_listed(masks, capsys):
    first, second, third, _ = sorted((masks / "masks").iterdir())
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(first)
    Image.fromarray(np.full((24, 24), 7, np.uint8)).save(second)
    third.write_bytes(b"no picture")
    code, out = check(capsys, masks, "data=masks", "data.classes=3")
    assert code == 1
    assert f"masks/{first.name}: it has 9 x 9 pixels, its image" in out
    assert f"masks/{second.name}: it holds the class 7, and data.classes=3" in out
    assert f"masks/{third.name}: " in out
    assert "error 3 label maps that would end a run" in out
    code, out = check(capsys, masks, "data=masks", "data.classes=3", "data.ignore=7")
    assert f"masks/{second.name}: " not in out
    assert "label maps without a label that counts" in out


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (255, ["data.ignore=255"]),
        (0, ["loss=cross_entropy", "loss.ignore_index=0"]),
        (2, ["loss=cross_entropy", "loss.weights=[1,1,0]"]),
        (1, []),
    ],
)
def test_label_maps_without_a_label_that_counts_are_listed(masks, capsys, value, words):
    first, *_ = sorted((masks / "masks").iterdir())
    Image.fromarray(np.full((24, 24), value, np.uint8)).save(first)
    code, out = check(capsys, masks, "data=masks", "data.classes=3", *words, "--json")
    assert code == 0, out
    found = [one for one in json.loads(out)["findings"] if "label that counts" in one["text"]]
    assert [one["files"] for one in found] == ([[f"masks/{first.name}"]] if words else [])


@pytest.mark.parametrize("part", ["", "train/"])
def test_classes_that_never_count_are_listed(tmp_path, capsys, part):
    for one in ("train/", "val/") if part else ("",):
        for name in ("cat", "dog", "eel"):
            (tmp_path / one / name).mkdir(parents=True)
            Image.new("RGB", (8, 8), (len(one), ord(name[0]), 9)).save(
                tmp_path / one / name / f"{name}.png"
            )
    words = [tmp_path, "data=folder", f"data.split={'train' if part else 'all'}", "--json"]
    loss = ["loss=cross_entropy", "loss.ignore_index=0", "loss.weights=[1,1,0]"]
    for keys, listed in ([], []), (loss, [["cat", "eel"]]):
        code, out = check(capsys, *words, *keys)
        assert code == 0, out
        found = [one for one in json.loads(out)["findings"] if "does not count" in one["text"]]
        assert [one["files"] for one in found] == listed


def test_lossy_label_maps_are_listed(masks, capsys):
    first, *_ = sorted((masks / "masks").iterdir())
    Image.open(first).convert("L").save(first, format="JPEG")
    code, out = check(capsys, masks, "data=masks", "data.classes=3", "data.max_pixels=99999")
    assert code == 1
    assert f"masks/{first.name}: a label map" in out
    assert "JPEG" in out


def test_rank_names_the_command_that_lists_all_bad_label_maps(masks, capsys):
    # It named a check of a folder of classes, which found nothing.
    for file in (masks / "masks").iterdir():
        Image.fromarray(np.full((24, 24), 7, np.uint8)).save(file)
    data = DataConfig(name="masks", path=str(masks), classes=3, ignore=255)
    with pytest.raises(RunError) as caught:
        open_source(data, (24, 24), 3, 0).check(0, 2**30)
    command = str(caught.value).partition("`hires ")[2].partition("`")[0]
    assert command == f"data check {masks} data=masks data.classes=3 data.ignore=255"
    code, out = check(capsys, *shlex.split(command)[2:])
    assert (code, "error 4 label maps" in out) == (1, True)


def test_folder_of_label_maps_says_how_it_is_checked(masks, capsys):
    assert "data=masks checks them as pairs" in check(capsys, masks)[1]


def test_slides_are_decoded_patch_by_patch(tmp_path, capsys):
    folder = tmp_path / "slides"
    make_slides(folder, 2, 2, (384, 512), 0)
    words = folder, "data=slide", "image=64", "data.labels=labels.csv"
    code, out = check(capsys, *words)
    assert code == 0, out
    assert "2 files, read as data=slide" in out
    broken = sorted(folder.rglob("*.tif"))[0]
    broken.write_bytes(broken.read_bytes()[:2000])
    code, out = check(capsys, *words)
    assert code == 1
    assert f"{broken.relative_to(folder)}: " in out
    assert "error 1 slides that would end a run" in out


@pytest.mark.parametrize(
    ("tiny", "severity"), [(1, "note"), (2, "note"), (3, "warning"), (4, "error")]
)
def test_slides_without_a_patch_are_found(tiny, severity, tmp_path, capsys):
    for count, size in ((4 - tiny, (384, 512)), (tiny, (32, 32))):
        if count:
            make_slides(tmp_path / "all" / str(size[0]), 1, count, size, 0)
    # No slide is tissue as a whole, and the tiny ones are one patch.
    code, out = check(capsys, tmp_path / "all", "data=slide", "image=32", "data.tissue=0.95")
    assert f"{severity} {tiny} without a patch to learn from" in out
    assert ("most of the slides" in out) == (severity == "warning")
    assert code == (severity == "error")


def test_records_of_cifar10_are_counted(tmp_path, capsys):
    folder = cifar10_folder(tmp_path / "cifar")
    code, out = check(capsys, folder, "data=cifar10")
    assert code == 0, out
    assert "airplane" in out
    file = next(folder.glob("data_batch_3.bin"))
    file.write_bytes(file.read_bytes()[:-1])
    code, out = check(capsys, folder, "data=cifar10")
    assert (code, "data_batch_3.bin has" in out) == (1, True)


@pytest.fixture
def imagenet(tmp_path, pixels):
    """A folder in the layout of ImageNet, with the kinds of JPEG that are in it."""
    kinds = {"RGB": (30, 40, 3), "L": (50, 30), "CMYK": (20, 60, 4)}
    for part, count in (("train", 3), ("val", 1)):
        for label, synset in enumerate(("n01440764", "n02102040", "n03888257")):
            folder = tmp_path / "imagenet" / part / synset
            folder.mkdir(parents=True)
            for number in range(count):
                mode = [*kinds][(number + label) % 3]
                made = pixels(*kinds[mode], seed=10 * label + number + 100 * (part == "val"))
                Image.fromarray(made, mode).save(
                    folder / f"{synset}_{number}.JPEG", "JPEG", quality=95
                )
    return tmp_path / "imagenet"


@pytest.mark.parametrize("data", ["imagenet", "imagenette"])
def test_parts_of_imagenet_are_no_classes(imagenet, capsys, data):
    code, out = check(capsys, imagenet, f"data={data}")
    assert code == 0, out
    assert "12 files, read as data=folder" in out
    assert "train/n01440764" in out
    assert "val/n03888257" in out
    assert "in CMYK, converted to RGB" in out
    assert "grey among images in colour" in out
    (imagenet / "val" / "n02102040").rename(imagenet / "val" / "n09999999")
    code, out = check(capsys, imagenet, f"data={data}")
    assert (code, "so labels would differ" in out) == (1, True)


def test_parts_that_a_run_would_take_for_classes_are_named(imagenet, capsys):
    out = check(capsys, imagenet, "data=folder")[1]
    assert "train, val are read as classes; data.split=train reads them as parts" in out


@pytest.mark.parametrize("data", ["imagenet", "imagenette"])
def test_images_of_imagenet_are_those_of_pillow(imagenet, data):
    from hires.cli.compose.compose_config import compose

    for split, part, count in (("train", "train", 9), ("validation", "val", 3)):
        words = f"data={data}", f"data.path={imagenet}", f"data.split={split}", "data.fit=crop"
        source = open_source(compose(words).data, (20, 30), 3, 0)
        assert (len(source), source.num_classes) == (count, 3)
        assert source.class_names == ("n01440764", "n02102040", "n03888257")
        for i in range(count):
            path = imagenet / part / source.name(i)
            assert source.class_names[source.label(i)] == path.parent.name
            with Image.open(path) as image:
                plain = np.asarray(image.convert("RGB"), np.float64)
            height, width = plain.shape[:2]
            top, left = (height - 20) // 2, (width - 30) // 2
            wanted = plain[top : top + 20, left : left + 30].transpose(2, 0, 1) / 255 * 4 - 2
            made = source.window(i, (0, 20), (0, 30))
            assert np.abs(made - wanted).max() < 0.02, path


def test_digits_have_no_files(tmp_path, capsys):
    assert main(["data", "check", str(tmp_path), "data=digits"]) == 2
    assert "data=digits has no files to check; use data=folder" in capsys.readouterr().err
