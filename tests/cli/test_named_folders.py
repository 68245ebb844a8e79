"""Is a folder that an option names, and that is not there, refused by every verb?"""

from __future__ import annotations

import importlib

import pytest

from hires.cli.main import VERBS


def verbs_with(option: str) -> list[str]:
    parsers = {verb: importlib.import_module(f"hires.cli.verbs.verb_{verb}") for verb in VERBS}
    return [
        verb
        for verb, module in parsers.items()
        if option in getattr(getattr(module, "PARSER", None), "_option_string_actions", ())
    ]


@pytest.mark.parametrize("option", ["--config-dir", "--results"])
def test_verbs_take_it(option):
    assert len(verbs_with(option)) > 5


@pytest.mark.parametrize("kind", ["missing", "file", "empty"])
@pytest.mark.parametrize("verb", verbs_with("--config-dir"))
def test_folder_of_choices(hires, tmp_path, verb, kind):
    path = tmp_path / kind
    if kind == "file":
        path.write_text("")
    elif kind == "empty":
        path.mkdir()
    words = {"list": ["models"], "data": ["check", str(tmp_path)], "weights": ["show", "x"]}
    words |= {"bench": ["layouts"]}
    answer = hires(verb, *words.get(verb, []), "--config-dir", str(path))
    assert answer.code == 2
    assert f"--config-dir {path}" in answer.err


def test_folder_of_choices_of_the_variable(hires, tmp_path, monkeypatch):
    monkeypatch.setenv("HIRES_CONF", str(tmp_path / "missing"))
    answer = hires("list", "models")
    assert answer.code == 2
    assert "HIRES_CONF" in answer.err


@pytest.mark.parametrize("verb", verbs_with("--results"))
def test_folder_of_runs(hires, tmp_path, verb):
    words = {
        "compare": ["a", "b"],
        "export": ["a", "--to", "csv"],
        "list": ["runs"],
        "weights": ["show", "a"],
        "index": [],
    }
    path = tmp_path / "missing"
    answer = hires(verb, *words.get(verb, ["a"]), "--results", str(path))
    assert answer.code == 2
    assert str(path) in answer.err
