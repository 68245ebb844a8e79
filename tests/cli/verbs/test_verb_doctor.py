"""Does ``hires doctor`` say what is wrong and what would help?"""

from __future__ import annotations

import dataclasses
import json
import socket
from pathlib import Path

import pytest

from hires.cli import doctor_checks
from hires.cli.verbs import verb_doctor
from hires.core.ranks import gpus
from hires.core.ranks.mpi_library import Facts, GpuSupport
from hires.core.store.provenance import now
from hires.launcher.doctor_check import Check
from hires.plan import checks
from hires.plan.simulation.machine_calibration import keep_calibration, this_machine
from tests.helpers.calibrations import CALIBRATION

CHECKS = [Check("torch", "ok", "2.13"), Check("gloo", "failed", "no answer", "open the firewall")]


def test_failing_check_exits_1_with_its_remedy(hires, monkeypatch):
    monkeypatch.setattr(verb_doctor, "all_checks", lambda *_: CHECKS)
    answer = hires("doctor")
    assert answer.code == 1
    assert answer.out == (
        "here  torch  ok      2.13\n"
        "here  gloo   failed  no answer\n"
        "                     -> open the firewall\n"
    )


def test_doctor_says_whether_and_when_the_machine_was_calibrated(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HIRES_CACHE", raising=False)
    check = verb_doctor.calibration_check()
    assert (check.state, check.text[:5]) == ("ok", "none:")
    here = dataclasses.replace(CALIBRATION, machine=this_machine(), time=now())
    path = keep_calibration(here)
    assert path is not None
    assert verb_doctor.calibration_check().text.endswith("), today")
    path.write_text("{")
    check = verb_doctor.calibration_check()
    assert (check.state, check.remedy) == ("warning", "run hires doctor --calibrate")


def test_json(hires, monkeypatch):
    monkeypatch.setattr(verb_doctor, "all_checks", lambda *_: CHECKS[:1])
    answer = hires("doctor", "--json")
    assert answer.code == 0
    told = json.loads(answer.out)
    assert told["ok"] is True
    assert told["checks"][0]["where"] == "here"


def test_nodes_and_keys_reach_the_checks(hires, monkeypatch):
    seen = []
    monkeypatch.setattr(verb_doctor, "all_checks", lambda *told: seen.append(told) or CHECKS[:1])
    hires("doctor", "launcher=slurm", "--nodes", "3", "launcher.partition=gpu", "--patience", "9")
    [(config, argv, patience_s)] = seen
    launcher = config.launcher
    assert (launcher.name, launcher.nodes, launcher.partition) == ("slurm", 3, "gpu")
    assert (argv[:3], patience_s) == (["hires", "doctor", "launcher=slurm"], 9)
    assert hires("doctor", "--nodes", "0").code == 2


def test_cheap_checks_pass_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checks = doctor_checks.machine_checks(Path("results"), nodes=1)
    assert [check for check in checks if check.state == "failed"] == []
    assert not list(tmp_path.iterdir())  # what was written to try the disk is gone


@pytest.mark.parametrize(
    ("flags", "state", "words"),
    [
        ({"avx2"}, "warning", "instructions for fp32 only, none for fp16 and bf16 and int8"),
        ({"avx_vnni"}, "warning", "instructions for int8, none for fp16 and bf16"),
        ({"amx_bf16", "avx512_vnni"}, "ok", "instructions for bf16 and int8, none for fp16"),
        (set(), "ok", "does not show"),
    ],
)
def test_precisions_that_the_cpu_emulates_are_named(monkeypatch, flags, state, words):
    monkeypatch.setattr(checks, "cpu_flags", lambda: flags)
    monkeypatch.setattr(doctor_checks, "cpu_flags", lambda: flags)
    check = doctor_checks._instructions()
    assert check.state == state
    assert words in check.text
    assert ("no avx512_bf16, amx_bf16: bf16 saves memory" in check.remedy) is (state == "warning")


def test_package_that_is_missing_is_named(monkeypatch):
    def version(name):
        if name == "tifffile":
            raise doctor_checks.metadata.PackageNotFoundError
        return "1"

    monkeypatch.setattr(doctor_checks.metadata, "version", version)
    check = doctor_checks._packages()
    assert (check.state, check.text) == ("failed", "tifffile missing")


def test_checkout_without_an_install_is_no_failure(monkeypatch):
    def requires(name):
        raise doctor_checks.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor_checks.metadata, "requires", requires)
    check = doctor_checks._packages()
    assert (check.state, "checkout" in check.text) == ("warning", True)


