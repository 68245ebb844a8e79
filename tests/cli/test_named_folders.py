"""Is a folder that an option names, and that is not there, refused by every verb?"""

from __future__ import annotations

import pytest

from hires.cli.main import VERBS, module_of

WORDS = {
    "list": ["runs"],
    "data": ["check", "."],
    "weights": ["show", "x"],
    "bench": ["layouts"],
    "compare": ["a", "b"],
    "export": ["a", "--to", "csv"],
}


def verbs_with(option: str) -> list[str]:
    parsers = {verb: getattr(module_of(verb), "PARSER", None) for verb in VERBS}
    return [v for v, one in parsers.items() if option in getattr(one, "_option_string_actions", ())]


@pytest.mark.parametrize("verb", verbs_with("--config-dir"))
def test_folder_of_choices(hires, tmp_path, verb):
    words = [verb, *WORDS.get(verb, [])]
    path = tmp_path / "empty"
    for _ in range(2):  # missing, then empty
        answer = hires(*words, "--config-dir", str(path))
        assert (answer.code, f"--config-dir {path}" in answer.err) == (2, True)
        path.mkdir(exist_ok=True)


def test_folder_of_choices_of_the_variable(hires, tmp_path, monkeypatch):
    monkeypatch.setenv("HIRES_CONF", str(tmp_path / "missing"))
    answer = hires("list", "models")
    assert (answer.code, "HIRES_CONF" in answer.err) == (2, True)


@pytest.mark.parametrize("verb", verbs_with("--results"))
def test_folder_of_runs(hires, tmp_path, verb):
    path = tmp_path / "missing"
    answer = hires(verb, *WORDS.get(verb, ["a"]), "--results", str(path))
    assert (answer.code, str(path) in answer.err) == (2, True)


def test_verbs_take_them():
    assert min(len(verbs_with(option)) for option in ("--config-dir", "--results")) > 5
