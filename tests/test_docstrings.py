"""Do the examples in docstrings return what they show?"""

from __future__ import annotations

import doctest
import importlib

import pytest

from tests.conftest import REPOSITORY

MODULES = [
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
    for path in sorted((REPOSITORY / "hires").rglob("*.py"))
    if ">>>" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_return_what_they_show(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted
    assert not result.failed
