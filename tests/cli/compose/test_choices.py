"""Are the words that are offered the ones that were meant?"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hires.core.registry import nearest, offer


def test_case_and_dashes_do_not_matter():
    assert nearest("SPATIAL-STAGES", ["stages", "spatial_stages"]) == ["spatial_stages"]


def test_much_worse_hits_are_left_out():
    assert nearest("resnet51", ["resnet50", "preact_resnet"]) == ["resnet50"]


def test_nothing_similar_offers_everything():
    assert offer("qqq", ["gpipe", "1f1b"]) == "choose one of gpipe, 1f1b"


@given(st.text(), st.lists(st.text(), max_size=5))
def test_offers_known_words_only(word, known):
    assert set(nearest(word, known)) <= set(known)
