"""Which cores and which GPU a rank keeps to, found without importing torch."""

from __future__ import annotations

import os

import pytest

from hires.core.config.launcher_config import ClusterConfig, LauncherConfig
from hires.core.config.run_config import RunConfig
from hires.core.ranks import machine
from hires.core.ranks.world import World


def rank_of(local_rank: int, local_size: int) -> World:
    return World(local_rank, local_size, local_rank, local_size, "127.0.0.1", 1, 0)


@pytest.fixture
def two_processors(tmp_path, monkeypatch):
    """Two processors of two cores of two threads: cores i and i + 4 are one; two devices."""
    for core in range(8):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{core % 4 // 2}\n")
        (folder / "core_id").write_text(f"{core % 2}\n")
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    kept: list[list[int]] = []
    monkeypatch.setattr(machine, "_SYSTEM", tmp_path)
    monkeypatch.setattr(machine, "_DEV", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: kept.append(sorted(cores)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    return kept


def config(name="local", threads=1, bind="auto", gpus=0) -> RunConfig:
    launcher = LauncherConfig(name=name, threads=threads, bind=bind)
    return RunConfig(launcher=launcher, cluster=ClusterConfig(gpus=gpus))


def test_ranks_get_whole_cores_and_neighbours_the_same_processor(two_processors):
    shares = [machine.bind(rank_of(rank, 4), config()).cores for rank in range(4)]
    assert shares == two_processors == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("name", "ranks", "threads", "bound"),
    [
        ("local", 8, 1, False),  # nothing to spare for the threads that read and send
        ("slurm", 8, 1, True),
        ("slurm", 8, 2, False),
        ("local", 4, 1, True),
        ("slurm", 9, 1, False),
        ("local", 1, 1, False),  # all cores are its own
    ],
)
def test_ranks_are_unbound_where_cores_are_too_few(two_processors, name, ranks, threads, bound):
    found = machine.bind(rank_of(0, ranks), config(name, threads))
    assert found.bound is bool(two_processors) is bound
    assert found.threads == threads
    if not bound:
        assert found.cores == list(range(8))


def test_rank_is_free_where_binding_is_off_or_refused(two_processors, monkeypatch):
    def refuse(pid, cores):
        raise PermissionError

    assert not machine.bind(rank_of(0, 4), config(bind="none")).bound
    assert two_processors == []
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    found = machine.bind(rank_of(0, 2), config())
    assert (found.bound, found.cores) == (False, list(range(8)))


def test_devices_are_shared_out_by_the_rank_on_its_node(two_processors, monkeypatch):
    for count, visible, expected in (
        (4, None, "3"), (2, None, "1"), (0, None, None),
        (None, None, "1"),  # those that are there
        (4, "4,5,6,7", "7"), (4, "GPU-abc", "GPU-abc"), (4, "", ""), (4, "2, 0", "0"),
        (4, "0,-1,1", "0"), (4, "NoDevFiles", "NoDevFiles"), (4, "GPU-8a,MIG-3c/1/0", "MIG-3c/1/0"),
    ):  # fmt: skip
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert machine.bind(rank_of(3, 4), config(gpus=count)).devices == expected
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == expected


def test_shares_cover_all_cores_once():
    for size in range(1, 8):
        shares = [machine.share_of(list(range(7)), rank, size) for rank in range(size)]
        assert sorted(core for share in shares for core in share) == list(range(7))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
