"""Is the source of a function of the user's found without running it?"""

from __future__ import annotations

from pathlib import Path

import pytest

from hires.core.store.own_module import module_digest


def test_source_is_found_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("raise SystemExit('was run')\n")
    (tmp_path / "package" / "losses.py").write_text("raise SystemExit('was run')\n")
    monkeypatch.chdir(tmp_path)
    first = module_digest("package.losses:mine")
    assert len(first) == 16
    (tmp_path / "package" / "losses.py").write_text("def mine(a, b): ...\n")
    assert module_digest("package.losses:mine") not in ("", first)


@pytest.mark.parametrize("target", ["nowhere.at_all:mine", "json.nowhere:mine", "sys:exit"])
def test_what_has_no_source_has_no_digest(target: str):
    assert module_digest(target) == ""
