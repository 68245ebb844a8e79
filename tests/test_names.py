"""Names stand once: of modules, of classes, of the files of a run folder. No cycle of modules."""

from __future__ import annotations

import ast
import collections
from pathlib import Path

from hires.core.store import file_names

PACKAGE = Path(__file__).resolve().parents[1] / "hires"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


OTHER_MEANING = {
    "cli/compose/choices.py": "conf/config.yaml",  # of conf/, which is Hydra's
    "cli/compose/compose_config.py": "config.yaml",
}


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_file_name_stands_twice():
    names = collections.Counter(path.name for path in FILES)
    twice = {name for name, count in names.items() if count > 1}
    assert twice == {"__init__.py", "__main__.py"}


def test_no_class_name_stands_twice():
    names = collections.Counter(
        node.name for tree in TREES.values() for node in tree.body if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, count in names.items() if count > 1]


def test_files_of_a_run_folder_are_named_in_one_module():
    names = {
        value
        for key, value in vars(file_names).items()
        if key.isupper() and isinstance(value, str) and "." in value
    }
    assert {"exit.json", "config.yaml", "index.jsonl"} <= names
    spelled = []
    for path, tree in TREES.items():
        where = str(path.relative_to(PACKAGE))
        for node in ast.walk(tree):
            if where == "core/store/file_names.py" or not isinstance(node, ast.Constant):
                continue
            text = str(node.value)
            # A file name alone or at the end of a path; a sentence may mention one.
            is_name = " " not in text and text.rpartition("/")[2] in names
            if is_name and OTHER_MEANING.get(where) != text:
                spelled.append(f"{where}:{node.lineno}: {text}")
    assert spelled == []


def test_no_two_modules_import_each_other():
    names = {module_of(path) for path in FILES}
    edges = {module_of(path): imported(tree, names) for path, tree in TREES.items()}
    # Modules of one strongly connected component reach each other (Tarjan, 1972).
    assert not [part for part in components(edges) if len(part) > 1]


def imported(tree: ast.Module, names: set[str]) -> set[str]:
    """Returns the modules of the package that a module imports, wherever the import stands."""
    found = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & names
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found |= {inner if inner in names else node.module} & names
    return found


def components(edges: dict[str, set[str]]) -> list[list[str]]:
    """Returns the strongly connected components of a graph."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    parts: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(edges[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            parts.append(stack[at:])
            del stack[at:]

    for name in edges:
        if name not in index:
            visit(name)
    return parts
