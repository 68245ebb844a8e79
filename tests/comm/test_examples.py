"""The examples of docs/communication.md, as a user runs them: those of the thesis on MCR-DL."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hires.core.config.mpi_dialects import DIALECTS
from hires.core.ranks import mpi_library, ports
from tests.helpers.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs/communication.md").read_text(), re.S)


def started(mpi: str, script: Path) -> subprocess.CompletedProcess:
    """Runs a script with the plain command of an MPI, without anything of hires around it."""
    dialect = DIALECTS[mpi]
    options = ["--oversubscribe", "--bind-to", "none"] if mpi == "openmpi" else []
    command = [dialect.programs.split()[0], *options, "-n", "2", sys.executable, str(script)]
    own = {k: v for k, v in os.environ.items() if k not in ("RANK", "MASTER_ADDR", "MASTER_PORT")}
    environ = {**own, **(dialect.as_root or {}), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # Debian's MPICH needs a search path; without it the error has this line.
    environ |= mpi_library.variables(mpi, command[0], own)
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("number", "lines"),
    [
        (0, ["rank 0 of 2: [[3.0, 3.0, 3.0]]", "rank 1 of 2: [[3.0, 3.0, 3.0]]"]),
        (1, [f"rank {rank}: ['gloo', 'mpi'] agree" for rank in (0, 1)]),
    ],
)
def test_examples_of_the_thesis_run_under_a_plain_mpirun(
    mpi: str, number: int, lines: list[str], tmp_path: Path
):
    script = tmp_path / "example.py"
    script.write_text(EXAMPLES[number])
    ended = started(mpi, script)
    assert ended.returncode == 0, ended.stderr
    # Open MPI may print the lines of two ranks into each other: "line of rank 1line of rank 0".
    assert [ended.stdout.count(line) for line in lines] == [1, 1], ended.stdout


@pytest.mark.slow
@pytest.mark.dist
def test_one_backend_runs_with_the_variables_of_torchrun(tmp_path: Path):
    script = tmp_path / "example.py"
    script.write_text(EXAMPLES[0].replace('["mpi"]', '["gloo"]'))

    with ports.reserve(0) as port:
        facts = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        facts |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            subprocess.Popen(
                [sys.executable, str(script)],
                env={**os.environ, **facts, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        printed = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    assert printed == [f"rank {rank} of 2: [[3.0, 3.0, 3.0]]\n" for rank in range(2)]
