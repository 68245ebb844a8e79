"""Does the check of a GPU run where there is nothing but torch, and does it report what failed?"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import venv
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest

from hires.bench import gpu_bench, gpu_runs, gpu_tensorrt
from hires.bench.gpu_runs import FAMILIES
from hires.core.config.quant_config import LINEAR
from hires.core.errors import ConfigError, LateError, RunError
from hires.core.ranks import gpus

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "scripts/gpu_check.py")


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> str:
    """A Python that has torch, numpy, safetensors, what these need, and not hires."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    [site] = folder.glob("lib/python*/site-packages")
    wanted, seen = ["torch", "numpy", "safetensors"], set()
    while wanted:
        name = wanted.pop()
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # of another system
            continue
        if package.metadata["Name"] in seen:
            continue
        seen.add(package.metadata["Name"])
        for file in package.files or ():
            top = Path(str(package.locate_file(file.parts[0])))
            if file.parts[0] != ".." and top.exists() and not (site / top.name).exists():
                (site / top.name).symlink_to(top)
        required = [line for line in package.requires or () if "extra ==" not in line]
        wanted += [re.split(r"[^\w.-]", line)[0] for line in required]
    return str(folder / "bin/python")


def check(python: str, out: Path, *words: str) -> tuple[int, dict[str, object], str]:
    """Returns exit code, ``gpu.json`` and messages of the script."""
    command = [python, "-W", "ignore", SCRIPT, "--out", str(out), *words]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=500, cwd=out.parent, check=False
    )
    file = out / "gpu.json"
    return ended.returncode, json.loads(file.read_text()) if file.exists() else {}, ended.stderr


@pytest.mark.dist
@pytest.mark.timeout(300)
def test_rehearsal_needs_torch_alone(bare, tmp_path):
    for name in ("yaml", "hydra", "omegaconf", "PIL", "hires"):
        code = f"import importlib.util as u; raise SystemExit(u.find_spec({name!r}) is not None)"
        assert subprocess.run([bare, "-c", code], cwd="/", check=False).returncode == 0, name
    words = ("--device", "simulated", "--only", "parity", "--layouts", "sp")
    code, found, messages = check(bare, tmp_path / "out", *words)
    assert code == 0, messages
    assert found["complete"]
    assert found["ok"]
    assert str(found["command"]).startswith("python3 scripts/gpu_check.py --out ")
    assert "rehearsal" in str(found["device"])
    [row] = found["checks"]
    assert (row["section"], row["check"], row["state"]) == ("parity", "sp", "ok")
    assert re.match(r"output \S+e-1\d of 1e-10, gradients \S+ of 1e-10", row["details"])


@pytest.mark.dist
@pytest.mark.timeout(300)
def test_run_that_was_frozen_elsewhere_needs_torch_alone(bare, tmp_path):
    keys = ("device=simulated", "parallel=sp", "image=40", "batch=4", "steps=4", "precision=bf16")
    command = [sys.executable, "-m", "hires", "run", "--dry-run", "model=resnet18", *keys]
    subprocess.run([*command, f"results={tmp_path}/results"], check=True, cwd=tmp_path)
    [folder] = tmp_path.glob("results/*/*")
    words = ("--device", "simulated", "--only", "runs", "--runs", str(folder.parent))
    code, found, messages = check(bare, tmp_path / "out", *words)
    assert code == 0, messages
    [row] = found["checks"]
    assert (row["section"], row["check"], row["state"]) == ("runs", folder.name, "ok")
    assert re.match(r"losses of 4 steps differ from the CPU by \S+ of \S+", row["details"])
    assert not [*folder.glob("a*")]


