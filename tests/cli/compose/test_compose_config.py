"""What config comes out of the overrides that somebody types?"""

from __future__ import annotations

from pathlib import Path

import pytest

from hires.cli.compose.choices import groups
from hires.cli.compose.compose_config import compose
from hires.core.config.run_config import RunConfig, from_dict, to_dict
from hires.core.errors import ConfigError
from hires.plan.route_choice import resolve


def test_no_override_gives_the_defaults_of_the_dataclasses():
    # But for what auto means here.
    assert to_dict(compose([])) == to_dict(resolve(RunConfig()))


def test_result_is_a_fixed_point_of_the_frozen_config():
    config = compose(["parallel=sp+pp", "image=[75,61]", "precision=bf16"])
    assert from_dict(to_dict(config)) == config


@pytest.mark.parametrize(
    ("layout", "replicas", "stages", "tiles", "spatial_stages", "microbatches"),
    [
        ("single", 1, 1, [1, 1], 0, 1),
        ("dp", 2, 1, [1, 1], 0, 1),
        ("lp", 1, 2, [1, 1], 0, 1),
        ("pp", 1, 2, [1, 1], 0, 4),
        ("sp", 1, 1, [2, 1], 1, 1),
        ("sp+lp", 1, 2, [2, 1], 1, 1),
        ("sp+pp", 1, 2, [2, 1], 1, 4),
    ],
)
def test_layouts(layout, replicas, stages, tiles, spatial_stages, microbatches):
    made = compose([f"parallel={layout}"]).parallel
    assert made.name == layout
    assert (made.replicas, made.stages, made.tiles) == (replicas, stages, tiles)
    assert (made.spatial_stages, made.microbatches) == (spatial_stages, microbatches)


def test_keys_win_over_the_layout_in_any_order():
    for words in (["parallel.stages=3", "parallel=sp+lp"], ["parallel=sp+lp", "parallel.stages=3"]):
        made = compose(words).parallel
        assert (made.stages, made.tiles, made.name) == (3, [2, 1], "sp+lp")


def test_replicas_go_around_every_layout():
    assert compose(["parallel=sp+pp", "parallel.replicas=2"]).parallel.replicas == 2


def test_arguments_of_a_users_network_need_no_plus():
    words = ["model=custom", "model.target=a.b:c", "model.args.width=3", "model.args.kind=x"]
    assert compose(words).model.args == {"width": 3, "kind": "x"}
    assert compose([*words[:2], "model.args={width:3,dims:[1,2]}"]).model.args == {
        "width": 3,
        "dims": [1, 2],
    }


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_plus_before_a_known_key_changes_nothing(plus):
    assert compose([f"{plus}steps=20"]).steps == 20


@pytest.mark.parametrize(
    "path",
    ["/tmp/my images (2024)/a=b", "/tmp/it's", '/tmp/"quoted"', "/tmp/ünïcode", "/tmp/a b"],
)
def test_paths_need_no_quotes_of_their_own(path):
    assert compose(["data=folder", f"data.path={path}"]).data.path == path


def test_data_path_is_absolute_because_ranks_may_start_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert compose(["data=folder", "data.path=images"]).data.path == str(tmp_path / "images")


def test_tilde_means_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    config = compose(["data=folder", "data.path=~/images", "results=~/runs"])
    assert (config.data.path, config.results) == ("/home/somebody/images", "/home/somebody/runs")


def test_number_as_a_name():
    assert compose(["campaign=2024"]).campaign == "2024"


def test_deleting_a_group_goes_back_to_its_defaults():
    assert compose(["~parallel"]).parallel == RunConfig().parallel


def test_config_dir_adds_choices(tmp_path):
    folder = tmp_path / "my conf"
    (folder / "parallel").mkdir(parents=True)
    (folder / "parallel" / "wide.yaml").write_text("defaults: [sp]\nname: wide\ntiles: [1, 4]\n")
    made = compose(["parallel=wide"], str(folder)).parallel
    assert (made.name, made.tiles) == ("wide", [1, 4])


