"""Scripts of torch.distributed run unchanged with ``init_process_group("hires")``.

Over gloo they leave the bits of torch's own gloo; over memory and MPI what rounding allows. Under
torchrun and mpirun torch loads the backend, and the launcher numbers the ranks.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hires.core.config.launcher_config import DIALECTS, LauncherConfig
from hires.core.config.run_config import RunConfig
from hires.core.ranks import mpi_library, mpi_starter
from tests.helpers.mpi_ranks import run_mpi
from tests.helpers.patience import PATIENCE_S
from tests.helpers.pool import preload
from tests.helpers.ranks import run_ranks
from tests.helpers.torch_scripts import SCRIPTS, leave_early, run_scripts

ROOT = Path(__file__).resolve().parents[2]
preload("tests.helpers.torch_scripts")
OF_GLOO = {"operations": ["all_reduce", "all_gather", "send"], "route": "gloo"}
IN_MEMORY = {"format": 2, "rules": [OF_GLOO], "default": "shm"}
SMALL = {"operations": ["all_reduce"], "max_bytes": 512, "route": "mpi"}
OF_MPI = {"operations": ["broadcast", "all_to_all"], "route": "mpi"}
BY_SIZE = {"format": 2, "rules": [SMALL, OF_MPI], "default": "gloo"}


def failures(answers: list[dict[str, str]]) -> dict[str, list[str]]:
    """Returns what scripts raised on any rank, or where they differ."""
    wrong = {name: [one[name] for one in answers if one[name]] for name in answers[0]}
    return {name: texts for name, texts in wrong.items() if texts}


@pytest.mark.dist
def test_scripts_over_gloo_leave_the_bits_of_torchs_own():
    answers = run_ranks(run_scripts, 3, "gloo", True)
    assert failures(answers) == {}
    assert answers[0].keys() == {*SCRIPTS}


@pytest.mark.dist
def test_scripts_are_right_over_shared_memory_and_gloo(tmp_path: Path):
    (tmp_path / "table.json").write_text(json.dumps(IN_MEMORY))
    given = "", False, "", str(tmp_path / "table.json")
    assert failures(run_ranks(run_scripts, 2, *given)) == {}


@pytest.mark.mpi
def test_scripts_are_right_over_two_backends_by_size(mpi, tmp_path):
    (tmp_path / "table.json").write_text(json.dumps(BY_SIZE))
    places = f"file://{tmp_path}/store", str(tmp_path / "table.json")
    answers = run_mpi(mpi, run_scripts, 2, "", False, *places, folder=tmp_path)
    assert failures(answers) == {}


MEETS = """
import torch.distributed as dist
from hires import torch_backend
torch_backend.register()
try:
    dist.init_process_group("gloo")
except ValueError as error:
    print(error)
print(dist.rendezvous.__globals__["_rendezvous_handlers"]["env"])
"""


@pytest.mark.parametrize("backends", ["", "gloo"])
def test_program_that_does_not_use_hires_meets_as_torch_does(backends: str):
    """Its error named hires wherever that is installed."""
    others = ("RANK", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    environ = {key: value for key, value in os.environ.items() if key not in others}
    environ |= {"PYTHONPATH": str(ROOT), "HIRES_COMM_BACKENDS": backends}
    command = [sys.executable, "-c", MEETS]
    said = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    assert "RANK" in said
    assert ("hires" in said) == bool(backends)


# ---- under a launcher


def examples(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


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


def started(
    words: list[str], text: str, environ: dict[str, str], folder: Path
) -> subprocess.CompletedProcess:
    path = folder / "script.py"
    path.write_text(text)
    return subprocess.run(
        [*words, str(path)],
        env=environ,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.dist
def test_script_runs_under_torchrun(installed, tmp_path):
    done = started(TORCHRUN, examples("own-loop.md")[1], installed, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "trained on 2 ranks" in done.stdout
    assert "failed to bind" not in done.stderr


@pytest.mark.dist
def test_backward_pass_of_ddp_that_a_rank_leaves_ends_with_an_error():
    error, nothing = run_ranks(leave_early, 2)
    assert "rank 1" in error
    assert nothing == ""


@pytest.mark.mpi
def test_script_runs_under_mpirun_without_variables_of_torch(mpi, installed, tmp_path):
    config = RunConfig(launcher=LauncherConfig("mpirun", mpi=mpi))
    starter = mpi_starter.starter(config, mpi_starter.hosts_of(config, 2))
    environ = {**installed, **mpi_library.variables(mpi, starter.words[0], installed)}
    environ = starter.environment({**environ, "HIRES_COMM_BACKENDS": "mpi"})
    done = started(
        starter.command(environ, [sys.executable]), examples("own-loop.md")[1], environ, tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "trained on 2 ranks" in done.stdout


def under_plain_mpirun(mpi: str, script: str, folder: Path) -> subprocess.CompletedProcess:
    """Runs a script on two ranks without anything of hires around it."""
    dialect = DIALECTS[mpi]
    options = ["--oversubscribe", "--bind-to", "none"] if mpi == "openmpi" else []
    command = [dialect.programs.split()[0], *options, "-n", "2", sys.executable]
    own = {k: v for k, v in os.environ.items() if k not in ("RANK", "MASTER_ADDR", "MASTER_PORT")}
    environ = {**own, **(dialect.as_root or {}), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # Debian's MPICH needs a search path; without it the error has this line.
    environ |= mpi_library.variables(mpi, command[0], own)
    return started(command, script, environ, folder)


LATE = """
import os, time
from hires import comm
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
over = f"{os.path.dirname(__file__)}/over"
while rank == "1" and not os.path.exists(over):
    time.sleep(0.05)
try:
    comm.init(["mpi"], timeout_s=1.0)
except comm.CommError as error:
    print(error, flush=True)
open(over, "w").close()
os._exit(0)
"""


@pytest.mark.mpi
def test_rank_that_comes_late_to_a_plain_mpirun_is_waited_for_within_the_limit(mpi, tmp_path):
    """MPI itself waits for it without end, before the ranks have a store."""
    assert (
        "1 s for ranks that have not come in time" in under_plain_mpirun(mpi, LATE, tmp_path).stdout
    )


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("number", "lines"),
    [
        (0, ["rank 0 of 2: [[3.0, 3.0, 3.0]]", "rank 1 of 2: [[3.0, 3.0, 3.0]]"]),
        (1, [f"rank {rank}: ['gloo', 'mpi'] agree" for rank in (0, 1)]),
    ],
)
def test_examples_of_the_thesis_run_under_a_plain_mpirun(mpi, number, lines, tmp_path):
    done = under_plain_mpirun(mpi, examples("comm.md")[number], tmp_path)
    assert done.returncode == 0, done.stderr
    # Open MPI may print the lines of two ranks into each other: "line of rank 1line of rank 0".
    assert [done.stdout.count(line) for line in lines] == [1, 1], done.stdout
