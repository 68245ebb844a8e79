"""Every file under ``conf/`` is a choice that works, and every stored sweep has points."""

from __future__ import annotations

import dataclasses
import typing

import pytest
import yaml

from hires.cli.axes import axes_of, stored_sweep
from hires.cli.choices import (
    choice_keys,
    conf_dir,
    experiments,
    groups,
)
from hires.cli.compose_config import Composer
from hires.cli.sweep_points import Where, compose_all
from hires.core.config.launcher_config import LauncherConfig
from hires.core.config.run_config import RunConfig, from_dict
from hires.launcher.interface import LAUNCHERS, Launcher, all_launchers, launcher_named

CHOICES = groups()
NEEDED = {
    "model=custom": {"model": {"target": "package.module:function"}},
    "loss=custom": {"loss": {"target": "package.module:function"}},
    "precision=int8": {"task": {"name": "infer"}},
}
"""Keys without which a choice rightly refuses."""


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


def keys_of(group: str, name: str) -> dict:
    """Returns the keys of a choice: those of its file, or of its section."""
    path = conf_dir() / group / f"{name}.yaml"
    is_file = path.exists()
    return yaml.safe_load(path.read_text(encoding="utf-8")) if is_file else choice_keys(group, name)


def test_every_choice_composes_to_its_keys(composer):
    """One choice of every group at once, of those that have a file, and one of the others.

    Joined layouts are those of their parts.
    """
    plain, _ = composer.composed([])
    names = {group: [*names] for group, names in CHOICES.items()}
    for group, every in names.items():
        files = [name for name in every if (conf_dir() / group / f"{name}.yaml").exists()]
        other = [name for name in every if name not in files and "+" not in name]
        names[group] = [*[name for name in files if "+" not in name], *other[:1]]
    for number in range(max(map(len, names.values()))):
        chosen = {group: every[number % len(every)] for group, every in names.items()}
        values, _ = composer.composed([f"{group}={name}" for group, name in chosen.items()])
        for group, name in chosen.items():
            for key, value in keys_of(group, name).items():
                assert key == "defaults" or values[group][key] == value, (group, name)
            needed = NEEDED.get(f"{group}={name}", {})
            sections = {key: {**plain[key], **keys} for key, keys in needed.items()}
            own = {**values[group], **needed.get(group, {})}
            from_dict({**plain, **sections, group: own})  # alone it is a whole config


def test_layouts_are_composed_of_their_words():
    assert len(CHOICES["parallel"]) == 30
    for name in CHOICES["parallel"]:
        keys = choice_keys("parallel", name)
        assert from_dict({"batch": 64, "parallel": keys}).parallel.label in (name, "dp"), name
    # One stage is no pipeline: this was sp+pp+gems.
    both_ways = {"tiles": [2, 1], "directions": 2, "schedule": "gems_1f1b"}
    assert from_dict({"batch": 64, "parallel": both_ways}).parallel.label == "sp+gems"
    assert choice_keys("parallel", "sp+pp+gems+dp") == {
        "name": "sp+pp+gems+dp",
        "tiles": [2, 1],
        "stages": 3,
        "spatial_stages": 1,
        "microbatches": 4,
        "directions": 2,
        "schedule": "gems_1f1b",
        "replicas": 2,
    }


def test_every_launcher_has_a_class():
    names = groups()["launcher"]
    assert {type(one) for one in all_launchers()} == {LAUNCHERS[name] for name in names}
    for name in names:
        has_jobs = type(launcher_named(name)).job_states is not Launcher.job_states
        assert has_jobs == LauncherConfig(name).has_jobs


def test_groups_are_sections_of_the_config_and_have_every_name_of_the_schema():
    hints = typing.get_type_hints(RunConfig)
    assert set(CHOICES) <= {name for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    primary = yaml.safe_load((conf_dir() / "config.yaml").read_text(encoding="utf-8"))
    defaults = primary["defaults"]
    assert set(primary) == {"defaults"}
    named = {group for entry in defaults if isinstance(entry, dict) for group in entry}
    assert named == set(CHOICES)
    assert (defaults[0], defaults[-1]) == ("schema", "_self_")
    for group, names in CHOICES.items():
        [field] = [f for f in dataclasses.fields(hints[group]) if f.name == "name"] or [None]
        wanted = field.metadata.get("choices", ()) if field else ()
        assert {*wanted} <= {*names}, group


@pytest.mark.parametrize("name", experiments())
def test_stored_sweep_has_points_that_go_together(composer, name):
    words, stored = stored_sweep([f"experiment={name}"], None)
    assert words == []
    zipped, where = stored.options.get("zip", []), stored.options.get("where")
    keeps = None if where is None else Where(where, groups())
    points = compose_all(axes_of(stored.words, zipped, groups()), composer, keeps)
    assert len(points.valid) > 1
    assert not points.excluded
