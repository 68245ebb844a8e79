"""Composing: words and files of a user become the config that Hydra would make of them, or are
refused with the file, the line and what would work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf

from hires.cli.compose.choices import conf_dir
from hires.cli.compose.compose_config import Composer, compose
from hires.cli.compose.overrides import checked
from hires.core.config.run_config import RunConfig, from_dict, to_dict
from hires.core.errors import ConfigError
from hires.core.store.naming import run_name
from hires.plan.route_choice import resolve


def composed(words: list[str], config_dir: str | None = None) -> dict[str, Any]:
    return Composer(config_dir).composed(words)[0]


@pytest.mark.parametrize(
    "words",
    [
        ["image=[75,61]", "parallel.tiles=[[2,2],[1,2]]", "parallel=sp+lp"],
        ["optimizer.lr=1", "optimizer.momentum=0.5", "data.shuffle=false", "data.shuffle=yes"],
        ["campaign=a b", "campaign=123", "data.path=null", "results=/x"],
        ["steps=${batch}", "batch=8"],
        ["model=custom", "model.target=a.b:c", "model.args={width:3}", "model.args.width=4"],
        ["memory.limit=4GiB", "parallel.balance=[1,2]", "parallel.stages=2"],
        ["data.path='/it\\'s'", "data=folder", "~augment"],
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


def test_file_that_refers_to_a_key_gets_that_keys_own_value(tmp_path: Path):
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "scaled.yaml").write_text("# Refers\nlr: ${batch}\n")
    composer = Composer(str(tmp_path))
    for batch in (4, 8):
        config, _ = composer.composed(["optimizer=scaled", f"batch={batch}"])
        assert config["optimizer"]["lr"] == batch


def test_defaults_are_those_of_the_dataclasses_and_a_stored_config_reads_back():
    # But for what auto means here.
    assert to_dict(compose([])) == to_dict(resolve(RunConfig()))
    assert compose(["~parallel"]).parallel == RunConfig().parallel
    config = compose(["parallel=sp+pp", "image=[75,61]", "precision=bf16"])
    assert from_dict(to_dict(config)) == config
    values = {"parallel": {"name": "sp", "tiles": [2, 1], "stages": 3}}
    assert from_dict(values).parallel.name == "sp"  # a stored config keeps its name


@pytest.mark.parametrize(
    ("overrides", "name", "replicas", "stages", "tiles", "microbatches"),
    [
        ("parallel=dp", "dp", 2, 1, [1, 1], 1),
        ("parallel=sp+lp", "sp+lp", 1, 2, [2, 1], 1),
        ("parallel=sp+pp parallel.replicas=2", "sp+pp+dp", 2, 2, [2, 1], 4),
        ("parallel=sp parallel.stages=3", "sp+lp", 1, 3, [2, 1], 1),
        ("parallel=sp parallel.stages=3 parallel.microbatches=4", "sp+pp", 1, 3, [2, 1], 4),
        ("parallel.tiles=[2,1]", "sp", 1, 1, [2, 1], 1),
        ("parallel=sp parallel.tiles=[1,1]", "single", 1, 1, [1, 1], 1),
        ("parallel=gems parallel.microbatches=4", "gems", 1, 2, [1, 1], 4),
        ("parallel=gems parallel.schedule=gems_1f1b", "pp+gems", 1, 2, [1, 1], 1),
        ("parallel=sp parallel.stages=3 parallel.name=mine", "mine", 1, 3, [2, 1], 1),
    ],
)
def test_layout_is_called_what_its_keys_make_it(
    overrides, name, replicas, stages, tiles, microbatches
):
    made = compose(overrides.split()).parallel
    assert made.name == name
    found = (made.replicas, made.stages, made.tiles, made.microbatches)
    assert found == (replicas, stages, tiles, microbatches)


@pytest.mark.parametrize(
    "path",
    ["/tmp/my images (2024)/a=b", "/tmp/it's", '/tmp/"quoted"', "/tmp/ünïcode", "/tmp/a b"],
)
def test_paths_need_no_quotes_of_their_own(path):
    assert compose(["data=folder", f"data.path={path}"]).data.path == path


def test_folders_are_absolute_because_ranks_may_start_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert compose(["data=folder", "data.path=images"]).data.path == str(tmp_path / "images")
    config = compose(["data=folder", "data.path=~/images", "results=~/runs"])
    assert (config.data.path, config.results) == ("/home/somebody/images", "/home/somebody/runs")
    assert compose(["campaign=2024", "++steps=20"]).campaign == "2024"  # a number as a name


def test_file_that_is_no_text_is_named_only_where_it_is_chosen(tmp_path: Path):
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mine.yaml").write_bytes(b"name: \xff\n")
    assert compose([], str(tmp_path)) == compose([])
    with pytest.raises(ConfigError, match=r"mine\.yaml is no text in UTF-8"):
        compose(["cluster=mine"], str(tmp_path))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("name: [a\nb: 1\n", "; close the bracket or brace that line 1 opens"),
        ("name: x\n\tstages: 2\n", "; indent with spaces, not with a tab"),
        ("name: x\nname: y\n", "mine.yaml, line 2: this is no YAML (found duplicate key name)"),
        ("- sp\n", "mine.yaml must hold keys, one a line"),
        ("stagse: 1\n", "mine.yaml: parallel has no 'stagse'; did you mean stages?"),
        ("# @package _global_\nparallel:\n  stagse: 1\n", "has no 'stagse'; did you mean stages?"),
        ("defaults: [mine]\n", "lead back to itself"),
        ("defaults: 3\n", "defaults must be a list"),
        ("defaults: [spp]\n", "defaults names 'spp', which is no choice of parallel; did you"),
        ("stages: many\n", "mine.yaml: parallel.stages has the wrong type: it must be a whole"),
    ],
)
def test_broken_choice_of_a_user_is_one_paragraph(tmp_path: Path, text: str, reason: str):
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel" / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose(["parallel=mine"], str(tmp_path))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_cluster_of_the_users_folder_is_a_choice_and_its_keys_can_be_changed(tmp_path):
    (tmp_path / "cluster").mkdir()
    text = 'name: ours\nmodules: [gcc/12]\noptions: {mem: 0, comment: "it\'s $(x)"}\n'
    (tmp_path / "cluster" / "ours.yaml").write_text(text)
    made = compose(["cluster=ours"], str(tmp_path)).cluster
    assert (made.name, made.modules) == ("ours", ["gcc/12"])
    assert made.options == {"mem": 0, "comment": "it's $(x)"}
    words = ["cluster=ours", "cluster.options.mem=4G", "cluster.environment.NCCL_DEBUG=INFO"]
    made = compose([*words, "cluster.modules=[a,b]"], str(tmp_path)).cluster
    assert made.options["mem"] == "4G"
    assert made.environment == {"NCCL_DEBUG": "INFO"}
    assert made.modules == ["a", "b"]
    # A file may also set several keys of a section that has no choices of ours.
    (tmp_path / "measure").mkdir()
    (tmp_path / "measure" / "mine.yaml").write_text("warmup: 1\nsteps: 4\n")
    measured = compose(["measure=mine", "measure.steps=5"], str(tmp_path)).measure
    assert (measured.warmup, measured.steps) == (1, 5)


def test_depth_of_a_residual_network_stands_for_its_blocks(tmp_path):
    name = "mpi4dl_resnet"
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


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["model.depth=100"], "layers; use model.depth=92 or model.depth=101"),
        (["model.depth=-7"], "use model.depth=11$"),
        (["model.depth=11", "model.n=3"], "is model.n=1 .*contradicts model.n=3"),
    ],
)
def test_depth_without_blocks_and_contradictions_are_refused(words, text):
    with pytest.raises(ConfigError, match=text):
        compose(["model=mpi4dl_resnet", *words])


def test_hydra_is_asked_once_for_points_that_choose_the_same_groups(monkeypatch):
    asked, compose = [], hydra.compose
    monkeypatch.setattr(
        hydra, "compose", lambda *args, **kw: asked.append(args) or compose(*args, **kw)
    )
    composer = Composer()
    for image in range(32, 64):
        assert composer.composed(["parallel=sp", f"image={image}"])[0]["image"] == image
    assert asked == [("config", ["parallel=sp"])]
