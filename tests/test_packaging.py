"""Is the config found however hires was installed, and do the two commands keep working?"""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ("conf", "hires", "launch", "pyproject.toml", "README.md", "LICENSE")


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {pin.name.lower(): pin for pin in found}


def test_every_package_is_listed():
    listed = set(project()["tool"]["setuptools"]["packages"])
    there = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "hires").rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert listed == there | {"hires.conf", "hires.launch"}


def test_every_data_file_is_shipped():
    shipped = set()
    for package, patterns in project()["tool"]["setuptools"]["package-data"].items():
        folder = ROOT / package.replace(".", "/")
        folder = folder if folder.is_dir() else ROOT / package.removeprefix("hires.")
        shipped |= {path for pattern in patterns for path in folder.glob(pattern)}
    folders = [ROOT / name for name in ("hires", "conf", "launch")]
    files = {p for folder in folders for p in folder.rglob("*") if p.is_file()}
    assert {p for p in files if p.suffix not in (".py", ".pyc")} <= shipped


def test_pins_are_allowed_by_the_project():
    wanted = project()["project"]["dependencies"]
    extras = project()["project"]["optional-dependencies"]
    wanted += extras["dev"] + extras["networks"] + extras["peers"] + extras["recipes"]
    for requirement in map(Requirement, wanted):
        if requirement.name.lower() in pins():
            [pin] = pins()[requirement.name.lower()].specifier
            assert Version(pin.version) in requirement.specifier, requirement
    needed = {Requirement(line).name.lower() for line in project()["project"]["dependencies"]}
    assert needed <= {*pins()}
    assert str(pins()["torch"].specifier) == "==2.13.0"  # a range takes gigabytes


def test_make_installs_once_and_again_when_the_dependencies_change(tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "scripts").mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, copy)
    fake = 'mkdir -p "$2/bin"; echo installed\nprintf "#!/bin/sh\\necho ran" > "$2/bin/python"\n'
    (copy / "scripts" / "install.sh").write_text(fake + 'chmod +x "$2/bin/python"\n')

    def make_test() -> str:
        command = ["make", "-s", "--no-print-directory", "test"]
        return subprocess.run(command, cwd=copy, capture_output=True, text=True, check=True).stdout

    assert make_test() == "installed\nran\n"
    assert make_test() == "ran\n"
    later = (copy / ".venv" / ".installed").stat().st_mtime + 5
    os.utime(copy / "constraints.txt", (later, later))
    assert make_test() == "installed\nran\n"


def fake_machine(folder: Path, uid: int, ensurepip_after: str = "apt-get") -> dict[str, str]:
    """A Debian whose Python lacks ensurepip until apt-get has run; every call is noted in log."""
    log = folder / "log"
    scripts = {
        "id": f"echo {uid}",
        "apt-get": f'echo "apt-get $*" >> {log}',
        "python3": f"""
case "$*" in
*ensurepip*) [ -n "{ensurepip_after}" ] && grep -q "^{ensurepip_after}" {log} 2>/dev/null ;;
*version_info*) exec {sys.executable} "$@" ;;
"-m venv"*) mkdir -p "$4/bin"; for n in pip python; do
    printf '#!/bin/sh\\necho "pip $*" >> {log}\\n' > "$4/bin/$n"; chmod +x "$4/bin/$n"; done ;;
esac""",
    }
    (folder / "bin").mkdir()
    for name, text in scripts.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder / 'bin'}:/usr/bin:/bin"}


def install(folder: Path, environ: dict[str, str]) -> tuple[int, str, str]:
    done = subprocess.run(
        ["sh", str(ROOT / "scripts" / "install.sh"), "python3", "venv"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    log = folder / "log"
    return done.returncode, done.stderr, log.read_text() if log.exists() else ""


def test_debian_without_ensurepip_gets_it_as_root_and_else_names_the_package(tmp_path):
    (tmp_path / "user").mkdir()
    code, err, log = install(tmp_path / "user", fake_machine(tmp_path / "user", uid=1000))
    assert (code, log) == (1, "")
    assert re.search(r"sudo apt-get install python3\.\d+-venv", err)
    code, err, log = install(tmp_path, fake_machine(tmp_path, uid=0))
    assert code == 0, err
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert f"install -y -q --no-install-recommends python{version}-venv" in log
    assert "--editable .[dev] --constraint constraints.txt" in log


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what is shipped, so that building leaves nothing in the checkout."""
    tree = tmp_path / "tree"
    tree.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, tree)
    return tree


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment that sees this one's packages, so that torch is not installed again."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    [packages] = venv.glob("lib/python*/site-packages")
    # A .pth file adds the folder but not what the .pth files in it add: not this editable hires.
    (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return venv


def pip(venv: Path, *words: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "install"]
    options = ["-q", "--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed"]
    done = subprocess.run([*command, *options, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def built(tree: Path) -> Path:
    """Builds a wheel of the tree."""
    script = "from setuptools import build_meta as b; print(b.build_wheel('dist'))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return tree / "dist" / done.stdout.splitlines()[-1]


def check_installed(venv: Path, elsewhere: Path) -> None:
    """The installed command composes a config and finds the launch templates, from any folder."""
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def answer(*command: str) -> str:
        done = subprocess.run(
            command, cwd=elsewhere, env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    hires = str(venv / "bin" / "hires")
    listed = json.loads(answer(hires, "list", "--json"))
    assert {p.stem for p in (ROOT / "conf/parallel").glob("*.yaml")} <= {*listed["parallel"]}
    assert "name: sp+pp" in answer(hires, "run", "parallel=sp+pp", "--cfg", "job")
    script = (
        "import hires.conf, hires.launch; from importlib.resources import files;"
        "assert (files('hires.launch') / 'local.sh').is_file();"
        "import hires; print(hires.__file__)"
    )
    assert str(ROOT) not in answer(str(venv / "bin" / "python"), "-c", script)


@pytest.mark.slow
def test_built_wheel_finds_its_config(tree, venv, tmp_path):
    package = built(tree)
    shutil.rmtree(tree / "conf")  # nothing may be read from where it was built
    pip(venv, str(package))
    check_installed(venv, tmp_path)
