"""Is the quick way to a config the same as Hydra's own?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf

from hires.cli.compose.choices import conf_dir
from hires.cli.compose.compose_config import Composer, compose
from hires.cli.compose.overrides import checked
from hires.core.config.run_config import from_dict
from hires.core.errors import ConfigError
from hires.core.store.naming import run_name


def composed(words: list[str], config_dir: str | None = None) -> dict[str, Any]:
    return Composer(config_dir).composed(words)[0]


@pytest.mark.parametrize(
    "words",
    [
        ["image=64", "batch=4", "parallel=sp+gems", "parallel.stages=4"],
        ["image=[75,61]", "parallel.tiles=[[2,2],[1,2]]", "parallel=sp+lp"],
        ["optimizer.lr=1", "optimizer.momentum=0.5", "data.shuffle=false", "data.shuffle=yes"],
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


@pytest.mark.parametrize("name", ["preact_resnet", "mpi4dl_resnet"])
def test_depth_of_a_residual_network_stands_for_its_blocks(name, tmp_path):
    family = f"model={name}"
    for n, depth in ((1, 11), (6, 56), (11, 101), (12, 110)):
        run = compose([family, f"model.depth={depth}"])
        assert run.model.n == n
        assert run_name(run) == run_name(compose([family, f"model.n={n}"]))
        assert compose([family, f"model.n={n}", f"model.depth={depth}"]).model.n == n
    assert compose([family]).model.n == 12
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "deep.yaml").write_text(f"name: {name}\ndepth: 29\n")
    deep = [compose(["model=deep", *words], str(tmp_path)) for words in ([], ["model.n=1"])]
    assert [config.model.n for config in deep] == [3, 1]
    (tmp_path / "model" / "torn.yaml").write_text(f"name: {name}\ndepth: 29\nn: 4\n")
    with pytest.raises(ConfigError, match=r"contradicts model\.n=4"):
        compose(["model=torn"], str(tmp_path))
    assert compose(["model=resnet101"]).model.depth == 101
    # A run of an older version keeps its network and its name.
    assert from_dict({"model": {"name": name, "depth": 101, "n": 12}}).model.depth == 101


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["model.depth=100"], "layers; use model.depth=92 or model.depth=101"),
        (["model.depth=50"], "use model.depth=47 or model.depth=56"),
        (["model.depth=-7"], "use model.depth=11$"),
        (["model.depth=11", "model.n=3"], "is model.n=1 .*contradicts model.n=3"),
        (["model.n=12", "model.depth=29"], "is model.n=3 .*contradicts model.n=12"),
        (["model.depth=50", "model.n=3"], "use model.depth=47 or model.depth=56"),
    ],
)
def test_depth_without_blocks_and_contradictions_are_refused(words, text):
    with pytest.raises(ConfigError, match=text):
        compose(["model=mpi4dl_resnet", *words])


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
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "scaled.yaml").write_text("# Refers\nlr: ${batch}\n")
    composer = Composer(str(tmp_path))
    for batch in (4, 8):
        config, _ = composer.composed(["optimizer=scaled", f"batch={batch}"])
        assert config["optimizer"]["lr"] == batch


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
