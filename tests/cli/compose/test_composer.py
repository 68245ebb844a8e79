"""Is the quick way to a config the same as Hydra's own?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf

from hires.cli.compose.choices import conf_dir
from hires.cli.compose.compose_config import Composer
from hires.cli.compose.overrides import checked
from hires.core.errors import ConfigError


def composed(words: list[str], config_dir: str | None = None) -> dict[str, Any]:
    return Composer(config_dir).composed(words)[0]


@pytest.mark.parametrize(
    "words",
    [
        ["image=64", "batch=4", "parallel=sp+gems", "parallel.stages=4"],
        ["image=[75,61]", "parallel.tiles=[[2,2],[1,2]]", "parallel=sp+lp"],
        ["task.lr=1", "task.momentum=0.5", "data.shuffle=false", "data.shuffle=yes"],
        ["campaign=a b", "campaign=123", "data.path=null", "results=/x"],
        ["batch=4", "batch=${seed}", "seed=3"],
        ["steps=${batch}", "batch=8"],
        ["model=custom", "model.target=a.b:c", "model.args={width:3}", "model.args.width=4"],
        ["memory.limit=4GiB", "parallel.balance=[1,2]", "parallel.stages=2"],
        ["memory.limit=2.5", "model.classes=null", "seed=1_0"],
        ["data.path='/it\\'s'", "data=folder", "~measure"],
        ["parallel.stages=3", "parallel=pp", "model=edsr_large", "model.width=8"],
    ],
)
def test_values_are_those_of_hydra(words):
    composer = Composer()
    first, _ = composer.composed(words)
    assert composer.composed(words)[0] == first  # nothing was changed by the first time
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        config = hydra.compose("config", checked(words, composer.groups))
    assert first == OmegaConf.to_container(config, resolve=True)


@pytest.mark.parametrize("word", ["batch=x", "batch=4.5", "campaign=null", "data.shuffle=x"])
def test_value_of_a_wrong_type_is_refused_at_every_point(word):
    composer = Composer()
    for words in ([word], ["image=64", word]):
        with pytest.raises(ConfigError, match=f"{word} has the wrong type"):
            composer.composed(words)


def test_hydra_is_asked_once_for_points_that_choose_the_same_groups(monkeypatch):
    asked, compose = [], hydra.compose
    monkeypatch.setattr(
        hydra, "compose", lambda *args, **kw: asked.append(args) or compose(*args, **kw)
    )
    composer = Composer()
    for image in range(32, 64):
        assert composer.composed(["parallel=sp", f"image={image}"])[0]["image"] == image
    assert asked == [("config", ["parallel=sp"])]


def test_file_that_refers_to_a_key_gets_that_keys_own_value(tmp_path: Path):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "scaled.yaml").write_text("# Refers\nname: train\nlr: ${batch}\n")
    composer = Composer(str(tmp_path))
    for batch in (4, 8):
        assert composer.composed(["task=scaled", f"batch={batch}"])[0]["task"]["lr"] == batch


def test_choices_are_the_last_said_or_the_default():
    _, chosen = Composer().composed(["parallel=sp", "parallel='sp+gems'", "batch=4"])
    assert chosen["parallel"] == "sp+gems"
    assert chosen["model"] == "resnet50"


@pytest.mark.parametrize("defaults", ["[mine]", "[other]"])
def test_choices_that_stand_on_each_other_are_refused(tmp_path: Path, defaults: str):
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel" / "mine.yaml").write_text(f"defaults: {defaults}\n")
    (tmp_path / "parallel" / "other.yaml").write_text("defaults: [mine]\n")
    with pytest.raises(ConfigError, match="lead back to itself"):
        composed(["parallel=mine"], str(tmp_path))


def test_defaults_that_are_no_list_are_refused(tmp_path: Path):
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel" / "mine.yaml").write_text("defaults: 3\n")
    with pytest.raises(ConfigError, match="defaults must be a list"):
        composed(["parallel=mine"], str(tmp_path))