def test_folder_that_holds_no_run_is_a_wrong_option(tmp_path):
    words = ("--device", "cpu", "--only", "runs", "--runs", str(tmp_path))
    code, _, messages = check(sys.executable, tmp_path / "out", *words)
    assert code == 2
    assert "is no run folder and holds none" in messages


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(900)
def test_whole_rehearsal_passes(bare, tmp_path):
    words = ("--device", "simulated", "--layouts", "single,sp,gathered", "--images", "32")
    code, found, messages = check(bare, tmp_path / "out", *words)
    assert code == 0, messages
    states = {(row["section"], row["check"]): row["state"] for row in found["checks"]}
    assert {section for section, _ in states} == set(gpu_bench.PARTS) - {"runs", "speed"}
    not_run = Counter(section for (section, _), state in states.items() if state == "not run")
    # tf32, int8 kernels, four layouts' engines in three precisions; NCCL called directly on
    # one and two GPUs; three layouts' memory
    # and the thesis's four rows.
    assert not_run == {"precision": 1 + 1 + 4 * 3, "streams": 2, "memory": 3 + 4}
    assert found["speed"]


@pytest.fixture
def section():
    """Makes the lines of one check, without ranks."""
    options = gpu_bench.GpuOptions("cpu")

    def lines(deadline_s: float, found: object) -> dict[str, str]:
        def run() -> tuple[bool, str]:
            if isinstance(found, Exception):
                raise found
            return found, "text"

        return gpu_bench.GpuCheck(options, None, deadline_s).row("parity", "sp", run)

    return lines


@pytest.mark.parametrize(
    ("deadline_s", "found", "state"),
    [
        (float("inf"), True, "ok"),
        (float("inf"), False, "FAILED"),
        (float("inf"), RunError("rank 1 failed"), "FAILED"),
        (float("inf"), KeyError("worst"), "FAILED"),
        (float("inf"), gpu_bench.NotRunError("no CUDA"), "not run"),
        (0.0, True, "not run"),
    ],
)
def test_line_says_what_became_of_a_check(section, deadline_s, found, state):
    assert section(deadline_s, found)["state"] == state


def test_first_check_of_every_section_comes_first():
    checks = [*gpu_bench.in_turn(gpu_bench.GpuCheck(gpu_bench.GpuOptions("cpu"), None, 0.0))]
    sections = [check.section for check in checks]
    others = [section for section in gpu_bench.SECTIONS if section != "runs"]
    assert {*others} == {*gpu_bench.PARTS} - {"runs", "speed"}
    assert sections[: 2 * len(others)] == [*others, *others]
    layouts, names = gpu_tensorrt.LAYOUTS, gpu_tensorrt.PRECISIONS
    engines = [f"TensorRT, {name}, {layout}" for layout in layouts for name in names]
    networks = [f"int8 in two tiles, {linear} linear layers" for linear in LINEAR]
    precisions = (*gpu_bench.PRECISIONS, gpu_bench.INT8_KERNELS, *networks, *engines)
    for section, names in (("parity", FAMILIES), ("precision", precisions)):
        assert [check.name for check in checks if check.section == section] == [*names]


def test_no_section_takes_the_time_of_the_others(monkeypatch):
    clock_s, ends_s = [1000.0], []

    def lasts(section: str, seconds: float) -> object:
        def run() -> tuple[bool, str]:
            clock_s[0] += seconds
            return True, ""

        def checks(check: gpu_bench.GpuCheck) -> object:
            ends_s.append(check.runs.ends_s - gpu_bench.GRACE_S)
            return (gpu_bench.PendingCheck(section, str(n), run) for n in range(13))

        return checks

    def speed(check: gpu_bench.GpuCheck) -> list[object]:
        ends_s.append(check.deadline_s)
        return []

    seconds = {"parity": 12.0, "resume": 9.0, "memory": 5.0}
    monkeypatch.setattr(time, "monotonic", lambda: clock_s[0])
    sections = {name: lasts(name, took) for name, took in seconds.items()}
    monkeypatch.setattr(gpu_bench, "SECTIONS", sections)
    monkeypatch.setattr(gpu_bench, "speed", speed)
    options = gpu_bench.GpuOptions("cpu", only=(*seconds, "speed"), seconds=100.0)
    *_, result = gpu_bench.measure(options)
    ran = Counter(row["section"] for row in result["checks"] if row["state"] == "ok")
    assert ran == {"parity": 3, "resume": 2, "memory": 3}
    assert len(result["checks"]) == 13 * 3
    # 30 % are left for speed, and no check lasts into them.
    assert clock_s[0] <= 1070.0
    assert sorted(ends_s) == [1070.0, 1070.0, 1070.0, 1100.0]
    titles = [table.rows for table in gpu_bench._tables(result)]
    assert [row["section"] for row in titles[0]] == [name for name in seconds for _ in range(13)]


