"""A run is the same run exactly if it computes and measures the same, and cached answers, too."""

from __future__ import annotations

import os
import string
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hires.core.config.comm_config import CommConfig
from hires.core.config.data_config import DataConfig
from hires.core.config.fields import keys_with, keys_without
from hires.core.config.launcher_config import ClusterConfig
from hires.core.config.model_config import ModelConfig
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.precision_config import PrecisionConfig, QuantConfig
from hires.core.config.run_config import LauncherConfig, RunConfig
from hires.core.config.training_config import CheckpointConfig
from hires.core.errors import ConfigError
from hires.core.store import cache as store
from hires.core.store import naming, records, rundir
from hires.core.store.frozen import digest, module_digest, network_sources
from tests.helpers.launches import ROOT
from tests.helpers.new_runs import ARGV, PLAN


def test_cosmetic_keys_do_not_change_the_run(config):
    run = rundir.create(config, PLAN, ARGV)
    other = replace(config, launcher=LauncherConfig(port=29500), comm=CommConfig(timeout_s=9.0))
    second = rundir.create(other, PLAN, ARGV)
    assert second.path == run.path
    assert records.read_config(second).launcher.port == 29500
    assert naming.run_name(replace(config, campaign="x", results="y")) == run.name


def test_what_is_computed_or_measured_changes_the_run(config):
    own = {"name": "custom", "target": "a.b:unet", "args": {"width": 3}}
    begun = CheckpointConfig(resume="/elsewhere", every=1)
    changes = [
        {},
        {"seed": 1},
        {"steps": 13},
        {"launcher": LauncherConfig(threads=2)},
        {"launcher": LauncherConfig(mpi="mpich")},
        {"launcher": LauncherConfig("mpirun")},
        {"launcher": LauncherConfig("mpirun", hosts=["a", "b"])},
        {"launcher": LauncherConfig(bind="none")},
        {"launcher": LauncherConfig(mpi_options=["--mca", "a", "b"])},
        {"cluster": ClusterConfig(name="ours")},
        {"cluster": ClusterConfig(environment={"NCCL_ALGO": "Ring"})},
        {"cluster": ClusterConfig(environment={"NCCL_ALGO": "Tree"})},
        {"cluster": ClusterConfig(options={"exclusive": True})},
        {"parallel": ParallelConfig(name="sp", tiles=[2, 1])},
        {"precision": PrecisionConfig("bf16")},
        {"model": ModelConfig(**own)},
        {"comm": CommConfig(backend="mpi")},
        {"comm": CommConfig(backend="mpi", options={"cuda_ipc": True})},
        {"checkpoint": begun},
    ]
    assert len({naming.run_name(replace(config, **change)) for change in changes}) == len(changes)
    again = {"checkpoint": replace(begun, every=2)}
    assert naming.run_name(replace(config, **again)) == naming.run_name(
        replace(config, checkpoint=begun)
    )
    for saving in ({"every": 7}, {"keep": 5}, {"resume": "never"}):
        saved = replace(config, checkpoint=CheckpointConfig(**saving))
        assert naming.run_name(saved) == naming.run_name(config)
    for hosts in (["a", "b"], []):
        others = [host.upper() for host in hosts] or ["c"]
        launchers = [LauncherConfig("mpirun", hosts=names) for names in (hosts, others)]
        assert len({naming.run_name(replace(config, launcher=one)) for one in launchers}) == 1
    here = ClusterConfig(memory="1GiB")
    assert naming.run_name(replace(config, cluster=here)) == naming.run_name(config)
    far = [ClusterConfig(name="ours", partition=name) for name in ("a", "b")]
    assert len({naming.run_name(replace(config, cluster=one)) for one in far}) == 1


COSMETIC = """
weights campaign results data.names data.max_pixels quant.scales comm.table comm.timeout_s comm.log
comm.check launcher.max_ranks launcher.mpirun launcher.hosts launcher.port launcher.account
launcher.qos launcher.minutes launcher.signal_s launcher.requeues launcher.other_code
launcher.interface measure.track memory.limit checkpoint.every checkpoint.keep
checkpoint.at_end checkpoint.continues
"""
NOT_PLANNED = """
steps weights campaign results data.path data.classes data.length data.images data.masks data.level
data.cut data.region data.stride data.tissue data.labels data.groups data.detections data.outside
data.names data.normalize data.mean data.std data.fit data.split data.split_file data.validation
data.values data.bands
data.test data.split_seed data.shuffle data.balance augment comm.visible comm.timeout_s optimizer.lr
optimizer.scale_lr optimizer.weight_decay lr_schedule predict launcher.port measure checkpoint
"""


def test_keys_that_decide_no_run_or_no_plan_are_these():
    # With one more of them a run is answered with the numbers, or the plan, of another.
    of_site = {field.name for field in fields(ClusterConfig)} - {"name", "environment", "options"}
    assert {*naming.COSMETIC} == {*COSMETIC.split(), *(f"cluster.{key}" for key in of_site)}
    assert {*keys_without(RunConfig, "plan")} == {*NOT_PLANNED.split()}
    # Those by which images are divided, and those that a run with scales does not read.
    assert keys_with(DataConfig, "divides") == ["split_file", "validation", "test", "split_seed"]
    calibrates = ["observer", "percentile", "images", "calibration", "data"]
    assert keys_with(QuantConfig, "calibrates") == calibrates