def test_folder_that_takes_nothing_is_a_failure(tmp_path, monkeypatch):
    def refuse(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(doctor_checks, "write_rate", refuse)
    check = doctor_checks._results(tmp_path)
    assert check.state == "failed"
    assert "No space left on device" in check.text


def test_slow_disk_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_checks, "write_rate", lambda folder: 1e6)
    check = doctor_checks._results(tmp_path / "not" / "made" / "yet")
    assert (check.state, "checkpoint.every" in check.remedy) == ("warning", True)


@pytest.mark.parametrize(("ahead_s", "state"), [(0.1, "ok"), (-90.0, "warning")])
def test_clock_of_another_time_is_warned_of(tmp_path, monkeypatch, ahead_s, state):
    clock = doctor_checks.heartbeat.file_clock
    monkeypatch.setattr(doctor_checks.heartbeat, "file_clock", lambda where: clock(where) + ahead_s)
    assert doctor_checks._clock(tmp_path).state == state


@pytest.mark.parametrize(("nodes", "state"), [(1, "ok"), (2, "warning")])
def test_loopback_name_matters_where_there_are_several_nodes(monkeypatch, nodes, state):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    check = doctor_checks._address(nodes)
    assert check.state == state
    assert ("launcher.interface" in check.remedy) == (nodes == 2)


def test_check_that_breaks_is_a_line_of_the_answer():
    def broken() -> Check:
        raise OSError("gone")

    check = doctor_checks.guarded("results", broken)
    assert (check.name, check.state) == ("results", "failed")
    assert "gone" in check.text


def test_torch_that_cannot_be_imported_is_one_line(monkeypatch):
    monkeypatch.setattr(doctor_checks, "_TORCH", "raise ImportError('libtorch.so is broken')")
    [check] = doctor_checks.torch_checks()
    assert check.state == "failed"
    assert check.text == "ImportError: libtorch.so is broken"
    assert check.remedy


def test_gpus_that_are_no_peers_and_a_torch_without_nccl_are_warned_of():
    told = {"devices": ["H200", "H200"], "cuda": "12.8", "nccl": None, "apart": [[0, 1]]}
    found = {check.name: check for check in doctor_checks._gpus(told)}
    assert {name: check.state for name, check in found.items()} == {
        "cuda": "ok",
        "nccl": "warning",
        "peers": "warning",
    }
    assert "1 of 2 pairs of GPUs do not, as 0 and 1" in found["peers"].text


@pytest.mark.parametrize(
    ("cuda", "cards", "driver", "files", "visible", "state", "words"),
    [
        (None, 0, None, 0, None, "ok", "this torch is for CPUs"),
        (None, 2, "570.86", 2, None, "warning", "has 2 NVIDIA GPUs, and this torch is for CPUs"),
        ("13.0", 0, None, 0, None, "ok", "has no NVIDIA GPU"),
        ("13.0", 1, None, 0, None, "warning", "has 1 NVIDIA GPU and no NVIDIA driver"),
        ("13.0", 1, "570.86", 0, None, "warning", "is shown no GPU"),
        ("13.0", 1, "570.86", 1, "", "warning", "CUDA_VISIBLE_DEVICES='' hides all 1 GPUs"),
        (None, 0, "570.86", 0, None, "warning", "has NVIDIA GPUs, and this torch is for CPUs"),
        ("13.0", 1, "570.86", 1, None, "warning", "driver 570.86 is older than 580.65, which CUDA"),
        ("12.8", 1, "570.86", 1, None, "warning", "CUDA 12.8 of torch finds none"),
    ],
)
def test_reason_why_torch_finds_no_gpu(
    monkeypatch, cuda, cards, driver, files, visible, state, words
):
    monkeypatch.setattr(gpus, "cards", lambda: cards)
    monkeypatch.setattr(gpus, "driver", lambda: driver)
    monkeypatch.setattr(gpus, "device_files", lambda: files)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    facts = {"devices": [], "cuda": cuda, "nccl": None, "apart": []}
    [check] = doctor_checks._gpus(facts)
    assert check.state == state
    assert words in check.text
    assert bool(check.remedy) == (state != "ok")


