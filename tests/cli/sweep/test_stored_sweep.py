"""Is a stored sweep read as it was written, and is every mistake in it named?"""

from __future__ import annotations

from pathlib import Path

import pytest

from hires.cli.sweep.axes import stored_sweep
from hires.core.errors import ConfigError


def store(folder: Path, text: str) -> None:
    (folder / "experiment").mkdir(exist_ok=True)
    (folder / "experiment" / "mine.yaml").write_text(text)


def test_words_and_options_come_out(tmp_path):
    store(tmp_path, "overrides: [image=64]\nmax-parallel: 2\nwhere: batch < 4\nzip: ['a,b']\n")
    words, stored = stored_sweep(["batch=2", "experiment=mine", "--x"], tmp_path)
    assert words == ["batch=2", "--x"]
    assert stored.words == ["image=64"]
    assert stored.options == {"max_parallel": 2, "where": "batch < 4", "zip": ["a,b"]}


def test_without_an_experiment_nothing_is_stored():
    words, stored = stored_sweep(["batch=2"], None)
    assert (words, stored.words, stored.options) == (["batch=2"], [], {})


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("- image=64\n", "must hold keys, one a line, as `overrides: [model=resnet18]`"),
        ("overrides: image=64\n", "a list of words"),
        ("overrides: [1]\n", "a list of words"),
        ("overrides: [experiment=other]\n", "none may"),
        ("repeats: 3\n", "did you mean repeat"),
        ("repeat: yes\n", "wrong type"),
        ("repeat: three\n", "wrong type"),
        ("zip: a,b\n", "wrong type"),
        ("overrides: [\n", "line 2: this is no YAML"),
    ],
)
def test_mistake_in_the_file_names_it(tmp_path, text, meant):
    store(tmp_path, text)
    with pytest.raises(ConfigError, match=r"mine\.yaml") as caught:
        stored_sweep(["experiment=mine"], tmp_path)
    assert meant in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["experiment=layuots"], "did you mean layouts?"),
        (["experiment=layouts,other"], "a sweep has one"),
        (["experiment=layouts", "experiment=other"], "a sweep has one"),
    ],
)
def test_experiment_that_is_not_there(words, meant):
    with pytest.raises(ConfigError) as caught:
        stored_sweep(words, None)
    assert meant in str(caught.value)
