"""Memory that does not fit is said with the rank, the numbers and what holds it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from hires.core.config.launcher_config import ClusterConfig, LauncherConfig
from hires.core.config.run_config import RunConfig
from hires.core.config.training_config import MemoryConfig
from hires.core.units import MIB
from hires.nets.trace import trace
from hires.plan import memory, rank_kinds
from hires.plan.memory import (
    CONNECTION_BYTES,
    LIBRARIES_BYTES,
    LOOPS,
    MESSAGE_LOOPS,
    RankMemory,
    Room,
    nccl_bytes,
    room_of,
    rooms_of,
    together,
)
from hires.plan.plan import Plan
from hires.plan.rank_kinds import rehearsed_ranks
from hires.plan.search.candidates import Candidate, LayoutShape
from hires.plan.search.estimate import Estimator
from hires.plan.simulation.node_work import kept_bytes, value_bytes
from hires.plan.simulation.simulate import Network
from tests.helpers.small_plans import config_of, forked, plan_of


def with_peaks(*peaks: int, plan: Plan | None = None, **facts: int) -> Plan:
    """A plan of one stage a rank, whose ranks need so many MiB."""
    plan = plan or plan_of(stages=len(peaks), replicas=2)
    memory = [RankMemory(0, 0, 0, peak * MIB, 0, **facts).to_dict() for peak in peaks]
    return replace(plan, memory=memory)


def test_machine_holds_all_ranks_together_with_their_libraries():
    plan = with_peaks(50, 70)
    config = RunConfig(memory=MemoryConfig(limit="60MiB"))
    text = Room(60 * MIB, None).shortage(config, plan)
    assert text == "rank 1 needs 70.0 MiB, predicted, which is more than memory.limit=60MiB"
    assert Room(70 * MIB, None).shortage(config, plan) is None
    exact = 2 * (120 * MIB + 2 * LIBRARIES_BYTES)
    assert Room(None, exact).shortage(RunConfig(), plan) is None
    text = Room(None, exact - 1).shortage(RunConfig(), plan)
    assert text.startswith("4 ranks on this machine need 1.5 GiB, predicted, most of all rank 1")
    assert Room(None, None).shortage(RunConfig(), plan) is None


def test_each_node_of_a_job_holds_its_own_ranks():
    plan = with_peaks(50, 70, 10)
    launcher = LauncherConfig(name="slurm", nodes=2)
    fullest = 130 * MIB + 3 * LIBRARIES_BYTES
    config = RunConfig(launcher=launcher, cluster=ClusterConfig(memory=f"{fullest}B"))
    needs = [(list(node.ranks), node.bytes) for node in room_of(config).per_node(plan)]
    assert needs == [([0, 1, 2], fullest), ([3, 4, 5], fullest)]
    assert room_of(config).shortage(config, plan) is None
    config = RunConfig(launcher=launcher, cluster=ClusterConfig(memory="1GiB"))
    text = room_of(config).shortage(config, with_peaks(50, 140, 10))
    assert text.startswith("3 ranks on one node need 1.1 GiB, predicted, most of all rank 1 with")
    assert text.endswith("which is more than cluster.memory=1GiB")


def test_this_machine_counts_where_the_ranks_run_on_it(monkeypatch):
    monkeypatch.setattr(memory, "machine_bytes", lambda: 8 * MIB)
    for config, expected in (
        (RunConfig(cluster=ClusterConfig(memory="1GiB")), 8 * MIB),
        (RunConfig(launcher=LauncherConfig(name="mpirun")), 8 * MIB),
        (RunConfig(cluster=ClusterConfig(memory="4MiB")), 4 * MIB),
    ):
        assert room_of(config).machine_bytes == expected


def gpu_config(gpu_memory: str, memory: str | None = None) -> RunConfig:
    cluster = ClusterConfig(gpus=2, gpu_memory=gpu_memory, memory=memory)
    return RunConfig(device="cuda", cluster=cluster)


def test_gpu_holds_its_ranks_with_their_contexts():
    plan = with_peaks(100, 200, 50, plan=plan_of(stages=3), context_bytes=400 * MIB)
    # Ranks 0 and 2 take the first GPU, in turn.
    needs = [(list(one.ranks), one.bytes) for one in room_of(gpu_config("1GiB")).per_node(plan)]
    assert needs == [([0, 2], 950 * MIB), ([1], 600 * MIB)]
    assert room_of(gpu_config("950MiB")).shortage(gpu_config("950MiB"), plan) is None
    text = room_of(gpu_config("949MiB")).shortage(gpu_config("949MiB"), plan)
    assert text.startswith("2 ranks on one GPU need 950.0 MiB, predicted, most of all rank 0 with")
    assert text.endswith("which is more than cluster.gpu_memory=949MiB")


def test_node_holds_what_its_ranks_pin_beside_the_gpus():
    plan = with_peaks(7, 7, 7, plan=plan_of(stages=3), host_bytes=100 * MIB)
    assert [entry["device_bytes"] for entry in plan.memory] == [7 * MIB] * 3
    config, enough = gpu_config("1GiB", "1MiB"), gpu_config("1GiB", "1260MiB")
    _, host = rooms_of(config)
    assert [need.bytes for need in host.per_node(plan)] == [300 * MIB + 3 * LIBRARIES_BYTES]
    text = host.shortage(config, plan)
    assert "3 ranks on one node need 1.2 GiB, predicted, of the host's memory beside its" in text
    assert text.endswith("which is more than cluster.memory=1MiB")
    assert rooms_of(enough)[1].shortage(enough, plan) is None
    assert len(rooms_of(RunConfig())) == 1


def test_memory_is_that_of_the_narrowest_group_around_the_process(tmp_path, monkeypatch):
    # A job of Slurm is a group below others; that of the root alone was looked at.
    place = tmp_path / "sys/fs/cgroup/slurm/job_7/step_0"
    place.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 9000000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/slurm/job_7/step_0\n")
    for folder, most in ((place, "max"), (place.parent, "5000000"), (place.parents[1], "8000000")):
        (folder / "memory.max").write_text(most)
        (folder / "memory.current").write_text("1000000")
    monkeypatch.setattr(memory, "Path", lambda path: tmp_path / path.lstrip("/"))
    assert memory.free_bytes() == 4_000_000
    assert memory.machine_bytes() == 5_000_000


def test_spill_folder_on_a_small_disk_or_in_memory(tmp_path, monkeypatch):
    config = replace(config_of(tiles=[2, 1]), memory=MemoryConfig(spill=str(tmp_path / "new")))
    plan = plan_of(tiles=[2, 1]).with_results(memory=[{"spill_bytes": 3 * 2**30}] * 2)

    def found(free: int, kind: str) -> tuple[str, str]:
        monkeypatch.setattr(memory.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        monkeypatch.setattr(memory, "_file_system", lambda _: kind)
        [finding] = memory.spill_findings(config, plan)
        assert "holds 6.0 GiB on a machine, which each step writes and reads: 12 s" in finding.text
        return finding.severity, finding.text.rpartition("; ")[2]

    assert found(2**40, "ext4")[0] == "note"
    assert found(2**40, "tmpfs") == (
        "warning",
        "that is a file system in memory: name a folder on a disk",
    )
    severity, text = found(2**32, "ext4")
    assert (severity, text.partition(":")[0]) == ("error", "its disk has 4.0 GiB free")


def test_one_rank_of_a_process_computes_while_the_others_wait():
    plan = plan_of(tiles=[3, 1]).with_results(resident=3)
    ranks = [
        RankMemory(100, 50, 50, activations, 10, waiting_bytes=waiting, spill_bytes=20)
        for activations, waiting in ((30, 25), (60, 20), (30, 15))
    ]
    one = together(plan, 0, ranks, 7)
    assert (one.params_bytes, one.grads_bytes, one.optimizer_bytes) == (100, 50, 50)
    assert one.activations_bytes + one.buffers_bytes == (25 + 20 + 15) + (70 - 20) + 7
    assert one.spill_bytes == 60


def test_buffers_of_nccl_follow_from_the_communicators_of_a_rank():
    plan = plan_of(tiles=[2, 1], stages=2, spatial_stages=1)
    assert nccl_bytes(plan, 0) == 0  # gloo
    plan = replace(plan, backend="nccl")
    # Rank 0: the sums of its tiles and of its stage's gradients with rank 1; halos from rank 1 and
    # gradients from rank 2. Rank 2 alone holds stage 1, and gets values from rank 0.
    assert nccl_bytes(plan, 0) == (2 * LOOPS + 2 * MESSAGE_LOOPS) * CONNECTION_BYTES
    assert nccl_bytes(plan, 2) == MESSAGE_LOOPS * CONNECTION_BYTES


def test_rehearsals_of_a_large_plan_are_bounded(monkeypatch):
    layout = {"tiles": [3, 1], "stages": 3, "spatial_stages": 1, "directions": 2}
    plan = plan_of(**layout, schedule="gems", microbatches=1)
    exact = rehearsed_ranks(plan)
    work = {rank: rank_kinds._work(plan, rank) for rank in exact}
    sizes = [rank_kinds._size(plan, rank) for rank in range(plan.ranks_per_replica)]
    for limit in (sum(work.values()) - 1, 2 * max(work.values()), 1):
        monkeypatch.setattr(rank_kinds, "WORK", limit)
        chosen = rehearsed_ranks(plan)
        assert len(set(chosen)) < len(set(exact))
        assert len(set(chosen)) == 1 or sum(work[rank] for rank in set(chosen)) <= limit
        # What is predicted for a rank is never that of one that holds less.
        assert all(sizes[leader] >= sizes[rank] for rank, leader in enumerate(chosen))


def test_estimates_count_numbers_by_their_own_width():
    """Weights of fp64 counted four bytes, 8-bit integers as many as the other activations."""
    graph, single = forked(8, True), Candidate(LayoutShape(1, 1, 0, (1, 1), 1, 1))

    def peak(precision):
        config = config_of(batch=8)
        config = replace(config, precision=replace(config.precision, name=precision))
        estimator = Estimator(config, graph, lambda *_: 0.0, Network(), 1e12)
        return estimator.estimate(single).peak_bytes

    assert peak("fp64") == pytest.approx(2 * peak("fp32"))
    for node in graph.nodes:
        assert value_bytes(graph, node.name, "float32") == 4 * node.num_elements
        small = replace(graph, nodes=[replace(one, dtype="uint8") for one in graph.nodes])
        assert value_bytes(small, node.name, "float32") == node.num_elements


def test_training_keeps_the_places_of_maxima_beside_the_pooled_map():
    """The next convolution reads the map: what a pool keeps besides was forgotten."""
    layers = nn.Conv2d(3, 4, 1), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1)
    graph = trace(nn.Sequential(*layers), [1, 3, 8, 8], True)
    assert kept_bytes(graph, "float32") == {"0": 4 * 8 * 8 * 4, "1": 4 * 4 * 4 * (4 + 8)}
    assert kept_bytes(graph, "float64") == {"0": 4 * 8 * 8 * 8, "1": 4 * 4 * 4 * (8 + 8)}


def test_product_with_a_number_keeps_nothing():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.gain = nn.Conv2d(3, 2, 1), nn.Parameter(torch.ones(2, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return (3 * y).tanh() * self.gain

    assert kept_bytes(trace(Scaled(), [1, 3, 4, 4], True), "float32") == {"tanh": 2 * 16 * 4}
