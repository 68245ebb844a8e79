"""Does ``hires bench networks`` compare every network, and keep those that fail as rows?"""

from __future__ import annotations

import importlib.util
import json

import pytest

from hires.bench.compared_step import config_from, overrides
from hires.bench.networks_bench import (
    BENCHMARK,
    ONE_MORE,
    NetworksOptions,
    chosen,
    reason_of,
)
from hires.bench.ranks import traceback_of
from hires.cli.compose.compose_config import compose
from hires.core.config.run_config import to_dict
from hires.core.errors import ConfigError
from hires.plan.route_choice import resolve

FILE = """
networks:
  hires:
    own: {target: "hires.bench.own_net:OwnNet", image: [33, 50]}
    missing: {target: "no_such_library:network"}
"""


def test_sixty_networks_of_seven_libraries_in_every_layout():
    networks = chosen(NetworksOptions())
    assert len(networks) == 60
    assert len({network.library for network in networks}) == 7
    for network in networks:
        *usual, more = network.layouts
        assert usual == ["tiles 1x2", "tiles 2x2", "dp", "pp"]
        assert more.startswith(ONE_MORE)


@pytest.mark.slow
def test_line_that_makes_a_layout_again_makes_the_same_config():
    network = chosen(NetworksOptions(only="timm/swinv2"))[0]
    for keys in network.layouts.values():
        settings = network.in_layout(keys)
        ours = to_dict(resolve(config_from(settings)))
        theirs = to_dict(compose([*overrides(settings), "precision=fp64", "steps=3"]))
        ours["parallel"].pop("name")
        theirs["parallel"].pop("name")
        assert theirs == ours


def test_patterns_choose_networks():
    names = {network.name for network in chosen(NetworksOptions(only="monai/*unet,timm/swin*"))}
    assert {"basic_unet", "swinv2"} <= names
    with pytest.raises(ConfigError, match="--only 'none' matches no"):
        chosen(NetworksOptions(only="none"))


def test_keys_change_every_row():
    options = NetworksOptions(
        only="monai/*", overrides=("image=[65,97]", "task.name=infer", "samples=3")
    )
    for network in chosen(options):
        config = config_from(network.in_layout(network.layouts["pp"]))
        assert (config.image, config.task.name, config.batch) == ([65, 97], "infer", 6)
    with pytest.raises(ConfigError, match="'infer' is no KEY=VALUE"):
        chosen(NetworksOptions(overrides=("infer",)))


def test_file_of_another_form_is_refused(tmp_path):
    file = tmp_path / "mine.yaml"
    for text in ("networks: [unet]", "networks: {my: unet}", "networks: {my: {unet: {args: {}}}}"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"must be a row as \{target: "):
            chosen(NetworksOptions(file=str(file)))


def test_reason_of_a_traceback_is_its_last_line():
    text = "rank 1 failed: Traceback (most recent call last):\n  File ...\nValueError: too small\n"
    assert reason_of(text) == "ValueError: too small"
    assert len(reason_of("x" * 1000)) < 400


def test_reason_of_an_error_with_a_note_is_the_error_with_its_note():
    error = RuntimeError("sizes differ\nhere and there")
    error.__notes__ = ["in fc (linear)"]  # as a stage adds
    with pytest.raises(RuntimeError) as caught:
        raise error
    text = f"rank 1 failed: {traceback_of(caught.value)}"
    assert reason_of(text) == "RuntimeError: sizes differ (in fc (linear))"


@pytest.mark.dist
@pytest.mark.slow
def test_network_that_fails_is_a_row_and_stops_no_other(tmp_path):
    file, out = tmp_path / "mine.yaml", tmp_path / "mine"
    file.write_text(FILE)
    assert BENCHMARK.main(["--file", str(file), "--out", str(out)]) == 1
    own, missing = json.loads((out / "networks.json").read_text())["rows"]
    assert own["ok"]
    assert len(own["layouts"]) == 5
    assert max(answer["max_rel_err"] for answer in own["layouts"].values()) <= 1e-10
    assert not missing["ok"]
    readme = (out / "README.md").read_text()
    assert "1 of 2 networks are equal" in readme
    assert "No module named 'no_such_library'" in readme


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "network"),
    [("torchvision", "resnet18"), ("timm", "tf_mobilenetv3_small"), ("monai", "basic_unet")],
)
def test_public_network_is_equal_in_every_layout(library, network, tmp_path):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}: pip install hires[networks]")
    assert BENCHMARK.main(["--only", f"{library}/{network}", "--out", str(tmp_path / "net")]) == 0
