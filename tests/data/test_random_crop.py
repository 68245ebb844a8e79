"""Are random crops alike for every layout, window and target?"""

from __future__ import annotations

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from hires.cli.main import main
from hires.comm.rehearsal import rehearsal
from hires.core.errors import RunError
from hires.data import image_fit
from hires.data.masks import AugmentedMasks
from hires.data.source import PairSource, open_data
from hires.data.start_check import require_readable
from hires.engine.build import contexts_of
from hires.engine.loader import needs_of, slot_loader
from hires.plan.message_routes import has_memory, joined_backends
from tests.helpers.layouts import config_of
from tests.helpers.saved import attempt, make, mean_losses
from tests.helpers.traces import plan_of

LARGE, SIZE = (40, 50), (16, 20)


@pytest.fixture
def folder(tmp_path, pixels):
    """Images with label maps; a pixel of either says where it was."""
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    for number in range(3):
        rows, cols = np.indices(LARGE)
        place = (rows + cols + number) % 3
        colours = np.stack([rows, cols, 80 * place], axis=2).astype(np.uint8)
        tifffile.imwrite(tmp_path / "images" / f"{number}.tif", colours)
        Image.fromarray(place.astype(np.uint8)).save(tmp_path / "masks" / f"{number}.png")
    return tmp_path


def training(folder, name="masks", size=SIZE, task="train", **keys):
    labels = {"classes": 3, "ignore": 255} if name == "masks" else {}
    data = {"name": name, "path": str(folder), "fit": "random_crop", **labels}
    model = {"pairs": "edsr", "masks": "unet"}[name]
    held = {"image": [*size], "data": data, "task": {"name": task}, "model": {"name": model}}
    return config_of(**held, **keys)


def whole(source, i, size=SIZE):
    return source.window(i, (0, size[0]), (0, size[1]))


def corner(pixels):
    """Returns row and column of the source at the first pixel of a window."""
    return tuple(round(float(value + 2) / 4 * 255) for value in pixels[:2, 0, 0])


def test_parts_have_their_own_resolution_and_other_places_in_each_epoch(folder):
    source = open_data(training(folder))
    places = []
    for number in range(60):  # 20 epochs of 3 images
        made = whole(source, number)
        row, col = corner(made)
        stored = tifffile.imread(folder / "images" / f"{number % 3}.tif")[row:, col:]
        wanted = stored[: SIZE[0], : SIZE[1]].transpose(2, 0, 1) / 255 * 4 - 2
        assert np.abs(made - wanted).max() < 1e-6
        places.append((row, col))
        part = source.window(number, (3, 9), (5, 20))
        assert np.array_equal(part, made[:, 3:9, 5:20])
    assert len({*places}) > 50
    assert max(row for row, _ in places) > 20
    assert min(row for row, _ in places) < 4
    assert [corner(whole(open_data(training(folder)), i)) for i in range(6)] == places[:6]
    other = open_data(training(folder, seed=1))
    assert [corner(whole(other, i)) for i in range(6)] != places[:6]


def test_label_maps_are_cut_at_the_place_of_their_image(folder):
    for keys in ({}, {"augment": {"flip": "both", "shift": 2}}):
        source = open_data(training(folder, **keys))
        assert isinstance(source, AugmentedMasks)
        for number in range(12):
            labels = source.labels(number, (0, 16), (0, 20))
            blue = np.round((whole(source, number)[2] + 2) / 4 * 255) / 80
            known = labels != 255
            assert np.array_equal(blue[known], labels[known])


def test_both_images_of_a_pair_are_of_one_place(folder):
    source = open_data(training(folder, "pairs", (8, 10)))
    assert isinstance(source, PairSource)
    first = source.target(0, (0, 16), (0, 20))
    assert first.shape == (3, 16, 20)
    assert not np.array_equal(first, source.target(len(source), (0, 16), (0, 20)))
    # Rows and columns rise in a line, so that a smaller copy has the same means.
    assert np.abs(whole(source, 0, (8, 10))[:2].mean() - first[:2].mean()) < 0.01


