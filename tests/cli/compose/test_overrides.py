"""Every mistake on the command line is answered with the key, the value and what would work."""

from __future__ import annotations

import pytest

from hires.cli.compose.compose_config import compose
from hires.cli.compose.overrides import checked
from hires.core.errors import ConfigError

MISTAKES = [
    # misspelt keys
    ("paralel=sp", "unknown key 'paralel'; did you mean parallel?"),
    ("num_spatial_parts=4", "hires calls it parallel.tiles"),
    ("bogus=1|paralell=sp", "unknown key 'paralell'"),  # all of them at once
    # misspelt choices
    ("parallel=sp|fsdp", "fsdp is not available"),
    # values of a wrong type
    ("campaign=x\x1b[31my", "has the control character '\\x1b'; leave it out"),
    ("data.shuffle=maybe", "data.shuffle must be true or false"),
    ("parallel.tiles=2", "parallel.tiles=2 must be [rows, cols]"),
    # lists and commas
    ("parallel.tiles=2,2", "'parallel.tiles=[2,2]'"),
    ("batch=2,4", "one run takes one"),
    ("parallel.tiles=[2,|2]", "'parallel.tiles=[2,2]'"),
    # words without a value
    ("steps", "write steps=VALUE"),
    ("data=/tmp", "data=folder data.path=/tmp"),
    ("data.path=${oc.env:HIRES_NOT_SET}", "HIRES_NOT_SET"),
]


@pytest.mark.parametrize(("words", "text"), MISTAKES)
def test_mistake_is_one_paragraph_with_a_remedy(words, text):
    with pytest.raises(ConfigError) as caught:
        compose(words.split("|"))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parts_of_a_layout_may_come_in_any_order():
    known = {"parallel": {"sp+gems+dp": "", "gems": ""}}
    for words in ("dp+gems+sp", "gems+sp+dp", "sp+gems+dp"):
        assert checked([f"parallel={words}"], known) == ["parallel=sp+gems+dp"]
