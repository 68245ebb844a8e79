"""Is what a cluster's file says checked, and does it decide what it should?"""

from __future__ import annotations

import pytest

from hires.core.config.launcher_config import ClusterConfig, LauncherConfig
from hires.core.config.run_config import RunConfig, from_dict, to_dict
from hires.core.errors import ConfigError
from hires.core.store.naming import run_name


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("gpus", -1, "cluster.gpus=-1 must be at least 0"),
        ("cores", 0, "cluster.cores=0 must be at least 1"),
        ("memory", "much", "cluster.memory='much' is no size"),
        ("mpi", "lam", "cluster.mpi='lam' is unknown; choose one of openmpi"),
        ("partition", "a\nb", "cluster.partition="),
        ("modules", ["a\nb"], "cluster.modules="),
        ("options", {"Mem": 1}, "'Mem': write an option of sbatch in small letters"),
        ("options", {"mem;x": 1}, "'mem;x': write an option"),
        ("options", {"-mem": 1}, "'-mem': write an option"),
        ("options", {"nodes": 3}, "options.nodes is written by hires; it follows from launcher.no"),
        ("options", {"test-only": True}, "options.test-only cannot be used: sbatch would subm"),
        ("options", {"wait": True}, "options.wait cannot be used: sbatch would return after the"),
        ("options", {"parsable": True}, "options.parsable cannot be used: hires itself sets the"),
        ("options", {"no-requeue": True}, "options.no-requeue cannot be used: a job that was pre"),
        ("options", {"comment": "a\nb"}, "cluster.options.comment="),
        ("options", {"comment": None}, "must be text, a number, or true"),
        ("options", {"gres": ["gpu"]}, "must be text, a number, or true"),
        ("environment", {"A B": 1}, "'A B', which is no name of a variable"),
        ("environment", {"A": [1]}, "cluster.environment.A="),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_key(key, value, text):
    with pytest.raises(ConfigError) as caught:
        ClusterConfig(**{key: value})
    assert text in str(caught.value)


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError, match=r"cluster.gpus=-1.*cluster.cores=0"):
        ClusterConfig(gpus=-1, cores=0)


def test_values_of_the_environment_become_text():
    cluster = ClusterConfig(environment={"NCCL_IB_DISABLE": 1})
    assert cluster.environment == {"NCCL_IB_DISABLE": "1"}
    config = RunConfig(cluster=cluster)
    assert from_dict(to_dict(config)) == config


def test_launcher_goes_before_the_cluster():
    cluster = ClusterConfig(mpi="mpich", srun_mpi="pmix", interface="ib0")
    config = RunConfig(cluster=cluster, launcher=LauncherConfig(name="slurm"))
    assert (config.mpi, config.srun_mpi, config.interface) == ("mpich", "pmix", "ib0")
    launcher = LauncherConfig(name="slurm", mpi="openmpi", srun_mpi="pmi2", interface="eth0")
    config = RunConfig(cluster=cluster, launcher=launcher)
    assert (config.mpi, config.srun_mpi, config.interface) == ("openmpi", "pmi2", "eth0")


def test_srun_is_the_way_of_slurm_and_mpirun_that_of_open_mpi():
    assert RunConfig(launcher=LauncherConfig(name="slurm")).mpi == "srun"
    assert RunConfig(launcher=LauncherConfig(name="mpirun")).mpi == "openmpi"


def test_hosts_are_names_and_for_mpirun_only():
    assert LauncherConfig(name="mpirun", hosts=["n1", "10.0.0.2"]).num_nodes == 2
    with pytest.raises(ConfigError, match=r"launcher.hosts has '-x', which is no name"):
        LauncherConfig(name="mpirun", hosts=["-x"])
    with pytest.raises(ConfigError, match=r"launcher.hosts=n1 is for .*; leave launcher.hosts out"):
        LauncherConfig(hosts=["n1"])


def test_runs_keep_the_names_that_they_had_before_there_were_clusters():
    assert run_name(RunConfig()) == "resnet50-224x224-single-fp32-8b3a30c1"
    here = ClusterConfig(memory="1GiB", options={"mem": 0})
    assert run_name(RunConfig(cluster=here)) == run_name(RunConfig())


def test_another_cluster_or_mpi_makes_another_run():
    names = {
        run_name(RunConfig()),
        run_name(RunConfig(cluster=ClusterConfig(name="ours"))),
        run_name(RunConfig(launcher=LauncherConfig(mpi="mpich"))),
        run_name(RunConfig(launcher=LauncherConfig(bind="none"))),
    }
    assert len(names) == 4
    far = ClusterConfig(name="ours", partition="gpu", options={"mem": 0})
    assert run_name(RunConfig(cluster=far)) in names
