"""Device and backend are chosen as the GPUs of the job allow, and mismatches are named."""

from __future__ import annotations

import pytest

from hires.core.config.run_config import RunConfig, from_dict
from hires.core.ranks import machine
from hires.core.ranks.machine import Torch
from hires.plan.hardware import backend_of, check_hardware, device_of, requested_gpus

JOB = {"name": "slurm"}


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch):
    """A machine with two GPUs and a torch for CUDA."""
    monkeypatch.setattr(machine, "device_files", lambda: 2)
    monkeypatch.setattr(machine, "installed_torch", lambda: Torch("2.13.0", "13.0"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def config(replicas: int = 1, device: str = "auto", **sections) -> RunConfig:
    parallel = {"replicas": replicas}
    return from_dict({"device": device, "parallel": parallel, "batch": 8 * replicas, **sections})


def found(config: RunConfig) -> list[tuple[str, str]]:
    return [(finding.severity, finding.key) for finding in check_hardware(config)]


def test_gpus_that_options_of_sbatch_request():
    for options, count in (
        ({}, None),
        ({"gres": "gpu:a100:4,nvme:1"}, 4),
        ({"gres": "gpu:a100_3g.20gb:2(S:0)"}, 2),
        ({"tres-per-node": "gres/gpu:a100=3"}, 3),
        ({"gpus": 8}, 4),
        ({"gpus-per-task": 1}, 2),
        ({"gres": "gpu:4", "gpus-per-node": 4}, 4),
    ):
        job = config(4, cluster={"options": options}, launcher={**JOB, "nodes": 2})
        assert requested_gpus(job) == count, options


def test_machine_with_gpus_and_a_torch_for_them_computes_there(monkeypatch):
    assert device_of(config()) == "cuda"
    assert device_of(config(launcher=JOB)) == "cpu"  # the job runs elsewhere
    assert [backend_of(config(n)) for n in (1, 2, 3)] == ["nccl", "nccl", "gloo"]
    for keys in ({"device": "cpu"}, {"device": "simulated"}, {"comm": {"backend": "gloo"}}):
        assert backend_of(config(**keys)) == "gloo"
    unknown = config(device="cuda", launcher=JOB)
    assert backend_of(unknown) == "gloo"
    assert found(unknown) == [("warning", "cluster.gpus")]
    monkeypatch.setattr(machine, "installed_torch", lambda: Torch("2.13.0+cpu", None))
    assert device_of(config()) == "cpu"


def test_job_whose_gpus_and_device_do_not_fit_is_named(monkeypatch):
    nccl = {"comm": {"backend": "nccl"}}
    assert found(config(3, **nccl))[-1] == ("error", "comm.backend")
    assert found(config(device="cpu", **nccl)) == [("error", "comm.backend")]
    [warning] = check_hardware(config(3))
    assert "3 ranks of a node share 2 GPUs" in warning.text
    monkeypatch.setattr(machine, "device_files", lambda: 0)
    four = {"cluster": {"gpus": 4, "options": {"gres": "gpu:4"}}, "launcher": JOB}
    assert found(config(4, **four)) == []
    assert found(config(4, "cuda", cluster={"gpus": 0})) == [("error", "device")]
    assert found(config(1, "cuda")) == [("error", "device")]
    # Steps of an exclusive job get only what the job itself has requested.
    exclusive = {"gpus": 4, "options": {"exclusive": True}}
    [warning] = check_hardware(config(4, cluster=exclusive, launcher=JOB))
    assert "cluster.options.gres=gpu:4" in warning.text
    monkeypatch.setattr(machine, "installed_torch", lambda: Torch("2.13.0+cpu", None))
    [warning] = check_hardware(config(4, **four))
    assert "a build for CPUs alone; install one that is built for CUDA" in warning.text
    four["cluster"]["container"] = "/images/torch.sif"  # with a torch of its own
    assert found(config(4, **four)) == []


def test_option_that_no_library_of_the_run_reads_is_named():
    options = {"comm": {"options": {"nccl_debug": "WARN"}}}
    [warning] = check_hardware(config(device="cpu", **options))
    assert (
        "nccl_debug has no effect with comm.backend=gloo; it is of nccl: NCCL_DEBUG" in warning.text
    )
    assert found(config(2, **options)) == []


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
    by_mpi = config(device="cpu", launcher=launcher, comm={"backend": "mpi"})
    texts = [one.text for one in check_hardware(by_mpi) if one.severity == "error"]
    assert len(texts) == (remedy is not None)
    assert all(remedy in text and "comm.backend=gloo" in text for text in texts)
