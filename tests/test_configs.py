"""Is every file under ``conf/`` a choice that works? New files are found by themselves."""

from __future__ import annotations

import dataclasses
import typing

import pytest
import yaml

from hires.cli.compose.choices import EXPERIMENTS, conf_dir, config_keys, experiments, groups
from hires.cli.compose.compose_config import Composer, compose
from hires.cli.sweep.axes import axes_of, stored_sweep
from hires.cli.sweep.sweep_points import Where, compose_all
from hires.core.config.run_config import RunConfig
from hires.core.precisions import PRECISIONS

EVERY = sorted(conf_dir().glob("*/*.yaml"))
FILES = [path for path in EVERY if path.parent.name != EXPERIMENTS]
NEEDED = {
    "model=custom": ["model.target=package.module:function"],
    "loss=custom": ["loss.target=package.module:function"],
    "precision=int8": ["task=infer"],
    "engine=tensorrt": ["task=infer"],
    "predict=probability": ["task=predict"],
}
"""Overrides without which a choice rightly refuses."""


def ids(path) -> str:
    return f"{path.parent.name}={path.stem}"


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_choice_composes(path):
    config = compose([ids(path), *NEEDED.get(ids(path), [])])
    section = getattr(config, path.parent.name)
    for key, value in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        if key != "defaults":
            assert getattr(section, key) == value


@pytest.mark.parametrize("name", experiments())
def test_stored_sweep_has_points_that_go_together(name):
    words, stored = stored_sweep([f"experiment={name}"], None)
    assert words == []
    zipped, where = stored.options.get("zip", []), stored.options.get("where")
    keeps = None if where is None else Where(where, groups())
    for added in ([], stored.small):
        axes = axes_of([*stored.words, *added], zipped, groups())
        points = compose_all(axes, Composer(None), keeps)
        assert len(points.valid) > 1
        assert not points.excluded


@pytest.mark.parametrize("path", EVERY, ids=ids)
def test_choice_says_what_it_is_on_its_first_line(path):
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    assert 10 <= len(first) <= 100


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_choice_holds_a_few_lines_of_known_keys(path):
    held = yaml.safe_load(path.read_text(encoding="utf-8"))
    group = f"{path.parent.name}."
    known = {key.removeprefix(group) for key in config_keys() if key.startswith(group)}
    assert set(held) - {"defaults"} <= known
    assert len(held) <= (15 if path.parent.name == "cluster" else 6)


@pytest.mark.parametrize("path", sorted(conf_dir().glob("parallel/*.yaml")), ids=ids)
def test_parts_of_a_joined_layout_are_its_defaults_and_list_none_themselves(path):
    # Two parts that both list a base would reset each other's keys without a word.
    held = yaml.safe_load(path.read_text(encoding="utf-8"))
    if "+" in path.stem:
        assert held["defaults"] == [*path.stem.split("+"), "_self_"]
    else:
        assert "defaults" not in held
    assert held["name"] == path.stem


def test_every_group_is_a_section_of_the_config():
    hints = typing.get_type_hints(RunConfig)
    sections = {name for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    assert set(groups()) == sections


def test_primary_config_chooses_one_of_every_group():
    held = yaml.safe_load((conf_dir() / "config.yaml").read_text(encoding="utf-8"))
    chosen = {group for entry in held["defaults"] if isinstance(entry, dict) for group in entry}
    assert set(held) == {"defaults"}
    assert chosen == set(groups())
    assert held["defaults"][0] == "schema"
    assert held["defaults"][-1] == "_self_"


def test_every_precision_schedule_and_task_of_the_schema_can_be_chosen():
    assert set(groups()["precision"]) == {*PRECISIONS}
    assert set(groups()["task"]) == {"train", "infer", "evaluate", "predict", "calibrate"}
