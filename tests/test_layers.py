"""Imports point right and in no circle, names stand once, and the front end is free of torch."""

from __future__ import annotations

import ast
import collections
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "hires"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)
CORE = {"core"}
DATA = CORE | {"data"}
PLAN = DATA | {"quant", "plan"}
PARALLEL = PLAN | {"nets", "comm", "losses", "parallel"}
ALLOWED = {  # what each package may import, all of its imports counted, those in functions too
    "core": CORE,
    "data": DATA,
    "quant": CORE | {"quant"},
    "plan": PLAN,
    "launcher": PLAN | {"launcher"},
    "report": PLAN | {"report"},
    "cli": PLAN | {"launcher", "report", "cli"},
    "__main__": {"cli"},
    "nets": PLAN | {"nets"},
    "networks": PLAN | {"nets", "networks"},
    "losses": PLAN | {"nets", "losses"},
    "codecs": CORE | {"codecs"},
    "metrics": CORE | {"metrics"},
    "augmentations": DATA | {"augmentations"},
    "trackers": CORE | {"trackers"},
    "backends": PLAN | {"comm", "backends"},
    "torch_backend": PLAN | {"comm"},
    "comm": PLAN | {"comm"},
    "parallel": PARALLEL,
    "operators": PARALLEL | {"operators"},  # their entries need no torch, their kernels do
    "engine": PARALLEL | {"engine"},
    "bench": PARALLEL | {"engine", "bench"},
    "worker": PARALLEL | {"engine", "bench", "worker"},
}
FRONT = ("core", "data", "plan", "launcher", "report", "cli", "__main__")


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST) -> Iterator[str]:
    """Yields the dotted name of every import but those for types."""
    if isinstance(tree, ast.expr):
        return  # holds none
    if isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.unparse(tree.test):
        return
    if isinstance(tree, ast.Import):
        yield from (alias.name for alias in tree.names)
    elif isinstance(tree, ast.ImportFrom):
        yield from (f"{tree.module}.{alias.name}" for alias in tree.names)
    for node in ast.iter_child_nodes(tree):
        yield from imports(node)


NAMES = {module_of(path) for path in FILES}


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


@pytest.fixture(scope="module")
def imported(trees) -> dict[Path, set[str]]:
    return {path: {*imports(tree)} for path, tree in trees.items()}


def test_imports_point_right(imported):
    wrong = []
    for path, names in imported.items():
        own = package_of(path)
        if own == "__init__":
            continue
        allowed = ALLOWED[own] | {"__version__", "conf", "launch"}
        # Ranks need neither Hydra nor rich, and the front end starts without torch.
        barred = set() if own in ("cli", "__main__") else {"hydra", "omegaconf", "rich"}
        barred |= {"torch", "torchvision"} if own in FRONT else set()
        for name in names:
            top, _, rest = name.partition(".")
            if top in barred or (
                name.startswith("hires.") and rest.partition(".")[0] not in allowed
            ):
                wrong.append(f"{path.relative_to(PACKAGE)}: {name}")
    assert wrong == []


def test_no_modules_import_each_other(imported):
    edges = {}
    for path, names in imported.items():
        found = {name if name in NAMES else name.rpartition(".")[0] for name in names} & NAMES
        edges[module_of(path)] = found - {module_of(path)}
    graphlib.TopologicalSorter(edges).prepare()  # CycleError names a circle


def test_names_of_files_and_classes_stand_once(trees):
    files = collections.Counter(path.name for path in FILES)
    assert {name for name, n in files.items() if n > 1} == {"__init__.py", "__main__.py"}
    classes = collections.Counter(
        node.name for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in classes.items() if count > 1] == []


def test_front_end_starts_where_there_is_no_torch(python):
    names = [module_of(path) for path in FILES if package_of(path) in FRONT[:-1]]
    # None in sys.modules makes an import fail as if the package were not installed.
    script = (
        "import importlib, sys\n"
        "sys.modules['torch'] = None\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "from hires.cli.main import main\n"
        "sys.exit(main(['run', 'parallel=sp+lp', '--cfg', 'job']))\n"
    )
    answer = python("-c", script)
    assert answer.code == 0, answer.err
    assert "name: sp+lp" in answer.out


@pytest.mark.parametrize(
    ("module", "barred"),
    [
        ("hires.cli.main", "torch"),
        # Every run, and every run of a job array, waited a tenth of a second for it.
        ("hires.launcher.launch_attempt, hires.launcher.slurm.job", "numpy"),
        # Half of the start of a rank, and 80 MiB.
        ("hires.worker", "torch._dynamo"),
    ],
)
def test_commands_start_without_what_takes_long_to_import(python, module, barred):
    run = "hires.cli.main.main(['list']); " if module == "hires.cli.main" else ""
    code = f"import sys, {module}; {run}sys.exit({barred!r} in sys.modules)"
    assert python("-c", code).code == 0
