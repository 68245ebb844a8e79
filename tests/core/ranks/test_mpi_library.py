"""A rank loads the library of the MPI that starts it, wherever that lies."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hires.core import programs
from hires.core.programs import code_command
from hires.core.ranks import mpi_library


@pytest.fixture
def home(tmp_path: Path, monkeypatch) -> Path:
    """A machine without any MPI but what a test puts into the folder of this name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(mpi_library.sys, "prefix", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(mpi_library.shutil, "which", _only(tmp_path))
    (tmp_path / "home/bin").mkdir(parents=True)
    (tmp_path / "home/lib").mkdir()
    return tmp_path / "home"


def _only(folder: Path):
    def which(name: str, path: str | None = None) -> str | None:
        found = Path(name)
        return name if found.is_relative_to(folder) and found.exists() else None

    return which


def program(home: Path) -> str:
    path = home / "bin/mpirun"
    path.write_text("#!/bin/sh\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_library_beside_the_program_comes_before_others(home: Path, tmp_path: Path):
    (home / "lib/libmpi.so.40").touch()
    other = tmp_path / "other"
    other.mkdir()
    (other / "libmpi.so.40").touch()
    (other / "libmpi.so.12").touch()
    environ = {"LD_LIBRARY_PATH": f"/nowhere:{other}"}
    variables = mpi_library.variables("openmpi", program(home), environ)
    assert variables == {"MPI4PY_LIBMPI": str(home / "lib/libmpi.so.40")}
    # The other one's is none of Open MPI's.
    variables = mpi_library.variables("mpich", program(home), environ)
    assert variables == {"MPI4PY_LIBMPI": str(other / "libmpi.so.12")}
    assert mpi_library.variables("srun", program(home), environ) == {}


def test_library_under_another_name_gets_a_link(home: Path):
    # Debian's; mpi4py's extension finds libmpi.so.12 only, by the name of the file.
    library = home / "lib/libmpich.so.12"
    library.touch()
    for _ in range(2):
        variables = mpi_library.variables("mpich", program(home), {"LD_LIBRARY_PATH": "/a:/b"})
        assert variables["MPI4PY_LIBMPI"] == "libmpi.so.12"
        first, *rest = variables["LD_LIBRARY_PATH"].split(os.pathsep)
        assert rest == ["/a", "/b"]
        assert [path.resolve() for path in Path(first).iterdir()] == [library.resolve()]


def test_machine_without_mpi_names_what_would_help():
    environ = {**os.environ, "MPI4PY_LIBMPI": "/nowhere/libmpi.so.40"}
    pytest.importorskip("mpi4py")
    command = code_command("from hires.core.ranks.mpi_library import load; load()")
    done = programs.run(*command, most_s=60.0, environ=environ)
    assert "mpi4py finds no MPI library" in done.stderr
    assert "set MPI4PY_LIBMPI to the path" in done.stderr