@pytest.mark.parametrize("task", ["evaluate", "predict"])
def test_other_tasks_see_the_middle(folder, task):
    source = open_data(training(folder, task=task))
    assert corner(whole(source, 0)) == ((40 - 16) // 2, (50 - 20) // 2)


def test_smaller_images_are_set_in_grey_as_by_crop(folder):
    size = (48, 20)
    source, middle = (
        open_data(training(folder, size=size, task=task)) for task in ("train", "evaluate")
    )
    made = whole(source, 0, size)
    assert np.abs(made[:, :4]).max() < 1e-6
    assert np.array_equal(made[:, :4], whole(middle, 0, size)[:, :4])
    assert (source.labels(0, (0, 4), (0, 20)) == 255).all()


@pytest.mark.parametrize("fit", ["crop", "random_crop"])
def test_label_maps_need_a_value_beside_them_only_of_smaller_images(fit, folder, capsys):
    data = {"name": "masks", "path": str(folder), "classes": 3, "fit": fit}
    for size in ((16, 20), LARGE):
        config = config_of(image=[*size], data=data, model={"name": "unet"})
        source = open_data(config)
        require_readable(config, source, range(3), 0, 1)
        assert {*source.labels(0, (0, size[0]), (0, size[1])).flatten()} == {0, 1, 2}
        words = [f"data.{key}={value}" for key, value in data.items() if key != "name"]
        words += ["data=masks", f"image=[{size[0]},{size[1]}]"]
        assert main(["data", "check", *words]) == 0
    for size in ((48, 20), (16, 51)):
        config = config_of(image=[*size], data=data, model={"name": "unet"})
        source = open_data(config)
        told = rf"data\.fit={fit} brings in .* {size[0]} x {size[1]}, and this one has 40 x 50"
        with pytest.raises(RunError, match=told):
            require_readable(config, source, range(3), 0, 1)
        with pytest.raises(RunError, match=told):
            source.labels(0, (0, 16), (0, 20))
        words[-1] = f"image=[{size[0]},{size[1]}]"
        capsys.readouterr()
        assert main(["data", "check", *words]) == 1
        assert f"data.fit={fit} brings in" in " ".join(capsys.readouterr().out.split())
    kept = {**data, "ignore": 255}
    source = open_data(config_of(image=[48, 20], data=kept, model={"name": "unet"}))
    assert (source.labels(0, (0, 4), (0, 20)) == 255).all()


def test_only_the_window_is_read():
    read = []

    def source(rows, cols):
        read.append((rows, cols))
        return np.zeros((rows[1] - rows[0], cols[1] - cols[0], 3), np.float32)

    place = (0.5, 0.999)
    image_fit.fitted(
        source, (100, 90), (30, 30), "random_crop", (0, 10), (5, 9), fill=0.0, place=place
    )
    assert read == [((35, 45), (65, 69))]


def network(folder, **parallel):
    data = {"name": "masks", "path": str(folder), "classes": 3, "ignore": 255}
    return {
        "image": [16, 24], "batch": 4, "data": {**data, "fit": "random_crop"}, "steps": 4,
        "model": {"name": "unet", "levels": 2, "width": 4, "classes": 3}, "parallel": parallel,
    }  # fmt: skip


def read_by_ranks(config):
    """Yields where each slot of a plan reads what: step, first sample, rectangle and values."""
    plan, steps = plan_of(config), range(config.steps)
    assert plan.ok, plan.findings
    for rank in range(plan.world):
        with rehearsal(rank, has_memory(plan), None, joined_backends(plan), True):
            contexts = contexts_of(plan, rank)
        for context in contexts:
            needs, own = needs_of(config, context), plan.microbatches_of(context.direction)
            loader = slot_loader(config, context, open_data(config), steps)
            for step in steps:
                for context.microbatch in own:
                    for rect, values in zip(needs[1::2], next(loader), strict=True):
                        if values is not None:
                            yield step, context.first_sample, rect, values
            loader.close()


LAYOUTS = {
    "dp": {"replicas": 2},
    "sp": {"tiles": [2, 2]},
    "sp+pp": {"tiles": [2, 1], "stages": 2, "microbatches": 2},
    "sp+gems": {"tiles": [2, 1], "stages": 2, "directions": 2, "schedule": "gems"},
    "dp+sp": {"replicas": 2, "tiles": [1, 2]},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_reads_the_pixels_of_one_process(layout, folder):
    alone: dict[str, dict[int, torch.Tensor]] = {"images": {}, "labels": {}}
    for step, _, _, values in read_by_ranks(config_of(**network(folder))):
        alone["images" if values.dim() == 4 else "labels"][step] = values
    seen = {(name, step): torch.zeros(4, 16, 24) for name in alone for step in range(4)}
    for step, first, (r0, r1, c0, c1), values in read_by_ranks(
        config_of(**network(folder, **LAYOUTS[layout]))
    ):
        name = "images" if values.dim() == 4 else "labels"
        wanted = alone[name][step][first : first + len(values), ..., r0:r1, c0:c1]
        assert torch.equal(values, wanted)
        seen[name, step][first : first + len(values), r0:r1, c0:c1] += 1
    assert all(counts.min() >= 1 for counts in seen.values())  # every pixel by some rank
    assert len({float(images.sum()) for images in alone["images"].values()}) == 4


@pytest.mark.dist
def test_tiles_have_the_losses_of_one_process(folder):
    found = []
    for number, parallel in enumerate([{}, {"tiles": [2, 1]}]):
        path = make(folder / f"run{number}", **network(folder, **parallel), measure={"warmup": 0})
        assert set(attempt(path)) == {0}
        found.append(mean_losses(path, 0))
    assert found[1] == pytest.approx(found[0], rel=1e-10)
