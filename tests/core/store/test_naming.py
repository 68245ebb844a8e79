"""Is a run the same run exactly if it computes and measures the same, and is its name safe?"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hires.core.config.checkpoint_config import CheckpointConfig
from hires.core.config.comm_config import CommConfig
from hires.core.config.model_config import ModelConfig
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.precision_config import PrecisionConfig
from hires.core.config.run_config import LauncherConfig, RunConfig
from hires.core.errors import ConfigError
from hires.core.store import naming, records, rundir
from tests.helpers.new_runs import ARGV, PLAN

ROOT = Path(__file__).parents[3]


def test_cosmetic_keys_do_not_change_the_run(config):
    run = rundir.create(config, PLAN, ARGV)
    other = replace(config, launcher=LauncherConfig(port=29500), comm=CommConfig(timeout_s=9.0))
    second = rundir.create(other, PLAN, ARGV)
    assert second.path == run.path
    assert records.read_config(second).launcher.port == 29500
    assert naming.run_name(replace(config, campaign="x", results="y")) == run.name


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"steps": 13},
        {"launcher": LauncherConfig(threads=2)},
        {"parallel": ParallelConfig(name="sp", tiles=[2, 1])},
        {"precision": PrecisionConfig("bf16")},
        {"model": ModelConfig(name="custom", target="a.b:unet", args={"width": 3})},
    ],
)
def test_what_is_computed_or_measured_changes_the_run(config, change):
    assert naming.run_name(replace(config, **change)) != naming.run_name(config)


@pytest.mark.parametrize("change", [{"every": 7}, {"keep": 5}, {"resume": "never"}])
def test_saving_makes_no_other_run(config, change):
    saved = replace(config, checkpoint=CheckpointConfig(**change))
    assert naming.run_name(saved) == naming.run_name(config)


def test_run_is_called_as_before_there_were_checkpoints(config):
    older = naming.plain(config)
    del older["checkpoint"]
    assert naming.identity(older) == naming.identity(naming.plain(config))


def test_run_that_begins_with_another_one_is_another_run(config):
    begun = replace(config, checkpoint=CheckpointConfig(resume="/elsewhere", every=1))
    assert naming.run_name(begun) != naming.run_name(config)
    again = replace(config, checkpoint=CheckpointConfig(resume="/elsewhere", every=2))
    assert naming.run_name(again) == naming.run_name(begun)


def test_hash_does_not_depend_on_process_or_order(config):
    """Python's own hash is salted: two processes would not agree."""
    code = (
        "from hires.core.config.run_config import RunConfig\n"
        "from hires.core.store import naming\n"
        "print(naming.run_name(RunConfig()))"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == naming.run_name(RunConfig(results="elsewhere"))


def test_plain_values_only_in_model_args(config):
    odd = replace(config, model=ModelConfig(name="custom", target="a:b", args={"f": object()}))
    with pytest.raises(ConfigError, match=r"model\.args"):
        rundir.create(odd, PLAN, ARGV)
    tuples = replace(config, model=ModelConfig(name="custom", target="a:b", args={"f": (1, 2)}))
    assert records.read_config(rundir.create(tuples, PLAN, ARGV)).model.args == {"f": [1, 2]}


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=8),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text(st.characters(codec="utf-8"), max_size=8),
        max_size=4,
    )
)
def test_frozen_config_reads_back_as_it_was(tmp_path_factory, args):
    config = RunConfig(
        results=str(tmp_path_factory.mktemp("results")),
        model=ModelConfig(name="custom", target="a:b", args=args),
    )
    assert records.read_config(rundir.create(config, PLAN, ARGV)) == config


@given(st.text(), st.text())
def test_slug_is_safe_in_a_path_and_a_shell(layout, target):
    config = RunConfig(
        model=ModelConfig(name="custom", target="a:" + target.replace(":", "")),
        parallel=ParallelConfig(name=layout),
    )
    name = naming.run_name(config)
    assert set(name) <= set(naming_letters())
    assert len(name) < 200


def naming_letters():
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._+-"


@pytest.mark.parametrize(
    ("model", "label"),
    [
        (ModelConfig(depth=101), "resnet101"),
        (ModelConfig(name="preact_resnet", n=12), "preact_resnet110"),
        (ModelConfig(name="mpi4dl_resnet", n=6), "mpi4dl_resnet56"),
        (ModelConfig(name="amoebanet"), "amoebanet18_208"),
        (ModelConfig(name="unet", upsample="nearest"), "unet4_64_nearest"),
        (ModelConfig(name="edsr", scale=3), "edsr16_64_x3"),
        (ModelConfig(name="custom", target="my.nets:unet"), "custom:unet"),
    ],
)
def test_model_labels(model, label):
    assert naming.model_label(model) == label


def test_run_is_called_as_before_its_keys_moved():
    before = naming.identity({"task": {"name": "train", "lr": 0.1, "optimizer": {"shard": True}}})
    keys = {"lr": 0.1, "shard": True, "exchange": "auto", "name": "sgd", "betas": [0.9, 0.999]}
    assert naming.identity({"task": {"name": "train"}, "optimizer": keys}) == before
    assert naming.identity({"task": {}, "optimizer": {**keys, "name": "adam"}}) != before
    assert naming.identity({"task": 3, "optimizer": keys})["task"] == 3  # of a damaged file
