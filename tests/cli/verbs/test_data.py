"""``hires data`` makes what a run can read, once, and says of images what a run would refuse."""

from __future__ import annotations

import json
from pathlib import Path


def test_folder_of_images_is_made_once_and_checked(hires):
    words = ["data", "make", "my images", "--classes", "3", "--count", "6", "--size", "20x30"]
    answer = hires(*words)
    assert (answer.code, answer.err) == (0, "")
    assert "6 images of 20 x 30 in 3 classes, 6 written now" in answer.out
    assert len(list(Path("my images").glob("*/*.tif*"))) == 6
    assert "there already" in hires(*words).out
    answer = hires("data", "check", "my images", "--json")
    assert (answer.code, sum(json.loads(answer.out)["classes"].values())) == (0, 6)
    next(Path("my images").glob("*/*.tif*")).write_bytes(b"II*\0")
    answer = hires("data", "check", "my images", "--json")
    assert (answer.code, json.loads(answer.out)["ok"]) == (1, False)


def test_mistakes_end_with_2_and_write_nothing(hires):
    Path("d").mkdir()
    Path("d/thesis.pdf").write_text("precious")
    for words, text in (
        (["--size", "big"], "write HEIGHTxWIDTH"),
        (["--classes", "4", "--count", "2"], "--count 2 must be at least 4"),
        (["image=4"], "image=4 is a key, which hires data make does not take"),
        (["--count", "4", "--size", "16"], "d"),
    ):
        answer = hires("data", "make", "d", *words)
        assert (answer.code, text in answer.err) == (2, True)
    assert [file.name for file in Path("d").iterdir()] == ["thesis.pdf"]