def test_wsl_shows_its_gpu_by_the_library_of_windows(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "_DEV", tmp_path)
    monkeypatch.setattr(gpus, "_WSL", tmp_path)
    monkeypatch.setattr(gpus, "driver", lambda: None)
    monkeypatch.setattr(gpus, "cards", lambda: 0)
    (tmp_path / "dxg").touch()
    facts = {"devices": [], "cuda": "13.0", "nccl": None, "apart": []}
    [check] = doctor_checks._gpus(facts)
    assert "this is WSL2, and the driver of Windows shows it no GPU" in check.text
    assert "`wsl --update`" in check.remedy
    (tmp_path / "libcuda.so.1").touch()
    assert gpus.device_files() == 1
    [check] = doctor_checks._gpus({**facts, "cuda": None})
    assert "this torch is for CPUs" in check.text
    assert check.state == "warning"


@pytest.mark.dist
def test_torch_of_this_machine_passes():
    assert {check.state for check in doctor_checks.torch_checks()} <= {"ok", "warning"}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("mpirun (Open MPI) 4.1.4", "Open MPI"),
        ("HYDRA build details: Version 4.0.2", "MPICH"),
        ("MVAPICH Version: 3.0, MPICH ABI", "MVAPICH"),
        ("MVAPICH2-GDR Version : 2.3.7", "MVAPICH"),
        ("MVAPICH-Plus Version: 3.0", "MVAPICH"),
        ("Intel(R) MPI Library 2021.13 for Linux* OS", "Intel MPI"),
        ("something else", None),
    ],
)
def test_family_of_an_mpi(text, name):
    assert doctor_checks.family(text) == name


@pytest.mark.parametrize(
    ("offered", "state"), [("none\n\tpmi2\n\tpmix", "ok"), ("none\n\tpmi2", "warning")]
)
def test_open_mpi_pairs_with_pmix_only(commands, offered, state):
    commands("srun", f'printf "MPI plugin types are...\\n\\t{offered}\\n"')
    commands("mpirun", 'echo "mpirun (Open MPI) 5.0.1"')
    checks = {check.name: check for check in doctor_checks.mpi_checks()}
    assert checks["pmi"].state == state
    assert checks["mpirun"].text.startswith("mpirun (Open MPI) 5.0.1 at ")
    assert ("pmix" in checks["pmi"].remedy) == (state == "warning")


def test_mpi4py_of_another_mpi_than_mpirun_is_warned_of():
    facts = Facts("MPICH Version: 4.2", "4.1", "multiple")
    check = doctor_checks._mpi4py(facts, "mpirun (Open MPI) 5.0.1")
    assert (check.state, "mpicc" in check.remedy) == ("warning", True)
    check = doctor_checks._mpi4py(facts, "HYDRA build details: Version 4.2")
    assert (check.state, check.text) == (
        "ok",
        "loads MPICH Version: 4.2 (MPI 4.1, threads: multiple)",
    )
    check = doctor_checks._mpi4py(facts._replace(threads="funneled"), "")
    assert (check.state, "take turns" in check.remedy) == ("warning", True)
    assert doctor_checks._mpi4py("it finds none", "mpirun (Open MPI) 5.0.1").state == "warning"
    assert doctor_checks._mpi4py("it finds none", "").state == "ok"
    assert doctor_checks._mpi4py(None, "").state == "ok"


def test_memory_of_gpus_is_said_beside_a_gpu(monkeypatch):
    facts = Facts("MVAPICH2 Version : 2.3.7", "3.1", "multiple", GpuSupport(False, False))
    monkeypatch.setattr(gpus, "device_files", lambda: 0)
    assert "memory of GPUs" not in doctor_checks._mpi4py(facts, "").text
    monkeypatch.setattr(gpus, "device_files", lambda: 4)
    text = doctor_checks._mpi4py(facts, "").text
    assert "memory of GPUs: no, which MVAPICH2-GDR or MVAPICH-Plus with comm.options.gpu" in text
    facts = facts._replace(name="Open MPI v5.0.1", gpus=GpuSupport(True, False))
    assert "memory of GPUs: messages only" in doctor_checks._mpi4py(facts, "").text
