import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hires.core.config.data_config import DataConfig
from hires.data import synthetic
from hires.data.source import open_source


def statistics(window: np.ndarray) -> np.ndarray:
    """Returns what a simple classifier may look at: means, deviations, mean slopes."""
    slopes = [np.abs(np.diff(window, axis=d)).mean() if window.shape[d] > 1 else 0 for d in (1, 2)]
    return np.array([*window.mean((1, 2)), *window.std((1, 2)), *slopes, 1.0])


def accuracy(source, train: int, test: int, rows, cols) -> float:
    """Returns how often a linear least-squares classifier is right on images it has not seen."""
    seen = [statistics(source.window(i, rows, cols)) for i in range(train + test)]
    labels = np.array([source.label(i) for i in range(train + test)])
    wanted = np.eye(source.num_classes)[labels[:train]]
    features = np.array(seen)
    features = (features - features[:train].mean(0)) / (features[:train].std(0) + 1e-9)
    features[:, -1] = 1.0
    weights = np.linalg.lstsq(features[:train], wanted, rcond=None)[0]
    return float((np.argmax(features[train:] @ weights, 1) == labels[train:]).mean())


@pytest.mark.parametrize("size", [(1, 1), (5, 8), (48, 64), (300, 33)])
def test_a_linear_classifier_tells_the_classes_apart_at_any_size(size):
    source = open_source(DataConfig(classes=4), size, 3, seed=3)
    assert accuracy(source, 80, 40, (0, size[0]), (0, size[1])) >= 0.95


def test_a_linear_classifier_tells_the_classes_apart_in_one_tile():
    source = open_source(DataConfig(classes=6), (200, 200), 3, seed=3)
    assert accuracy(source, 120, 60, (150, 200), (0, 60)) >= 0.95


def test_grey_classes_differ_too():
    source = open_source(DataConfig(classes=3), (64, 64), 1, seed=3)
    assert accuracy(source, 90, 45, (0, 64), (0, 64)) >= 0.95


@given(data=st.data(), height=st.integers(1, 70), width=st.integers(1, 70), i=st.integers(0, 99))
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_window_is_bitwise_part_of_the_whole_image(data, height, width, i):
    source = open_source(DataConfig(classes=7), (height, width), 3, seed=1)
    whole = source.window(i, (0, height), (0, width))
    rows, cols = (
        tuple(sorted(data.draw(st.sets(st.integers(0, n), min_size=2, max_size=2))))
        for n in (height, width)
    )
    window = source.window(i, rows, cols)
    assert window.flags["C_CONTIGUOUS"]
    np.testing.assert_array_equal(window, whole[:, slice(*rows), slice(*cols)], strict=True)


def test_values_are_centred_and_stay_in_range():
    source = open_source(DataConfig(classes=12), (40, 40), 3, seed=0)
    windows = np.stack([source.window(i, (0, 40), (0, 40)) for i in range(48)])
    assert windows.dtype == np.float32
    assert -2 <= windows.min() < -1
    assert 1 < windows.max() <= 2
    assert abs(windows.mean()) < 0.2


def test_images_depend_on_seed_and_number_only():
    spans = (0, 9), (0, 9)
    source = open_source(DataConfig(), (9, 9), 3, seed=5)
    again = open_source(DataConfig(length=3), (9, 9), 3, seed=5)
    other = open_source(DataConfig(), (9, 9), 3, seed=6)
    np.testing.assert_array_equal(source.window(2, *spans), again.window(2, *spans))
    assert (source.window(2, *spans) != other.window(2, *spans)).any()
    assert (source.window(2, *spans) != source.window(12, *spans)).any()


def test_classes_take_turns_and_have_names():
    source = open_source(DataConfig(classes=3, length=7), (4, 4), 3, seed=0)
    assert len(source) == 7
    assert [source.label(i) for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [synthetic.class_name(k, 3) for k in range(2)] == ["texture0", "texture1"]


def test_names_of_many_classes_sort_as_their_labels():
    names = [synthetic.class_name(k, 120) for k in range(120)]
    assert names == sorted(names)


def test_a_window_outside_the_image_is_a_bug():
    source = open_source(DataConfig(), (4, 4), 3, seed=0)
    with pytest.raises(AssertionError, match="window"):
        source.window(0, (0, 5), (0, 4))
