"""Unchanged scripts, under torchrun and mpirun: torch loads the backend, the launcher numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hires.core.config.launcher_config import LauncherConfig
from hires.core.config.run_config import RunConfig
from hires.core.ranks import mpi_library, mpi_starter
from tests.helpers.patience import PATIENCE_S

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.dist

ROOT = Path(__file__).resolve().parents[2]
DYING = """\
import os, sys, torch, torch.distributed as dist, datetime
dist.init_process_group("hires", timeout=datetime.timedelta(seconds=5))
if dist.get_rank() == 1:
    os._exit(7)
try:
    dist.all_reduce(torch.ones(3))
except dist.DistBackendError as error:
    print("CAUGHT", error, flush=True)
    sys.exit(3)
"""
LAZY = """\
import torch, torch.distributed as dist
dist.init_process_group("cpu:hires")
dist.all_reduce(torch.ones(3), async_op=True)
print("left without destroy_process_group", flush=True)
"""

TWICE = """\
import torch
from hires import comm
for world in (1, 2):
    comm.init(["gloo", "shm"])
    total = torch.ones(3)
    comm.all_reduce(total)
    comm.new_group([0, 1])
    comm.shutdown()
    print("world", world, total.tolist(), flush=True)
"""


def script_of_the_docs() -> str:
    page = (ROOT / "docs/torch.md").read_text(encoding="utf-8")
    [text] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    return text


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """Returns an environment where this checkout is installed as a package."""
    info = tmp_path / "site" / "hires-0.dist-info"
    info.mkdir(parents=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [[group, entries]] = project["entry-points"].items()
    lines = "".join(f"{name} = {where}\n" for name, where in entries.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{lines}")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hires\nVersion: 0\n")
    own = {key: value for key, value in os.environ.items() if not key.startswith("HIRES_")}
    path = os.pathsep.join((str(info.parent), str(ROOT)))
    return {**own, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def torchrun(text: str, environ: dict[str, str], folder: Path) -> subprocess.CompletedProcess:
    path = folder / "script.py"
    path.write_text(text)
    options = ["--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(path)]
    return subprocess.run(
        command,
        env=environ,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.slow
def test_script_of_the_docs_runs_under_torchrun(installed: dict[str, str], tmp_path: Path):
    done = torchrun(script_of_the_docs(), installed, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "trained on 2 ranks" in done.stdout
    assert "failed to bind" not in done.stderr


@pytest.mark.slow
def test_worlds_one_after_the_other_meet_at_the_store_of_torchrun(
    installed: dict[str, str], tmp_path: Path
):
    """The agent serves it, so rank 0 must not; and it keeps what an earlier world has left."""
    done = torchrun(TWICE, installed, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "failed to bind" not in done.stderr
    assert done.stdout.count("world 2 [2.0, 2.0, 2.0]") == 2


@pytest.mark.slow
def test_rank_that_dies_is_an_error_of_torch_on_the_others(
    installed: dict[str, str], tmp_path: Path
):
    done = torchrun(DYING, installed, tmp_path)
    assert done.returncode != 0
    # torchrun ends the other rank when it sees the death; its own error may come before.
    assert "CAUGHT an all-reduce among ranks [0, 1]" in done.stdout or "SIGTERM" in done.stderr


@pytest.mark.slow
def test_script_may_end_with_messages_under_way(installed: dict[str, str], tmp_path: Path):
    done = torchrun(LAZY, installed, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("left without") == 2


@pytest.mark.mpi
@pytest.mark.parametrize("text", [script_of_the_docs(), LAZY])
def test_script_runs_under_mpirun_without_variables_of_torch(
    mpi: str, text: str, installed: dict[str, str], tmp_path: Path
):
    path = tmp_path / "script.py"
    path.write_text(text)
    config = RunConfig(launcher=LauncherConfig("mpirun", mpi=mpi))
    starter = mpi_starter.starter(config, mpi_starter.hosts_of(config, 2))
    words = starter.words[: starter.words.index(sys.executable)]
    environ = {**installed, **mpi_library.variables(mpi, words[0], installed)}
    done = subprocess.run(
        [*words, sys.executable, str(path)],
        env=starter.environment({**environ, "HIRES_COMM_BACKENDS": "mpi"}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "trained on 2 ranks" in done.stdout or done.stdout.count("left without") == 2
