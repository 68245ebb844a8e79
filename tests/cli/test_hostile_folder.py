"""Files of the current folder that are named as libraries are never imported in their place."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hires.cli.main import VERBS
from hires.core.programs import code_command
from tests.helpers.commands import REPOSITORY
from tests.helpers.patience import PATIENCE_S

NAMES = "html torch json yaml numpy random pkgutil socket hydra PIL sitecustomize usercustomize "
NAMES += "omegaconf signal tifffile filelock typing conf"
HOSTILE = "import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\n"
NETWORK = """
from torch import nn
def net(width=4):
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                         nn.Flatten(), nn.Linear(width, 10))
"""
SMALL = ("image=[16,16]", "batch=2", "steps=2", "measure.warmup=0", "model=custom")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Returns an empty folder with a hostile file for each library, and a network."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    for name in NAMES.split():
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


def without_hires(folder: Path) -> None:
    """Removes the package that would be hires itself."""
    (folder / "hires" / "__init__.py").unlink()
    (folder / "hires").rmdir()


def test_no_verb_imports_from_the_current_folder_but_the_network_of_a_run(folder):
    """``hires plan`` executed an html.py: ``python -m`` puts the folder first in its helpers."""
    words = {
        "run": (*SMALL, "model.target=mynet:net", "parallel=sp"),  # with ranks and helpers
        "plan": (*SMALL, "model.target=html:net"),
        "data": ("make", "pictures", "--classes", "1", "--count", "1", "--size", "8x8"),
        "list": ("runs",),
        "completion": ("bash",),
    }
    lines = [[verb, *words.get(verb, ("--help",))] for verb in VERBS]
    command = f"""import sys
from hires.cli.main import main
for line in {lines!r}:
    try:
        code = main(line)
    except SystemExit as end:
        code = end.code
    print(line[0], code, file=sys.stderr)
"""
    done = run(folder, code_command(command))
    assert done.returncode == 0, done.stderr
    assert ran(folder) == []
    [exit_file] = folder.glob("results/*/*/a0/exit.json")
    assert json.loads(exit_file.read_text())["state"] == "done"
    assert f"{folder / 'html.py'} is hidden by" in done.stderr
    codes = re.findall(r"^\w+ \d$", done.stderr, re.MULTILINE)
    assert codes == [f"{verb} {2 if verb == 'plan' else 0}" for verb in VERBS]


def test_python_m_hires_typed_by_hand(folder):
    without_hires(folder)
    for module in ("hires", "hires.launcher"):
        run(folder, [sys.executable, "-m", module, "--help"])
        assert ran(folder) == []


def test_empty_entry_of_the_path_is_not_the_current_folder(folder, monkeypatch):
    """``export PYTHONPATH=$PYTHONPATH:/lib`` of a profile executed a random.py beside the data."""
    for name in ("sitecustomize", "usercustomize"):  # Python imports them before any program
        (folder / f"{name}.py").unlink()
    monkeypatch.setenv("PYTHONPATH", f":{REPOSITORY}:")
    written = "import os, sys\nprint(*sys.path, os.environ['PYTHONPATH'], sep='\\n')"
    done = run(folder, code_command("import random, json, socket\n" + written))
    assert done.returncode == 0, done.stderr
    assert str(folder) not in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1] == str(REPOSITORY)
    script = "import sys\nfrom hires.cli.main import main\nsys.exit(main())\n"  # as bin/hires is
    (folder / "bin").mkdir()
    (folder / "bin" / "hires").write_text(script)
    without_hires(folder)
    done = run(folder, [sys.executable, str(folder / "bin" / "hires"), "list"])
    assert done.returncode == 0, done.stderr
    assert ran(folder) == []
