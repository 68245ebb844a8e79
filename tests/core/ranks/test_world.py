"""Which rank is this process, and which cores and devices does it keep to?"""

from __future__ import annotations

import os

import pytest

from hires.core.config.launcher_config import ClusterConfig, LauncherConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.core.ranks import gpus, world
from hires.core.ranks.world import World, from_environment

WORLD = World(1, 4, 1, 4, "127.0.0.1", 29500, 2)


def test_environment_and_back():
    environ = WORLD.to_environment()
    assert environ["RANK"] == "1"
    assert environ["WORLD_SIZE"] == "4"
    assert environ["HIRES_ATTEMPT"] == "2"
    assert from_environment(environ) == WORLD


@pytest.mark.parametrize("name", sorted(WORLD.to_environment()))
def test_missing_variable_is_named_with_the_remedy(name):
    environ = WORLD.to_environment()
    del environ[name]
    with pytest.raises(ConfigError, match=rf"{name} is not set: .*launch\.sh"):
        from_environment(environ)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("RANK", "one", "RANK='one' must be a number"),
        ("RANK", "4", "RANK=4 must be 0 to WORLD_SIZE-1=3"),
        ("LOCAL_WORLD_SIZE", "5", "LOCAL_WORLD_SIZE=5 do not fit"),
        ("MASTER_PORT", "70000", "MASTER_PORT=70000 must be 1 to 65535"),
        ("HIRES_ATTEMPT", "-1", "HIRES_ATTEMPT=-1 must be 0 or more"),
    ],
)
def test_values_that_make_no_sense(name, value, text):
    with pytest.raises(ConfigError, match=text):
        from_environment({**WORLD.to_environment(), name: value})


def rank_of(local_rank: int, local_size: int) -> World:
    return World(local_rank, local_size, local_rank, local_size, "127.0.0.1", 1, 0)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two processors of two cores of two threads: cores i and i + 4 are one; two devices."""
    for core in range(8):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{core % 4 // 2}\n")
        (folder / "core_id").write_text(f"{core % 2}\n")
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    kept: list[list[int]] = []
    monkeypatch.setattr(world, "_SYSTEM", tmp_path)
    monkeypatch.setattr(gpus, "_DEV", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: kept.append(sorted(cores)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    return kept


def config(name="local", threads=1, bind="auto", gpus=0) -> RunConfig:
    launcher = LauncherConfig(name=name, threads=threads, bind=bind)
    return RunConfig(launcher=launcher, cluster=ClusterConfig(gpus=gpus))


def test_ranks_get_whole_cores_and_neighbours_the_same_processor(machine):
    shares = [world.bind(rank_of(rank, 4), config()).cores for rank in range(4)]
    assert shares == machine == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("name", "ranks", "threads", "bound"),
    [
        ("local", 8, 1, False),  # nothing to spare for the threads that read and send
        ("slurm", 8, 1, True),
        ("slurm", 8, 2, False),
        ("local", 4, 2, False),
        ("local", 4, 1, True),
        ("local", 9, 1, False),
        ("slurm", 9, 1, False),
        ("local", 1, 1, False),  # all cores are its own
    ],
)
def test_nobody_is_bound_where_cores_are_too_few(machine, name, ranks, threads, bound):
    found = world.bind(rank_of(0, ranks), config(name, threads))
    assert found.bound is bool(machine) is bound
    assert found.threads == threads
    if not bound:
        assert found.cores == list(range(8))


def test_binding_can_be_left_out(machine):
    assert not world.bind(rank_of(0, 4), config(bind="none")).bound
    assert machine == []


def test_system_that_refuses_leaves_the_rank_free(machine, monkeypatch):
    def refuse(pid, cores):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    found = world.bind(rank_of(0, 2), config())
    assert (found.bound, found.cores) == (False, list(range(8)))


@pytest.mark.parametrize(
    ("count", "visible", "expected"),
    [
        (4, None, "3"),
        (2, None, "1"),
        (0, None, None),
        (None, None, "1"),  # those that are there
        (4, "4,5,6,7", "7"),
        (4, "GPU-abc", "GPU-abc"),
        (4, "", ""),
    ],
)
def test_devices_are_shared_out_by_the_rank_on_its_node(
    machine, monkeypatch, count, visible, expected
):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert world.bind(rank_of(3, 4), config(gpus=count)).devices == expected
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == expected


def test_rank_that_sees_its_node_keeps_all_devices(machine, monkeypatch):
    everything = config(gpus=4)
    everything.comm.visible = "node"
    assert world.bind(rank_of(3, 4), everything).devices is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert world.bind(rank_of(3, 4), everything).devices == "4,5"


def test_shares_cover_all_cores_once():
    for size in range(1, 8):
        shares = [world.share_of(list(range(7)), rank, size) for rank in range(size)]
        assert sorted(core for share in shares for core in share) == list(range(7))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
