"""Checks which MPI is here, and whether it pairs with the launcher of its ranks.

An MPI library learns from its launcher, over PMI or PMIx, which rank it is. If the two do not pair,
every process is rank 0 of 1.
"""

from __future__ import annotations

import re
import shutil
from importlib import util

from hires.cli.doctor.machine_checks import python
from hires.launcher.doctor_check import OK, WARNING, Check, ask, last

_LIBRARY = "from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0].strip())"
_FAMILIES = (
    ("Open MPI", r"open ?mpi|open-?rte|prte"),
    ("MVAPICH", r"mvapich"),
    ("Intel MPI", r"intel"),
    ("MPICH", r"mpich|hydra"),
)
"""The first that matches counts: MVAPICH and Intel MPI call themselves MPICH, too."""
_PAIRS = {"Open MPI": ("pmix",), "MVAPICH": ("pmi2", "pmix"), "MPICH": ("pmi2", "pmix")}
"""Plug-ins of srun that serve each of them, the best first."""
_PAIRS["Intel MPI"] = ("pmi2", "pmix")


def mpi_checks() -> list[Check]:
    """Returns the lines about MPI; a machine without any is fine."""
    launcher, library = _launcher(), _library()
    return [_mpirun(launcher), _mpi4py(library, launcher), *_pmi(library or launcher)]


def family(text: str) -> str | None:
    """Returns which MPI a version's text is of; None if it is none that is known."""
    for name, words in _FAMILIES:
        if re.search(words, text, re.IGNORECASE):
            return name
    return None


def plugins(text: str) -> list[str]:
    r"""Returns the plug-ins that ``srun --mpi=list`` names.

    >>> plugins("MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix_v4\n")
    ['none', 'pmi2', 'pmix_v4']
    """
    words = [line.strip() for line in text.splitlines() if line[:1].isspace()]
    words += re.findall(r"^srun:\s+(\w+)$", text, re.MULTILINE)
    return sorted({word for word in words if re.fullmatch(r"\w+", word)})


def _launcher() -> str:
    """Returns the first line of what mpirun says about itself; empty: there is none."""
    code, text = ask("mpirun", "--version", most_s=30)
    lines = text.strip().splitlines()
    return lines[0] if lines and code == 0 else ""


def _library() -> str | None:
    """Returns the library of mpi4py; None: there is no mpi4py; empty: it cannot be loaded."""
    if util.find_spec("mpi4py") is None:
        return None
    code, text = python(_LIBRARY)
    return last(text) if code == 0 else ""


def _mpirun(launcher: str) -> Check:
    where = shutil.which("mpirun")
    if where is None:
        return Check("mpirun", OK, "not here; launcher=mpirun needs one, nothing else does")
    return Check("mpirun", OK, f"{launcher or 'of an unknown kind'} at {where}")


def _mpi4py(library: str | None, launcher: str) -> Check:
    """Whether mpi4py is of the same MPI as mpirun."""
    if library is None:
        return Check("mpi4py", OK, "not here; only the backend mpi needs it")
    if not library:
        remedy = "load the site's MPI (module load ...), then pip install --no-binary mpi4py mpi4py"
        return Check("mpi4py", WARNING, "it is here and finds no MPI library", remedy)
    ours, theirs = family(library), family(launcher)
    if launcher and ours != theirs:
        text = f"it speaks {library}, and mpirun is of {launcher}"
        remedy = "build mpi4py with that mpirun's mpicc, or put the other mpirun first on PATH"
        return Check("mpi4py", WARNING, text, remedy)
    return Check("mpi4py", OK, library)


def _pmi(mpi: str) -> list[Check]:
    code, text = ask("srun", "--mpi=list", most_s=30)
    if code == 127:
        return []
    offered = plugins(text)
    summary = f"srun offers {', '.join(offered) or 'nothing'}"
    kind = family(mpi)
    if kind is None:
        return [Check("pmi", OK, f"{summary}; there is no MPI here to pair with")]
    wanted = _PAIRS[kind]
    match = next((o for w in wanted for o in offered if o.startswith(w)), None)
    if match is not None:
        return [Check("pmi", OK, f"{summary}; {kind} pairs with --mpi={match}")]
    remedy = (
        f"start ranks with mpirun, or install Slurm's plug-in {wanted[0]} (then --mpi={wanted[0]})"
    )
    return [Check("pmi", WARNING, f"{summary}; {kind} needs {' or '.join(wanted)}", remedy)]
