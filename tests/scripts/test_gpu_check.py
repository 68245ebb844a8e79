"""Does the check of a GPU run where there is nothing but torch, and does it report what failed?"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest

from hires.bench import gpu_bench
from hires.bench.gpu_runs import FAMILIES
from hires.core.errors import RunError
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
    assert "rehearsal" in str(found["device"])
    [row] = found["checks"]
    assert (row["section"], row["check"], row["state"]) == ("parity", "sp", "ok")
    assert re.match(r"output \S+e-1\d of 1e-10, gradients \S+ of 1e-10", row["found"])


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(900)
def test_whole_rehearsal_passes(bare, tmp_path):
    words = ("--device", "simulated", "--layouts", "single,sp,gathered", "--images", "32")
    code, found, messages = check(bare, tmp_path / "out", *words)
    assert code == 0, messages
    states = {(row["section"], row["check"]): row["state"] for row in found["checks"]}
    assert {section for section, _ in states} == set(gpu_bench.PARTS) - {"speed"}
    without_cuda = [name for name, state in states.items() if state == "not run"]
    assert len(without_cuda) == 2 + 3, "tf32, NCCL, and the memory of three layouts"
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
        (float("inf"), gpu_bench.NotRunError("no CUDA"), "not run"),
        (0.0, True, "not run"),
    ],
)
def test_line_says_what_became_of_a_check(section, deadline_s, found, state):
    assert section(deadline_s, found)["state"] == state


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
