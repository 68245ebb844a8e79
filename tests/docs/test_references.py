"""Does every module, class or function of hires that a docstring, comment or page names exist?"""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import hires

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path for top in ("hires", "scripts") for path in (ROOT / top).rglob("*.py") if path.is_file()
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NO_PYTHON = {"hires.conf", "hires.launch"}
"""Packages of data in the wheel."""
DOTTED = re.compile(r"`+~?(hires(?:\.\w+)+)(?:\(\))?`+")
ROLE = re.compile(r":(?:mod|class|func|meth|attr|data|exc):`~?([\w.]+)`")


@functools.cache
def names_in(path: Path) -> set[str]:
    """Returns what a module defines, its classes' members as ``Class.member``."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    names = set[str]()
    for node in [inner for outer in body for inner in (outer, *_guarded(outer))]:
        names |= {*_defined(node)}
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for inner in node.body for name in _defined(inner)}
            own = [n for n in ast.walk(node) if isinstance(n, ast.Attribute)]
            names |= {f"{node.name}.{n.attr}" for n in own if ast.unparse(n.value) == "self"}
    return names


def _guarded(node: ast.stmt) -> list[ast.stmt]:
    parts = [getattr(node, part, []) for part in ("body", "orelse", "handlers")]
    return [s for part in parts for s in part] if isinstance(node, ast.If | ast.Try) else []


def _defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        targets = [inner for target in node.targets for inner in ast.walk(target)]
        yield from (inner.id for inner in targets if isinstance(inner, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (one.asname or one.name for one in node.names)


def exists(reference: str) -> bool:
    """Returns whether ``hires.x.y`` is a package, a module, or a name that a module defines."""
    parts = reference.split(".")
    for count in range(len(parts), 0, -1):
        folder = ROOT.joinpath(*parts[:count])
        for path in (folder / "__init__.py", folder.with_suffix(".py")):
            if path.is_file():
                rest = ".".join(parts[count:])
                of_library = count == 1 and hasattr(hires, rest)  # found on first use
                return not rest or rest in names_in(path) or of_library
    return False


@functools.cache
def words_of(path: Path) -> list[tuple[int, str]]:
    """Returns the strings and comments of a module that name something, with their lines."""
    text, kinds = path.read_text(encoding="utf-8"), {tokenize.STRING, tokenize.COMMENT}
    if "`" not in text:
        return []
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [(t.start[0], t.string) for t in tokens if t.type in kinds and "`" in t.string]


def test_references_of_the_code_exist():
    wrong = []
    for path in SOURCES:
        for line, text in words_of(path):
            roles = {role for role in ROLE.findall(text) if role.startswith("hires.")}
            named = {*DOTTED.findall(text)} | roles
            wrong += [f"{path.relative_to(ROOT)}:{line}: {r}" for r in named if not _known(r)]
    assert wrong == []


def _known(reference: str) -> bool:
    return (
        reference in NO_PYTHON or exists(reference) or "NAME" in reference
    )  # which stands for any


def test_short_references_name_something_that_their_file_has():
    wrong = []
    for path in SOURCES:
        own = names_in(path)
        own = own | {name.rpartition(".")[2] for name in own}  # of the docstring's class
        for line, text in words_of(path):
            for named in ROLE.findall(text):
                head = named.partition(".")[0]
                if not head:  # a module beside this one
                    known = path.with_name(f"{named[1:]}.py").is_file()
                else:
                    known = named in own or head in {"hires", "torch", *sys.stdlib_module_names}
                    known |= "." in named and head in _imported(path)
                wrong += [] if known else [f"{path.relative_to(ROOT)}:{line}: {named}"]
    assert wrong == []


@functools.cache
def _imported(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {one.name for node in nodes if isinstance(node, ast.ImportFrom) for one in node.names}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_references_of_a_page_exist(page):
    named = {*DOTTED.findall(page.read_text(encoding="utf-8"))}
    assert [one for one in sorted(named) if not _known(one)] == []


def test_what_does_not_exist_is_found():
    assert exists("hires.plan.tiling.own_rects")
    assert exists("hires.comm")
    assert not exists("hires.quant.rescaling")
    assert not exists("hires.plan.tiling.no_such_function")
