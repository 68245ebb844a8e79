"""Are networks, images and ranks those of the file, and the layouts of different shapes?"""

from __future__ import annotations

import pytest

from hires.bench import choice_cases as cases
from hires.core.errors import ConfigError
from tests.bench.test_choose_bench import option


def test_layouts_are_the_best_of_each_shape_spread_from_fastest_to_slowest():
    options = [option(f"s{n}", n, stages=n) for n in range(1, 8)]
    options.insert(1, option("again", 1.5, stages=1))
    found = [one["overrides"] for one in cases.of_different_shapes(options, 3)]
    assert found == ["s1", "s4", "s7"]
    assert len(cases.of_different_shapes(options, 20)) == 7


def test_keys_are_written_as_hydra_reads_them():
    words = cases._words({"model": "unet", "a": True, "b": [1, 2], "c": {"x": [1], "y": "z"}})
    assert words == ["model=unet", "a=true", "b=[1, 2]", "c={x: [1], y: z}"]


def test_cases_are_all_images_and_ranks_of_the_networks_that_are_named():
    data = cases.named_networks("", "resnet*")
    listed = [*cases.cases_of(data, "2,4", 1, ["seed=1"])]
    assert [(case.network, case.ranks) for case in listed] == [("resnet18", 2), ("resnet18", 4)]
    assert listed[0].words[-1] == "seed=1"
    assert {"batch=8", "model=resnet18", "image=128"} <= set(listed[0].words)


@pytest.mark.parametrize(
    ("text", "only", "why"),
    [
        ("every: {}", "*", "it has no `networks`"),
        ("networks: [a]", "*", "give names with their values"),
        ("networks: {a: {image: [8]}}", "*", "networks.a needs `image` and `keys`"),
        ("networks: {a: {image: [8], keys: {}}}", "b*", "names none of a"),
        ("networks: {a: {image: [8], keys: {}, needs: no_such_one}}", "*", "leaves no network"),
    ],
)
def test_wrong_file_is_refused(tmp_path, text, only, why):
    file = tmp_path / "own.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=why):
        cases.named_networks(str(file), only)


def test_wrong_ranks_are_refused():
    data = cases.named_networks("", "resnet18")
    with pytest.raises(ConfigError, match="give numbers"):
        [*cases.cases_of(data, "two")]
