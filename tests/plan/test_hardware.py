"""Device and backend are chosen as the GPUs of the job allow, and mismatches are named."""

from __future__ import annotations

import pytest

from hires.core.config.run_config import RunConfig, from_dict
from hires.core.ranks import gpus
from hires.core.ranks.gpus import Torch
from hires.plan.hardware import (
    backend_of,
    check_hardware,
    device_of,
    requested_gpus,
)

CPU_TORCH, CUDA_TORCH = Torch("2.13.0+cpu", None), Torch("2.13.0", "13.0")


JOB = {"name": "slurm"}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine without GPUs and with a torch for CUDA."""
    monkeypatch.setattr(gpus, "device_files", lambda: 0)
    monkeypatch.setattr(gpus, "installed_torch", lambda: CUDA_TORCH)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def config(replicas: int = 1, device: str = "auto", **sections) -> RunConfig:
    parallel = {"replicas": replicas}
    return from_dict({"device": device, "parallel": parallel, "batch": 8 * replicas, **sections})


def found(config: RunConfig) -> list[tuple[str, str]]:
    return [(finding.severity, finding.key) for finding in check_hardware(config)]


def test_gpus_that_options_of_sbatch_request():
    launcher = {"name": "slurm", "nodes": 2}
    for options, count in (
        ({}, None),
        ({"gres": "gpu:a100:4,nvme:1"}, 4),
        ({"gres": "gpu:a100_3g.20gb:2(S:0)"}, 2),
        ({"tres-per-node": "gres/gpu:a100=3"}, 3),
        ({"gpus": 8}, 4),
        ({"gpus-per-task": 1}, 2),
    ):
        chosen = config(4, cluster={"options": options}, launcher=launcher)
        assert requested_gpus(chosen) == count, options


def test_machine_with_gpus_and_a_torch_for_them_computes_there(monkeypatch):
    assert device_of(config()) == "cpu"
    monkeypatch.setattr(gpus, "device_files", lambda: 2)
    assert device_of(config()) == "cuda"
    assert device_of(config(launcher=JOB)) == "cpu"  # the job runs elsewhere
    monkeypatch.setattr(gpus, "installed_torch", lambda: CPU_TORCH)
    assert device_of(config()) == "cpu"


def test_nccl_is_chosen_where_every_rank_has_a_gpu(monkeypatch):
    monkeypatch.setattr(gpus, "device_files", lambda: 2)
    assert [backend_of(config(n)) for n in (1, 2, 3)] == ["nccl", "nccl", "gloo"]
    assert backend_of(config(device="cpu")) == "gloo"
    assert backend_of(config(device="simulated")) == "gloo"
    assert backend_of(config(comm={"backend": "gloo"})) == "gloo"
    unknown = config(device="cuda", launcher=JOB)
    assert backend_of(unknown) == "gloo"
    assert found(unknown) == [("warning", "cluster.gpus")]


def test_nccl_is_refused_where_ranks_share_a_gpu_or_have_none(monkeypatch):
    monkeypatch.setattr(gpus, "device_files", lambda: 2)
    [*_, error] = check_hardware(config(3, comm={"backend": "nccl"}))
    assert (error.severity, error.key) == ("error", "comm.backend")
    assert error.text.startswith("NCCL refuses several ranks on one GPU, and 3 ranks of a node")
    [error] = check_hardware(config(device="cpu", comm={"backend": "nccl"}))
    assert error.text.endswith("use comm.backend=gloo or device=cuda")
    [warning] = check_hardware(config(3))
    assert "3 ranks of a node share 2 GPUs" in warning.text


def test_job_whose_gpus_and_device_do_not_fit_is_named():
    held = {"gpus": 4, "options": {"gres": "gpu:4"}}
    assert found(config(4, cluster=held, launcher=JOB)) == []
    assert found(config(4, "cpu", cluster=held, launcher=JOB)) == [("warning", "device")]
    assert found(config(4, "cpu", cluster={"gpus": 4})) == [("warning", "device")]
    fewer = check_hardware(config(4, cluster={**held, "gpus": 2}, launcher=JOB))
    assert any("cluster.gpus=2 lets its 4 ranks use 2" in finding.text for finding in fewer)
    assert found(config(2, cluster=held, launcher=JOB)) == [("warning", "cluster.options")]
    assert found(config(4, "cuda", cluster={"gpus": 0})) == [("error", "device")]
    assert found(config(1, "cuda")) == [("error", "device")]
    # Steps of an exclusive job get only what the job itself has requested.
    whole = {"gpus": 4, "options": {"exclusive": True}}
    [warning] = check_hardware(config(4, cluster=whole, launcher=JOB))
    assert "cluster.options.gres=gpu:4" in warning.text


@pytest.mark.parametrize(
    ("launcher", "remedy"),
    [
        ({"name": "local"}, "use launcher=mpirun"),
        ({"name": "slurm"}, "set launcher.srun_mpi=pmix"),
        ({"name": "mpirun", "mpi": "srun"}, "set launcher.srun_mpi=pmix"),
        ({"name": "slurm", "srun_mpi": "pmix"}, None),
        ({"name": "mpirun"}, None),
    ],
)
def test_mpi_carries_messages_of_ranks_that_an_mpi_starts(launcher, remedy):
    chosen = config(device="cpu", launcher=launcher, comm={"backend": "mpi"})
    texts = [one.text for one in check_hardware(chosen) if one.severity == "error"]
    assert len(texts) == (remedy is not None)
    assert all(remedy in text and "comm.backend=gloo" in text for text in texts)
