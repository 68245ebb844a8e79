"""Pairs: the input is the target shrunk, and a window of it is bitwise its part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import ConfigError, RunError
from hires.data.image_fit import resize
from hires.data.source import PairSource, Source, open_data

SCALES = [1, 2, 3, 4]
MODEL = {"name": "edsr"}


def config_of(image=(9, 7), scale: int = 2, **data) -> RunConfig:
    return from_dict({"image": list(image), "model": {**MODEL, "scale": scale}, "data": data})


def pairs_of(config: RunConfig) -> PairSource:
    source = open_data(config)
    assert isinstance(source, PairSource)
    return source


@pytest.fixture
def folder(tmp_path: Path, pixels) -> Path:
    """A folder with images of its own, and others in a sub-folder."""
    (tmp_path / "more").mkdir()
    for k, name in enumerate(("a.png", "more/b.png", "more/c.tif")):
        Image.fromarray(pixels(31, 26, 3, seed=k)).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    return tmp_path


def span(data, length: int) -> tuple[int, int]:
    start = data.draw(st.integers(0, length - 1))
    return start, data.draw(st.integers(start + 1, length))


@given(data=st.data(), scale=st.sampled_from(SCALES), size=st.tuples(*[st.integers(1, 20)] * 2))
@settings(max_examples=80, deadline=None, derandomize=True, database=None)
def test_window_of_the_input_is_bitwise_its_part(data, scale, size):
    source = pairs_of(config_of(size, scale))
    whole = source.window(3, (0, size[0]), (0, size[1]))
    assert whole.shape == (3, *size)
    assert whole.dtype == np.float32
    assert whole.flags["C_CONTIGUOUS"]
    rows, cols = (span(data, length) for length in size)
    window = source.window(3, rows, cols)
    np.testing.assert_array_equal(window, whole[:, slice(*rows), slice(*cols)], strict=True)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("fit", ["resize", "crop"])
def test_windows_of_a_folder_are_bitwise_parts(folder, scale, fit):
    source = pairs_of(config_of((9, 7), scale, name="pairs", path=str(folder), fit=fit))
    assert len(source) == 3
    for i in range(3):
        small = source.window(i, (0, 9), (0, 7))
        large = source.target(i, (0, 9 * scale), (0, 7 * scale))
        assert large.shape == (3, 9 * scale, 7 * scale)
        np.testing.assert_array_equal(source.window(i, (3, 8), (2, 4)), small[:, 3:8, 2:4])
        np.testing.assert_array_equal(source.target(i, (5, 9), (0, 3)), large[:, 5:9, 0:3])


def test_target_is_what_the_folder_itself_gives(folder):
    classes = folder / "kinds"
    (folder / "more").rename(folder / "kinds")
    (folder / "a.png").unlink()
    pairs = pairs_of(config_of((9, 7), 3, name="pairs", path=str(classes)))
    plain: Source = open_data(  # the same files as one class
        from_dict({"image": [27, 21], "data": {"name": "folder", "path": str(folder)}})
    )
    for i in range(2):
        window = ((4, 25), (0, 20))
        np.testing.assert_array_equal(pairs.target(i, *window), plain.window(i, *window))


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_input_is_the_target_shrunk_as_pillow_shrinks(folder, scale):
    source = pairs_of(config_of((9, 7), scale, name="pairs", path=str(folder)))
    small = source.window(0, (0, 9), (0, 7))
    large = source.target(0, (0, 9 * scale), (0, 7 * scale))
    for channel, expected in enumerate(large):
        image = Image.fromarray(expected).resize((7, 9), Image.Resampling.BICUBIC)
        np.testing.assert_allclose(small[channel], np.asarray(image).clip(-2, 2), atol=1e-5)


def test_cubic_kernel_keeps_a_straight_line():
    line = np.arange(40, dtype=np.float32)[:, None, None] * np.ones((1, 4, 1), np.float32)
    whole = ((0, 20), (0, 2))
    small = resize(
        lambda r, c: line[slice(*r), slice(*c)], (40, 4), (20, 2), *whole, kernel="cubic"
    )
    np.testing.assert_allclose(small[3:-3, 0, 0], np.arange(20)[3:-3] * 2 + 0.5, atol=1e-4)


def test_input_reads_only_the_part_of_the_target_that_it_depends_on():
    seen = []

    class Large:
        def window(self, i, rows, cols):
            seen.append((rows, cols))
            return np.zeros((3, rows[1] - rows[0], cols[1] - cols[0]), np.float32)

        def __len__(self):
            return 1

    PairSource(Large(), (40, 40), 2, 3).window(0, (10, 20), (0, 40))
    assert seen == [((20 - 3, 40 + 3), (0, 80))]


def test_input_stays_between_black_and_white():
    # The cubic kernel swings beyond an edge; a network has never seen blacker than black.
    class Edge:
        def window(self, i, rows, cols):
            edge = np.where(np.arange(*cols) < 17, -2, 2).astype(np.float32)
            return np.broadcast_to(edge, (1, rows[1] - rows[0], len(edge))).copy()

        def __len__(self):
            return 1

    small = PairSource(Edge(), (16, 16), 2, 1).window(0, (0, 16), (0, 16))
    assert (small.min(), small.max()) == (-2, 2)


@pytest.mark.parametrize("name", ["pairs", "folder"])
def test_missing_folder_is_refused_with_what_is_wanted(name, tmp_path):
    wanted = {"pairs": "a folder with images", "folder": "a folder with one sub-folder per class"}
    with pytest.raises(ConfigError, match=rf"data={name} needs data\.path=FOLDER, {wanted[name]}"):
        open_data(config_of(name=name))
    with pytest.raises(ConfigError, match=f"does not exist; give {wanted[name]}"):
        open_data(config_of(name=name, path=str(tmp_path / "none")))


def test_folder_without_images_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no images; images are files named \*\.png"):
        open_data(config_of(name="pairs", path=str(tmp_path)))


def test_image_of_another_size_can_be_refused(folder):
    config = config_of((9, 7), 2, name="pairs", path=str(folder), fit="error")
    source = pairs_of(config)
    with pytest.raises(RunError, match=r"it has 31 x 26 pixels where image asks for 18 x 14"):
        source.window(0, (0, 9), (0, 7))


def test_bilinear_enlargement_of_the_input_resembles_the_target():
    # A pair that is shifted by half a pixel would teach the network a shift.
    source = pairs_of(config_of((24, 20), 2))
    small = torch.from_numpy(source.window(1, (0, 24), (0, 20)))
    large = torch.from_numpy(source.target(1, (0, 48), (0, 40)))
    up = torch.nn.functional.interpolate(small[None], scale_factor=2, mode="bilinear")[0]
    aligned = (up - large).abs().mean()
    for shift in ((0, 1), (1, 0), (1, 1)):
        assert aligned < (up - large.roll(shift, (1, 2))).abs().mean()
