"""Does every feature that the docs claim for hires.comm have a test that exists?"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/comm-features.md").read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")][1:]
OPEN = "not yet"


def test_table_has_a_row_for_each_feature():
    assert len(ROWS) >= 15
    assert all(len(row) >= 4 for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_feature_has_tests_that_exist(row: list[str]):
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row[-1])
    assert named or row[1] == OPEN
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in functions, path