def test_check_that_is_stopped_at_the_end_is_not_run(tmp_path):
    def late() -> tuple[bool, str]:
        raise LateError("it was not done after 20 s")

    states = {}
    for ends_s in (0.0, float("inf")):
        runs = gpu_bench.Runs(tmp_path, "cpu", ends_s=ends_s)
        check = gpu_bench.GpuCheck(gpu_bench.GpuOptions("cpu"), runs, float("inf"))
        states[ends_s] = check.row("parity", "sp", late)["state"]
    assert states == {0.0: "not run", float("inf"): "FAILED"}


def test_run_is_stopped_at_the_end_of_all_checks(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    runs = gpu_bench.Runs(tmp_path, "cpu", 300.0, ends_s=1100.0)
    assert (runs.left_s(), runs.left_s(50.0)) == (100.0, 50.0)
    assert gpu_bench.Runs(tmp_path, "cpu", 300.0).left_s() == 300.0
    assert gpu_bench.Runs(tmp_path, "cpu", 300.0, ends_s=900.0).left_s() == 0.0
    limits = []
    monkeypatch.setattr(gpu_runs, "run_program", lambda *args: limits.append(args[-1]))
    runs.launch(gpu_runs.RunDir(tmp_path / "run", 0))
    assert limits == [100.0]


def test_default_check_ends_within_eight_minutes():
    assert gpu_bench.GpuOptions("cpu").seconds + gpu_runs.GRACE_S < 480


def test_section_of_runs_needs_runs(tmp_path):
    with pytest.raises(ConfigError, match="--only runs needs run folders; add --runs DIR"):
        gpu_bench.GpuOptions("cpu", only=("runs",))
    with pytest.raises(ConfigError, match="add runs to --only"):
        gpu_bench.GpuOptions("cpu", only=("parity",), runs=(str(tmp_path),))


def test_summary_counts_states():
    rows = [{"state": state} for state in ("ok", "ok", "not run")]
    found = {"device": "a GPU", "checks": rows, "speed": [{"state": "not run: time"}], "ok": True}
    assert gpu_bench._facts(found) == ["device: a GPU", "no check failed: 2 ok, 2 not run"]
    failed = {**found, "ok": False, "checks": [{"state": "FAILED"}], "speed": []}
    assert gpu_bench._facts(failed)[1] == "AT LEAST ONE CHECK FAILED: 1 FAILED"


def test_speed_that_crashes_after_the_end_is_a_failure(monkeypatch):
    def crash(speed: object) -> object:
        raise RunError("rank 0 failed")

    monkeypatch.setattr(gpu_bench, "speeds", crash)
    [row] = gpu_bench.speed(gpu_bench.GpuCheck(gpu_bench.GpuOptions("cpu"), None, 0.0))
    assert (row["state"], row["details"]) == ("FAILED", "rank 0 failed")


def test_ranks_that_share_a_gpu_are_planned(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "device_files", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    runs = gpu_bench.Runs(tmp_path, "cuda")
    run = runs.freeze(runs.config("c", FAMILIES["sp grid"]))
    plan = json.loads((Path(run) / "plan.json").read_text())
    assert (plan["device"], plan["backend"]) == ("cuda", "gloo")


def test_every_family_of_layouts_is_planned():
    runs = gpu_bench.Runs(Path("nowhere"), "cpu")
    layouts = {name: runs.config("c", changes).parallel for name, changes in FAMILIES.items()}
    assert max(layout.num_ranks for layout in layouts.values()) <= 4
    assert {layout.num_ranks for layout in layouts.values()} >= {1, 2, 3, 4}


def test_without_a_gpu_the_check_says_so(tmp_path):
    code, found, messages = check(sys.executable, tmp_path / "out", "--only", "parity")
    assert (code, found) == (2, {})
    assert "--device cuda: " in messages
    assert "rehearsal" in messages