def test_missing_config_dir_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no-such \(or HIRES_CONF\) is not a folder"):
        compose([], str(tmp_path / "no-such"))


def test_file_that_is_no_text_is_named_only_where_it_is_chosen(tmp_path: Path):
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mine.yaml").write_bytes(b"name: \xff\n")
    assert compose([], str(tmp_path)) == compose([])
    with pytest.raises(ConfigError, match=r"mine\.yaml is no text in UTF-8"):
        compose(["cluster=mine"], str(tmp_path))


def test_file_that_stands_on_a_wrong_one_of_the_same_folder_names_that(tmp_path: Path):
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mine.yaml").write_text("defaults: [theirs]\n")
    (tmp_path / "cluster" / "theirs.yaml").write_text("options: {gres: 1}\npartitoin: x\n")
    with pytest.raises(ConfigError) as caught:
        compose(["cluster=mine"], str(tmp_path))
    file = tmp_path / "cluster" / "theirs.yaml"
    assert str(caught.value) == f"{file}: cluster has no 'partitoin'; did you mean partition?"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("name: [\n", "mine.yaml, line 2: this is no YAML"),
        ("name: [a\nb: 1\n", "line 2: this is no YAML (expected ',' or ']', but got ':')"),
        ("name: [a\nb: 1\n", "; close the bracket or brace that line 1 opens"),
        ("name: x\n\tstages: 2\n", "mine.yaml, line 2: this is no YAML"),
        ("name: x\n\tstages: 2\n", "; indent with spaces, not with a tab"),
        ("name: x\nname: y\n", "mine.yaml, line 2: this is no YAML (found duplicate key name)"),
        ("- sp\n", "mine.yaml must hold keys, one a line"),
        ("nonsense: 1\n", "mine.yaml: parallel has no 'nonsense'; "),
        ("stagse: 1\n", "mine.yaml: parallel has no 'stagse'; did you mean stages?"),
        ("# @package _global_\nparallel:\n  stagse: 1\n", "has no 'stagse'; did you mean stages?"),
        ("defaults: [spp]\n", "defaults names 'spp', which is no choice of parallel; did you"),
        ("tiles: many\n", "parallel.tiles=many"),
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


def test_list_of_names_is_asked_for_as_such():
    with pytest.raises(ConfigError, match=r"launcher.hosts must be a list of names, as \[a,b\]"):
        compose(["launcher=mpirun", "launcher.hosts=n1"])


@pytest.mark.parametrize("name", sorted(groups()["parallel"]))
def test_every_layout_of_conf_is_called_by_its_own_name(name):
    assert compose([f"parallel={name}"]).parallel.name == name


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ("parallel=sp parallel.stages=3", "sp+lp"),
        ("parallel=sp parallel.stages=3 parallel.microbatches=4", "sp+pp"),
        ("parallel.tiles=[2,1]", "sp"),
        ("parallel=sp parallel.tiles=[1,1]", "single"),
        ("parallel=sp+dp parallel.replicas=1", "sp"),
        ("parallel=lp parallel.microbatches=2", "pp"),
        ("parallel=gems parallel.microbatches=4", "gems"),
        ("parallel=gems parallel.schedule=gems_1f1b", "pp+gems"),
        ("parallel=sp+lp+local_dp parallel.replicas=2", "sp+lp+local_dp+dp"),
        ("parallel=sp parallel.stages=3 parallel.name=mine", "mine"),
    ],
)
def test_layout_is_called_what_its_keys_make_it(overrides, name):
    assert compose(overrides.split()).parallel.name == name


def test_stored_config_keeps_its_name():
    values = {"parallel": {"name": "sp", "tiles": [2, 1], "stages": 3}}
    assert from_dict(values).parallel.name == "sp"
