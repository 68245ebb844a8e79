"""Composing: words and files of a user become the config that Hydra would make of them, or are
refused with the file, the line and what would work."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import hydra
import pytest
import yaml
from omegaconf import OmegaConf

from hires.cli.choices import conf_dir
from hires.cli.compose_config import Composer, compose
from hires.cli.overrides import checked
from hires.core.config.run_config import RunConfig, from_dict, to_dict
from hires.core.errors import ConfigError
from hires.core.store import rundir
from hires.plan.route_choice import resolve


def store(folder: Path, group: str, text: str) -> str:
    """Writes the choice "mine" of a group; returns the words for the folder and for Composer."""
    (folder / group).mkdir(exist_ok=True)
    (folder / group / "mine.yaml").write_text(text)
    return str(folder)


def test_values_are_those_of_hydra():
    for text in (
        "image=[75,61]|parallel=sp+lp|parallel.tiles=[[2,2],[1,2]]|data.shuffle=yes|campaign=a b|"
        "steps=${batch}|batch=8|memory.limit=4GiB|optimizer.lr=1",
        "model=custom|model.target=a.b:c|model.args={width:3}|model.args.width=4|campaign=123|"
        "data.path='/it\\'s'|data=folder|~augment",
    ):
        words = text.split("|")
        composer = Composer()
        first, _ = composer.composed(words)
        assert composer.composed(words)[0] == first  # nothing was changed by the first time
        with hydra.initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
            config = hydra.compose("config", checked(words, composer.groups))
        assert first == OmegaConf.to_container(config, resolve=True)


def test_defaults_are_those_of_the_dataclasses_and_a_stored_config_reads_back():
    # But for what auto means here.
    assert to_dict(compose([])) == to_dict(resolve(RunConfig()))
    assert compose(["~parallel"]).parallel == RunConfig().parallel
    config = compose(["parallel=sp+pp", "image=[75,61]", "precision=bf16"])
    assert from_dict(to_dict(config)) == config
    values = {"parallel": {"name": "sp", "tiles": [2, 1], "stages": 3}}
    assert from_dict(values).parallel.name == "sp"  # a stored config keeps its name


def test_layout_is_called_what_its_keys_make_it():
    for overrides, name, *numbers in (
        ("parallel=dp", "dp", 2, 1, [1, 1], 1),
        ("parallel=sp parallel.stages=3 parallel.microbatches=4", "sp+pp", 1, 3, [2, 1], 4),
        ("parallel=sp parallel.tiles=[1,1]", "single", 1, 1, [1, 1], 1),
        ("parallel=gems parallel.schedule=gems_1f1b", "pp+gems", 1, 2, [1, 1], 1),
        ("parallel=sp parallel.stages=3 parallel.name=mine", "mine", 1, 3, [2, 1], 1),
    ):
        layout = compose(overrides.split()).parallel
        found = [layout.replicas, layout.stages, layout.tiles, layout.microbatches]
        assert (layout.name, found) == (name, numbers)


def test_paths_need_no_quotes_of_their_own(tmp_path):
    for path in ("/tmp/my images (2024)/a=b", "/tmp/it's", '/tmp/"quoted"', "/tmp/ünïcode"):
        assert compose(["data=folder", f"data.path={path}"]).data.path == path
    relative = compose(["data=folder", "data.path=images"]).data.path
    assert relative == str(Path("images").absolute())  # ranks may start elsewhere
    folder = tmp_path / "it's, [mine]"
    folder.mkdir()
    assert compose(["cluster=mine"], store(folder, "cluster", "name: ours")).cluster.name == "ours"


def test_broken_choice_of_a_user_is_one_paragraph(tmp_path):
    for text, reason in (
        ("name: x\nname: y\n", "mine.yaml, line 2: this is no YAML (found duplicate key name)"),
        ("stagse: 1\n", "mine.yaml: parallel has no 'stagse'; did you mean stages?"),
        ("defaults: [mine]\n", "lead back to itself"),
        ("defaults: [spp]\n", "defaults names 'spp', which is no choice of parallel; did you"),
        ("stages: many\n", "mine.yaml: parallel.stages has the wrong type: it must be a whole"),
    ):
        with pytest.raises(ConfigError) as caught:
            compose(["parallel=mine"], store(tmp_path, "parallel", text))
        assert reason in str(caught.value)
        assert "\n" not in str(caught.value)


def test_cluster_of_the_users_folder_is_a_choice_and_its_keys_can_be_changed(tmp_path):
    text = 'name: ours\nmodules: [gcc/12]\noptions: {mem: 0, comment: "it\'s $(x)"}\n'
    folder = store(tmp_path, "cluster", text)
    cluster = compose(["cluster=mine"], folder).cluster
    assert (cluster.name, cluster.modules) == ("ours", ["gcc/12"])
    assert cluster.options == {"mem": 0, "comment": "it's $(x)"}
    words = ["cluster.options.mem=4G", "cluster.environment.A=INFO", "cluster.modules=[a,b]"]
    cluster = compose(["cluster=mine", *words], folder).cluster
    assert (cluster.options["mem"], cluster.environment) == ("4G", {"A": "INFO"})
    assert cluster.modules == ["a", "b"]


def test_secret_of_a_cluster_is_stored_as_it_was_written(tmp_path, monkeypatch):
    for name, value in (("HIRES_TOKEN", "s3cret"), ("TOKEN", "s3cret"), ("SCRATCH", "/scratch")):
        monkeypatch.setenv(name, value)
    folder = store(tmp_path, "cluster", 'environment: {TOKEN: "${oc.env:HIRES_TOKEN}", A: x}\n')
    words = ["cluster=mine", "cluster.environment.HOME2=${oc.env:SCRATCH}/me", "data=folder"]
    words.append("cluster.environment.NONE=${oc.env:HIRES_NONE, none}")
    config = compose([*words, "data.path=${oc.env:SCRATCH}/images"], folder)
    assert config.data.path == "/scratch/images"
    variables = config.cluster.variables
    assert variables == {"TOKEN": "s3cret", "HOME2": "/scratch/me", "A": "x", "NONE": "none"}
    again = from_dict(yaml.safe_load(yaml.safe_dump(to_dict(config))))
    assert again.cluster.variables == variables
    run = rundir.create(dataclasses.replace(config, results=str(tmp_path)), {"world": 1}, ["hires"])
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if b"s3cret" in path.read_bytes()]
    monkeypatch.delenv("HIRES_TOKEN")
    with pytest.raises(ConfigError, match=r"reads HIRES_TOKEN, which is not set"):
        _ = config.cluster.variables
    with pytest.raises(ConfigError, match="HIRES_TOKEN"):
        compose(words, folder)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("HTTPS_PROXY", "'http://user:s3cret@host:80/x'"),
        ("HTTPS_PROXY", "'${oc.env:HIRES_NONE,http://user:s3cret@host}'"),
        ("AUTH", "'Bearer ${oc.env:HIRES_TOKEN, s3cret}'"),
        ("HF_TOKEN", "${oc.env:HIRES_NONE,s3cret}"),
        *((name, "s3cret") for name in ("HF_TOKEN", "WANDB_API_KEY", "db_password", "SECRET")),
    ],
)
def test_secret_or_password_in_a_url_or_a_default_is_refused_and_not_repeated(name, text):
    with pytest.raises(ConfigError, match=rf"name it here as '\$\{{oc\.env:{name}\}}'") as caught:
        compose([f"cluster.environment.{name}={text}"])
    assert "s3cret" not in str(caught.value)
    for key, value in (
        ("HTTPS_PROXY", "'http://user@host:80/a@b'"),
        ("HTTPS_PROXY", "'http://${oc.env:HOME}:${oc.env:HOME}@host'"),
        ("HTTPS_PROXY", "'${oc.env:HIRES_NONE,http://host:80}'"),
        (name, ""),
        ("TOKENIZERS_PARALLELISM", "false"),
    ):
        compose([f"cluster.environment.{key}={value}"])


def test_inference_has_the_network_and_an_evaluation_the_data_of_the_run_of_its_weights(tmp_path):
    keys = ["data=digits", "image=[16,20]", "model=preact_resnet", "model.depth=11", "epochs=1"]
    keys += ["model.channels=1", "validate.every=epoch", "data.validation=0.2", "data.balance=true"]
    trained = dataclasses.replace(compose(keys), results=str(tmp_path))
    run = rundir.create(trained, {"world": 1}, ["hires"])
    weights = f"weights={run.path}"
    config = compose(["task=evaluate", weights])
    assert (config.model, config.image) == (trained.model, [16, 20])
    data = dataclasses.replace(trained.data, split="validation", balance=False)
    assert config.data == data
    assert compose(["task=evaluate", weights, "data.split=train", "image=8"]).data.split == "train"
    others = compose(["task=predict", weights, "data=images", f"data.path={tmp_path}", "batch=2"])
    assert (others.model, others.data.name, others.batch) == (trained.model, "images", 2)
    made = dataclasses.replace(compose(["data=textures", "seed=5"]), results=str(tmp_path))
    seeded = rundir.create(made, {"world": 1}, ["hires"]).path
    assert compose(["task=evaluate", f"weights={seeded}"]).seed == 5  # the same images
    for task, model in (("evaluate", "model=resnet18"), ("train", "steps=9")):
        config = compose([f"task={task}", weights, model])
        assert (config.model.name, config.image) == ("resnet", [224, 224])


def test_hydra_is_asked_once_for_points_that_choose_the_same_groups(monkeypatch):
    asked, real = [], hydra.compose
    monkeypatch.setattr(hydra, "compose", lambda *a, **kw: asked.append(a) or real(*a, **kw))
    composer = Composer()
    for image in range(32, 64):
        assert composer.composed(["parallel=sp", f"image={image}"])[0]["image"] == image
    assert asked == [("config", ["parallel=sp"])]
