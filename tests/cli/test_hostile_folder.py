"""Files of the current folder that are named as libraries are never imported in their place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hires.cli.main import VERBS
from hires.core.python_command import code_command, module_command
from tests.helpers.patience import PATIENCE_S
from tests.helpers.slurm_runs import REPOSITORY

NAMES = (
    *("html", "torch", "json", "yaml", "numpy", "random", "pkgutil", "socket", "hydra", "PIL"),
    *(
        "sitecustomize",
        "usercustomize",
        "omegaconf",
        "signal",
        "tifffile",
        "filelock",
        "typing",
        "conf",
    ),
)
HOSTILE = "import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\n"
NETWORK = """
from torch import nn
def net(width=4):
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                         nn.Flatten(), nn.Linear(width, 10))
"""
SMALL = ("image=[16,16]", "batch=2", "steps=2", "measure.warmup=0")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Returns an empty folder with a hostile file for each library, and a network."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(HOSTILE)
    (tmp_path / "hires").mkdir()
    (tmp_path / "hires" / "__init__.py").write_text(HOSTILE)
    (tmp_path / "mynet.py").write_text(NETWORK)
    return tmp_path


def ran(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.ran"))


def run(folder: Path, command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )


def test_no_verb_imports_from_the_current_folder(folder):
    """``hires plan`` executed an html.py: ``python -m`` puts the folder first in its helpers."""
    words = {
        "plan": SMALL,
        "verify": ("--help",),
        "run": (*SMALL, "--dry-run"),
        "data": ("make", "pictures", "--classes", "1", "--count", "1", "--size", "8x8"),
        "list": ("runs",),
        "doctor": ("--help",),
        "bench": ("--help",),
        "completion": ("bash",),
    }
    command = "import sys\nfrom hires.cli.main import main\n"
    command += "".join(
        f"print({verb!r}, main({[verb, *words.get(verb, ('--help',))]!r}))\n" for verb in VERBS
    )
    done = run(folder, code_command(command))
    assert ran(folder) == []
    assert done.returncode == 0, done.stderr


def test_python_m_hires_typed_by_hand(folder):
    (folder / "hires" / "__init__.py").unlink()  # the folder would be hires itself
    (folder / "hires").rmdir()
    for module in ("hires", "hires.report.tables", "hires.launcher.local"):
        run(folder, [sys.executable, "-m", module, "--help"])
        assert ran(folder) == []


def test_a_run_with_a_network_of_the_folder(folder):
    """Its ranks and helpers import the network, and nothing in the place of a library."""
    words = ["run", *SMALL, "model=custom", "model.target=mynet:net", "parallel=sp", "--json"]
    done = run(folder, module_command("hires", *words))
    assert done.returncode == 0, done.stderr
    assert ran(folder) == []
    [exit_file] = folder.glob("results/*/*/a0/exit.json")
    assert json.loads(exit_file.read_text())["state"] == "done"


def test_network_named_as_a_library_is_explained(folder):
    done = run(
        folder, module_command("hires", "plan", *SMALL, "model=custom", "model.target=html:net")
    )
    assert done.returncode == 2
    assert f"{folder / 'html.py'} is hidden by" in done.stderr
    assert ran(folder) == []


WRITTEN = "import sys; print(*sys.path, sep='\\n'); import os; print(os.environ['PYTHONPATH'])"


@pytest.fixture
def dirty(folder, monkeypatch):
    """Returns the hostile folder, which an empty entry of PYTHONPATH names."""
    for name in ("sitecustomize", "usercustomize"):  # Python imports them before any program
        (folder / f"{name}.py").unlink()
    monkeypatch.setenv("PYTHONPATH", f":{REPOSITORY}:")
    return folder


def test_empty_entry_of_the_path_is_not_the_current_folder(dirty):
    """``export PYTHONPATH=$PYTHONPATH:/lib`` of a profile executed a random.py beside the data."""
    script = "import sys\nfrom hires.cli.main import main\nsys.exit(main())\n"  # as bin/hires is
    (dirty / "bin").mkdir()
    (dirty / "bin" / "hires").write_text(script)
    (dirty / "hires" / "__init__.py").unlink()
    (dirty / "hires").rmdir()  # else it is hires itself
    done = run(dirty, [sys.executable, str(dirty / "bin" / "hires"), "plan", *SMALL])
    assert done.returncode == 0, done.stderr
    assert ran(dirty) == []


def test_code_gets_no_empty_entry(dirty):
    """It may be named hires, too: the path is clean before anything is imported from it."""
    done = run(dirty, code_command("import random, json, socket\n" + WRITTEN))
    assert done.returncode == 0, done.stderr
    assert ran(dirty) == []
    assert str(dirty) not in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1] == str(REPOSITORY)
