from collections import Counter

import pytest

from hires.data.source import step_indices


def line(batch: int, steps: int, **how) -> list[int]:
    return [i for step in range(steps) for i in step_indices(step, batch, **how)]


def test_without_shuffle_images_go_in_order_over_the_border_of_epochs():
    assert step_indices(0, 3, length=5, seed=0, shuffle=False) == [0, 1, 2]
    assert step_indices(1, 3, length=5, seed=0, shuffle=False) == [3, 4, 0]
    assert step_indices(2, 3, length=5, seed=0, shuffle=False) == [1, 2, 3]


@pytest.mark.parametrize("batch", [1, 3, 7, 20])
def test_every_epoch_has_every_image_once(batch: int):
    drawn = line(batch, 7 * 3, length=7, seed=1, shuffle=True)
    for start in range(0, len(drawn) - 6, 7):
        assert sorted(drawn[start : start + 7]) == list(range(7))


def test_the_line_of_images_does_not_depend_on_the_batch():
    how = {"length": 11, "seed": 4, "shuffle": True}
    assert line(1, 30, **how) == line(5, 6, **how) == line(30, 1, **how)


def test_a_batch_larger_than_the_data_set_repeats_images_evenly():
    drawn = step_indices(0, 9, length=3, seed=0, shuffle=True)
    assert Counter(drawn) == {0: 3, 1: 3, 2: 3}


def test_epochs_and_seeds_differ_and_repeat():
    first = step_indices(0, 50, length=50, seed=0, shuffle=True)
    assert first != list(range(50))
    assert first != step_indices(1, 50, length=50, seed=0, shuffle=True)
    assert first != step_indices(0, 50, length=50, seed=1, shuffle=True)
    assert first == step_indices(0, 50, length=50, seed=0, shuffle=True)


def test_indices_are_plain_integers_far_into_a_run():
    drawn = step_indices(10**9, 4, length=1000, seed=0, shuffle=True)
    assert all(type(i) is int for i in drawn)
    assert all(0 <= i < 1000 for i in drawn)
