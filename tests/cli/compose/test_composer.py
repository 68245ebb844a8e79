"""Is the quick way to a config the same as Hydra's own?"""

from __future__ import annotations

from pathlib import Path

import pytest

from hires.cli.compose import compose_config
from hires.cli.compose.compose_config import Composer, composed
from hires.core.errors import ConfigError


@pytest.mark.parametrize(
    "words",
    [
        ["image=64", "batch=4", "parallel=sp+gems", "parallel.stages=4"],
        ["image=[75,61]", "parallel.tiles=[[2,2],[1,2]]", "parallel=sp+lp"],
        ["task.lr=1", "task.momentum=0.5", "data.shuffle=false", "data.shuffle=yes"],
        ["campaign=a b", "campaign=123", "data.path=null", "results=~/x"],
        ["batch=4", "batch=${seed}", "seed=3"],
        ["steps=${batch}", "batch=8"],
        ["model=custom", "model.target=a.b:c", "model.args={width:3}", "model.args.width=4"],
        ["memory.limit=4GiB", "parallel.balance=[1,2]", "parallel.stages=2"],
        ["memory.limit=2.5", "model.classes=null", "seed=1_0"],
        ["data.path='it\\'s'", "data=folder", "~measure"],
        ["parallel.stages=3", "parallel=pp", "model=edsr_large", "model.width=8"],
    ],
)
def test_values_are_those_of_hydra(words):
    composer = Composer(None)
    assert composer.values(words) == composed(words)
    assert composer.values(words) == composed(words)  # nothing was changed by the first time


@pytest.mark.parametrize("word", ["batch=x", "batch=4.5", "campaign=null", "data.shuffle=x"])
def test_wrong_type_is_refused_as_hydra_does(word):
    with pytest.raises(ConfigError) as plain:
        composed([word])
    with pytest.raises(ConfigError) as quick:
        Composer(None).values(["image=64", word])
    assert str(quick.value) == str(plain.value)


def test_hydra_is_asked_once_for_points_that_differ_in_plain_values(monkeypatch):
    asked = []
    monkeypatch.setattr(
        compose_config, "composed", lambda words, folder: asked.append(words) or composed(words)
    )
    composer = Composer(None)
    for image in range(32, 64):
        assert composer.values(["parallel=sp", f"image={image}"])["image"] == image
    assert asked == [["parallel=sp"]]


def test_file_that_refers_to_a_key_gets_that_keys_own_value(tmp_path: Path):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "scaled.yaml").write_text("# Refers\nname: train\nlr: ${batch}\n")
    composer = Composer(str(tmp_path))
    for batch in (4, 8):
        words = ["task=scaled", f"batch={batch}"]
        assert composer.values(words) == composed(words, str(tmp_path))
        assert composer.values(words)["task"]["lr"] == batch


def test_choices_are_the_last_said_or_the_default():
    chosen = Composer(None).choices(["parallel=sp", "parallel='sp+gems'", "batch=4"])
    assert chosen["parallel"] == "sp+gems"
    assert chosen["model"] == "resnet50"