def test_other_defaults_have_another_schema():
    """A name leaves out what has its default: with another default an old run would pass for it.

    A key that is new changes the digest alone.
    """
    assert (naming.SCHEMA, digest(naming.plain(RunConfig()))) == (4, "8b35a96a33fe95bb")


def test_key_with_its_default_is_no_part_of_the_name(config):
    """A key that comes later renames no run."""
    values = naming.plain(config)
    values["loss"]["smooth"] = 0.5
    named = naming.identity(values)
    assert named["loss"] == {"smooth": 0.5}
    del values["loss"]["weights"], values["augment"], values["epochs"]
    assert naming.identity(values) == named
    assert naming.identity(naming.plain(RunConfig())) == {}


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
    model, digests = ModelConfig(args={"width": 3, "depth": 2}), {"network": "ab", "data": "cd"}
    turned = ModelConfig(args=dict(reversed(model.args.items())))
    names = {
        naming.run_name(replace(config, model=model), digests),
        naming.run_name(replace(config, model=turned), dict(reversed(digests.items()))),
    }
    assert len(names) == 1


@settings(max_examples=20, deadline=None)
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


@settings(max_examples=50, deadline=None)
@given(st.text(), st.text())
def test_slug_is_safe_in_a_path_and_a_shell(layout, target):
    config = RunConfig(
        model=ModelConfig(name="custom", target="a:" + target.replace(":", "")),
        parallel=ParallelConfig(name=layout),
    )
    name = naming.run_name(config)
    assert {*name} <= {*string.ascii_letters, *string.digits, *"._+-"}
    assert len(name) < 200


def test_files_that_decide_a_network_are_found_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("package/__init__", "package/inner/nets", "namespace/net", "net", "blocks"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / f"{name}.py").write_text("raise SystemExit('was run')\n")
    (tmp_path / "widths.json").write_text("[4]")

    def names(target: str, *files: str) -> set[str]:
        return {source.name for source in network_sources(target, files)}

    assert names("package.inner.nets:f") == {"package/__init__.py", "package/inner/nets.py"}
    assert names("namespace.net:f", "widths.json") == {"namespace/net.py", "widths.json"}
    assert names("net:f") == {"net.py", "blocks.py"}
    assert names("nowhere:f") == names("torch.nn:ReLU") == names("sys:exit") == set()
    first = module_digest("package.inner.nets:mine")
    Path("package/inner/nets.py").write_text("def mine(a, b): ...\n")
    assert module_digest("package.inner.nets:mine") not in ("", first)
    assert [*map(module_digest, ("nowhere.at_all:f", "json.nowhere:f", "sys:exit"))] == [""] * 3
    with pytest.raises(ConfigError, match=r"model\.files=widths is no file"):
        names("net:f", "widths")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HIRES_CACHE", raising=False)
    return tmp_path / "hires"


VALUES = {"nodes": [{"eps": 1e-05, "name": "norm"}], "none": None}


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.replace(b"1e-05", b"1e-04"),
        lambda data: data.replace(b"norm", b"nnrm"),
        lambda data: data.replace(b"null", b"true"),
        lambda data: data[:-2],
        lambda data: b"",
        lambda data: b"null",
        lambda data: b"\xff" + data,
        lambda data: b"[" * 200_000 + b"]" * 200_000,
        lambda data: data.replace(data[15:20], b"00000"),
    ],
)
def test_entry_that_has_changed_counts_as_absent_and_is_named(cache, caplog, damage):
    assert store.cached("memory", "key") is None
    store.keep("memory", "key", VALUES)
    assert store.cached("memory", "key") == VALUES
    assert not caplog.records
    path = cache / "memory" / "key.json"
    path.write_bytes(damage(path.read_bytes()))
    assert store.cached("memory", "key") is None
    assert str(path) in caplog.text
    store.keep("memory", "key", VALUES)
    assert store.cached("memory", "key") == VALUES


def test_entry_of_another_key_is_not_believed_and_none_is_kept_where_it_is_off(cache, monkeypatch):
    store.keep("memory", "other", VALUES)
    (cache / "memory" / "other.json").rename(cache / "memory" / "key.json")
    assert store.cached("memory", "key") is None
    monkeypatch.setenv("HIRES_CACHE", "off")
    store.keep("memory", "off", [1])
    assert not (cache / "memory" / "off.json").exists()


def test_entries_that_were_not_used_for_longest_go_first(cache, monkeypatch):
    monkeypatch.setattr(store, "MOST_BYTES", 450)
    for number, name in enumerate("abc"):
        store.keep("memory", name, "x" * 98)
        os.utime(cache / "memory" / f"{name}.json", (number, number))
    store.cached("memory", "b")
    store.keep("memory", "d", "x" * 98)
    assert sorted(path.stem for path in (cache / "memory").iterdir()) == ["b", "d"]


def test_key_changes_with_the_code_and_with_torch(monkeypatch):
    keys = {store.key_of("graph", 1), store.key_of("graph", 2)}
    for versions in (["2.13", [["a.py", 1, 1]]], ["2.14", [["a.py", 1, 1]]], ["2.14", []]):
        monkeypatch.setattr(store, "_versions", lambda versions=versions: versions)
        keys.add(store.key_of("graph", 1))
    assert len(keys) == 5
