"""Do imports point right, as docs/ARCHITECTURE.md draws it, and is the front end free of torch?"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "hires"

# Packages that each package may import, all of its imports counted, lazy ones too.
CORE = {"core"}
DATA = CORE | {"data"}
PLAN = DATA | {"quant", "plan"}
PARALLEL = PLAN | {"nets", "comm", "parallel"}
ALLOWED = {
    "core": CORE,
    "data": DATA,
    "quant": CORE | {"quant"},
    "plan": PLAN,
    "launcher": PLAN | {"launcher"},
    "report": PLAN | {"report"},
    "cli": PLAN | {"launcher", "report", "cli"},
    "__main__": {"cli"},
    "nets": PLAN | {"nets"},
    "torch_backend": PLAN | {"comm"},
    "comm": PLAN | {"comm"},
    "parallel": PARALLEL,
    "engine": PARALLEL | {"engine"},
    "adapters": PARALLEL | {"engine", "adapters"},
    "bench": PARALLEL | {"engine", "bench"},
    "worker": PARALLEL | {"engine", "bench", "worker"},
}
FRONT = ("core", "data", "plan", "launcher", "report", "cli", "__main__")
"""Packages that must not need torch."""
WORKER_WITHOUT = ("hydra", "omegaconf", "rich")
"""What no rank may need: the worker stack reads the frozen config with the dataclasses alone."""


def modules(*packages: str) -> Iterator[Path]:
    for package in packages:
        single = PACKAGE / f"{package}.py"
        yield from [single] if single.exists() else sorted((PACKAGE / package).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yields line and dotted name of every import, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def test_every_package_has_a_layer():
    names = {path.name for path in PACKAGE.iterdir() if list(path.glob("*.py"))}
    names |= {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert names <= set(ALLOWED)


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_point_right(package):
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {package} must not import {name}"
        for path in modules(package)
        for line, name in imports(path)
        if name.startswith("hires.")
        and name.split(".")[1] not in ALLOWED[package] | {"__version__", "conf", "launch"}
    ]
    assert not wrong, "\n".join(wrong)


def test_front_end_imports_no_torch_not_even_lazily():
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in modules(*FRONT)
        for line, name in imports(path)
        if name.split(".")[0] in ("torch", "torchvision")
    ]
    assert not wrong, "\n".join(wrong)


def test_ranks_need_neither_hydra_nor_rich():
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for package in set(ALLOWED) - {"cli", "__main__"}
        for path in modules(package)
        for line, name in imports(path)
        if name.split(".")[0] in WORKER_WITHOUT
    ]
    assert not wrong, "\n".join(wrong)


def test_whole_front_end_starts_where_there_is_no_torch(python):
    names = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in modules(*(name for name in FRONT if name != "__main__"))
    ]
    # None in sys.modules makes an import fail as if the package were not installed.
    script = (
        "import importlib, sys\n"
        "sys.modules['torch'] = None\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name.removesuffix('.__init__'))\n"
        "from hires.cli.main import main\n"
        "sys.exit(main(['run', 'parallel=sp+lp', '--cfg', 'job']))\n"
    )
    answer = python("-c", script)
    assert answer.code == 0, answer.err
    assert "name: sp+lp" in answer.out


@pytest.mark.parametrize("words", [["--help"], ["list"], ["run", "--cfg", "job"]])
def test_no_verb_imports_torch(python, words):
    script = (
        "import sys\n"
        "from hires.cli.main import main\n"
        f"main({words!r})\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert python("-c", script).code == 0


def test_only_the_command_line_and_scripts_print():
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for package in set(ALLOWED) - {"cli"}
        for path in modules(package)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    ]
    assert not wrong, "\n".join(wrong)


def test_supervisor_of_ranks_starts_without_numpy(python):
    """Every run, and every run of a job array, waited a tenth of a second for it."""
    code = (
        "import sys\n"
        "import hires.launcher.local.local_launcher, hires.launcher.slurm.batch\n"
        "sys.exit('numpy' in sys.modules)\n"
    )
    assert python("-c", code).code == 0
