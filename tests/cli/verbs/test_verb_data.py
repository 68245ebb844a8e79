"""Does ``hires data make`` write what a run can read?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def test_folder_of_images_is_made_once(hires):
    words = ["data", "make", "my images", "--classes", "3", "--count", "6", "--size", "20x30"]
    answer = hires(*words)
    assert (answer.code, answer.err) == (0, "")
    assert "6 images of 20 x 30 in 3 classes, 6 written now" in answer.out
    assert len(list(Path("my images").glob("*/*.tif*"))) == 6
    assert "there already" in hires(*words).out


def test_no_words_show_the_help(hires, capsys):
    with pytest.raises(SystemExit) as ended:
        hires("data")
    assert ended.value.code == 0
    assert "usage: hires data" in capsys.readouterr().out


def test_json(hires):
    answer = hires("data", "make", "d", "--classes", "2", "--count", "2", "--size", "16", "--json")
    facts = json.loads(answer.out)
    assert facts["size"] == [16, 16]
    assert facts["written"] == 2


def test_slides_are_few_and_large_unless_told_otherwise(hires):
    # 64 slides of 256x256 were made, nearly all of them without a patch.
    facts = json.loads(hires("data", "make", "s", "--slides", "--classes", "2", "--json").out)
    assert (facts["count"], facts["size"], facts["written"]) == (6, [768, 1024], 6)
    answer = hires("data", "check", "s", "data=slide", "data.labels=labels.csv", "--json")
    checked = json.loads(answer.out)
    assert [one for one in checked["findings"] if one["severity"] != "note"] == []
    assert sum(checked["classes"].values()) >= 6


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--size", "big"], "write HEIGHTxWIDTH"),
        (["--size", "0x4"], "write HEIGHTxWIDTH"),
        (["--classes", "0"], "'0' must be a whole number, 1 or more"),
        (["--classes", "4", "--count", "2"], "--count 2 must be at least 4"),
        (["--count", "many"], "must be a whole number"),
        (["--seed", "-1"], "'-1' must be a whole number, 0 or more"),
        (["--cuont", "4"], "--count"),
    ],
)
def test_mistakes_exit_2_and_write_nothing(hires, words, meant):
    answer = hires("data", "make", "d", *words)
    assert answer.code == 2
    assert meant in answer.err
    assert not Path("d").exists()


def test_folder_with_something_else_in_it_is_refused(hires):
    Path("d").mkdir()
    Path("d/thesis.pdf").write_text("precious")
    answer = hires("data", "make", "d", "--count", "4", "--size", "16")
    assert answer.code == 2
    assert [file.name for file in Path("d").iterdir()] == ["thesis.pdf"]
