"""Is the config found however hires was installed, and do the two commands keep working?"""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.helpers.commands import REPOSITORY as ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def output(*command: str, **options) -> str:
    """Returns what a command that must end well prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_data_file_is_shipped():
    shipped = set()
    for package, patterns in PROJECT["tool"]["setuptools"]["package-data"].items():
        folder = (ROOT / package.replace(".", "/")).resolve()
        shipped |= {path for pattern in patterns for path in folder.glob(pattern)}
    files = {p for one in ("hires", "conf", "launch") for p in (ROOT / one).rglob("*")}
    assert {p for p in files if p.is_file() and p.suffix not in (".py", ".pyc")} <= shipped
    folders = {path.parent for path in files if path.suffix == ".py"}
    assert all((folder / "__init__.py").is_file() for folder in folders)


def test_pins_are_allowed_by_the_project():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pins = {pin.name.lower(): pin.specifier for pin in found}
    needed, extras = PROJECT["project"]["dependencies"], PROJECT["project"]["optional-dependencies"]
    wanted = [*needed, *extras["dev"], *extras["networks"], *extras["peers"], *extras["recipes"]]
    for requirement in map(Requirement, wanted):
        for pin in pins.get(requirement.name.lower(), ()):
            assert Version(pin.version) in requirement.specifier, requirement
    assert {Requirement(line).name.lower() for line in needed} <= {*pins}
    assert str(pins["torch"]) == "==2.13.0"  # a range takes gigabytes


def test_make_installs_once_and_again_when_the_dependencies_change(tmp_path):
    (tmp_path / "scripts").mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    fake = 'mkdir -p "$2/bin"; echo installed\nprintf "#!/bin/sh\\necho ran" > "$2/bin/python"\n'
    (tmp_path / "scripts" / "install.sh").write_text(fake + 'chmod +x "$2/bin/python"\n')
    command = ("make", "-s", "--no-print-directory", "test")
    assert output(*command, cwd=tmp_path) == "installed\nran\n"
    assert output(*command, cwd=tmp_path) == "ran\n"
    later = (tmp_path / ".venv" / ".installed").stat().st_mtime + 5
    os.utime(tmp_path / "constraints.txt", (later, later))
    assert output(*command, cwd=tmp_path) == "installed\nran\n"


CPU = "--no-deps torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize(
    ("machine", "there", "wanted"),
    [
        ({}, "", [CPU, ".[slides]"]),
        ({"nvidia-smi": "GPU 0: H100"}, "", [".[slides]"]),
        ({"nvidia-smi": "No devices were found"}, "", [CPU, ".[slides]"]),
        ({"mpirun": ""}, "", [CPU, ".[slides,mpi]"]),
        ({"nvidia-smi": "GPU 0: H100", "TORCH": "cpu"}, "", [CPU, ".[slides]"]),
        ({"TORCH": "cuda"}, "2.13.0+cpu", ["uninstall", ".[slides]"]),
        ({"TORCH": "cuda"}, "2.13.0+cu130", [".[slides]"]),
        ({"TORCH": "cuda"}, "2.12.0+cu130", ["uninstall", ".[slides]"]),
        ({"nvidia-smi": "GPU 0: H100"}, "2.13.0+cpu", [".[slides]"]),  # the one that is here stays
        ({}, "2.12.0", [CPU, ".[slides]"]),
        ({"TORCH": "gpu"}, "", "TORCH=gpu is neither cpu nor cuda"),
    ],
)
def test_installation_takes_the_torch_of_the_machine_and_an_mpi_only_where_there_is_one(
    machine: dict[str, str], there: str, wanted: list[str] | str, tmp_path: Path
):
    programs, venv = tmp_path / "programs", tmp_path / "venv" / "bin"
    venv.mkdir(parents=True)
    programs.mkdir()
    for name in ("sed", "grep", "uname"):
        (programs / name).symlink_to(shutil.which(name))
    log = tmp_path / "log"
    asked = f'case "$1" in -c) echo {there};; *) echo "$@" >> {log};; esac'
    scripts = {venv / "python": asked, venv / "pip": "", programs / "ldconfig": ""}
    environ = {"PATH": str(programs)} | {k: v for k, v in machine.items() if k == "TORCH"}
    scripts |= {programs / k: f"echo {v}" for k, v in machine.items() if k != "TORCH"}
    for path, text in scripts.items():
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    command = ("/bin/sh", "scripts/install.sh", sys.executable, str(venv.parent), "slides")
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    if isinstance(wanted, str):
        assert (done.returncode, log.exists()) == (1, False)
        assert wanted in done.stderr
        return
    assert done.returncode == 0, done.stderr
    calls = log.read_text().splitlines()
    assert len(calls) == len(wanted)
    assert all(what in f"{call} " for what, call in zip(wanted, calls, strict=True)), calls
    brings = "GB to download" in done.stdout
    stays = there.startswith("2.13.0+cu") or (there == "2.13.0+cpu" and "TORCH" not in machine)
    assert brings == (not stays)  # never without a word


@pytest.mark.slow
def test_built_wheel_finds_its_config(tmp_path):
    """The installed command composes a config and finds the launch templates, from any folder."""
    tree, venv = tmp_path / "tree", tmp_path / "venv"
    tree.mkdir()  # a copy, so that building leaves nothing in the checkout
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("conf", "hires", "launch"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    script = "from setuptools import build_meta as b; print(b.build_wheel('dist'))"
    wheel = output(sys.executable, "-W", "ignore", "-c", script, cwd=tree).splitlines()[-1]
    shutil.rmtree(tree / "conf")  # nothing may be read from where it was built
    # The environment sees this one's packages, so that torch is not installed again.
    output(sys.executable, "-m", "venv", "--without-pip", str(venv))
    [packages] = venv.glob("lib/python*/site-packages")
    # A .pth file adds the folder but not what the .pth files in it add: not this editable hires.
    (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    python, hires = (str(venv / "bin" / name) for name in ("python", "hires"))
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps")
    options = ("--no-build-isolation", "--no-index", "--ignore-installed")
    output(*pip, *options, str(tree / "dist" / wheel))
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    elsewhere = {"cwd": tmp_path, "env": environ}
    listed = json.loads(output(hires, "list", "--json", **elsewhere))
    assert {p.stem for p in (ROOT / "conf/model").glob("*.yaml")} <= {*listed["model"]}
    assert "name: sp+pp" in output(hires, "run", "parallel=sp+pp", "--cfg", "job", **elsewhere)
    script = (
        "import hires.conf, hires.launch; from importlib.resources import files;"
        "assert (files('hires.launch') / 'local.sh').is_file();"
        "import hires; print(hires.__file__)"
    )
    assert str(ROOT) not in output(python, "-c", script, **elsewhere)
