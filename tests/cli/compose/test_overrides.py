"""Is every mistake on the command line answered with what would work?"""

from __future__ import annotations

import pytest

from hires.cli.compose.compose_config import compose
from hires.cli.compose.overrides import checked
from hires.core.errors import ConfigError


def answer(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(list(words))
    text = str(caught.value)
    assert "\n" not in text
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize(
    ("word", "key", "meant"),
    [
        ("paralel=sp", "'paralel'", "did you mean parallel?"),
        ("parallel.tils=[2,2]", "'parallel.tils'", "did you mean parallel.tiles?"),
        ("tiles=[2,2]", "'tiles'", "did you mean parallel.tiles?"),
        ("task.lr=0.1", "'task.lr'", "did you mean optimizer.lr?"),
        ("Batch=4", "'Batch'", "did you mean batch?"),
        ("+stepz=4", "'stepz'", "did you mean steps?"),
        ("~paralell", "'paralell'", "did you mean parallel?"),
        ("hydra.run.dir=x", "'hydra.run.dir'", "hires list keys"),
        ("num_spatial_parts=4", "'num_spatial_parts'", "hires calls it parallel.tiles"),
        ("slice_method=square", "'slice_method'", "hires calls it parallel.tiles"),
    ],
)
def test_misspelt_key_is_answered_with_the_nearest(word, key, meant):
    text = answer(word)
    assert f"unknown key {key}" in text
    assert meant in text


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("model=resnet51", "resnet50"),
        ("model=ResNet50", "did you mean resnet50?"),
        ("precision=fp8", "bf16"),
        ("parallel=spp", "sp+pp"),
        ("task=Train", "did you mean train?"),
        ("comm=ncc", "did you mean nccl?"),
        ("parallel=", "choose one of"),
        ("parallel=null", "choose one of"),
    ],
)
def test_misspelt_group_value_is_answered_with_the_choices(word, meant):
    text = answer(word)
    assert f"unknown {word.split('=')[0]}" in text
    assert meant in text


def test_stray_part_of_a_layout_that_is_not_there_yet():
    text = answer("parallel=sp", "fsdp")
    assert "parallel=sp+fsdp" in text
    assert "fsdp is not available" in text


def test_all_words_that_are_wrong_are_told_at_once():
    text = answer("bogus=1", "paralell=sp", "batch=8")
    assert "bogus" in text
    assert "paralell" in text


def test_parts_of_a_layout_may_come_in_any_order():
    known = {"parallel": {"sp+gems+dp": "", "gems": ""}}
    assert checked(["parallel=dp+gems+sp"], known) == ["parallel=sp+gems+dp"]


@pytest.mark.parametrize(
    "words",
    [("parallel=sp", "pp"), ("parallel=sp pp",), ("parallel=[sp,pp]",), ("parallel=sp,pp",)],
)
def test_parts_of_a_layout_are_joined_with_plus(words):
    assert "write parallel=sp+pp" in answer(*words)


@pytest.mark.parametrize(
    ("word", "must_be"),
    [
        ("steps=abc", "steps must be a whole number"),
        ("steps=2.5", "steps must be a whole number"),
        ("batch=null", "batch must be a whole number"),
        ("campaign=x\x1b[31my", "has the control character '\\x1b'; leave it out"),
        ("optimizer.lr=fast", "optimizer.lr must be a number, as optimizer.lr="),
        ("data.shuffle=maybe", "data.shuffle must be true or false"),
        ("parallel.tiles=2", "parallel.tiles=2 must be [rows, cols]"),
        ("parallel.tiles=[a,b]", "must be [rows, cols], each at least 1, as [2,2]"),
        ("data.path=[a]", "data.path must be text"),
        ("image=abc", "image='abc' must be a whole number of pixels"),
    ],
)
def test_wrong_type_says_what_is_wanted(word, must_be):
    text = answer(word)
    assert must_be in text
    assert word.split("=")[0] in text


def test_comma_in_a_list_asks_for_brackets():
    assert "'parallel.tiles=[2,2]'" in answer("parallel.tiles=2,2")
    assert "'image=[75,61]'" in answer("image=75,61")


def test_comma_elsewhere_is_no_sweep():
    assert "one run takes one" in answer("batch=2,4")


def test_list_that_the_shell_has_cut():
    assert "'parallel.tiles=[2,2]'" in answer("parallel.tiles=[2,", "2]")
    assert "not closed" in answer("parallel.tiles=[2,")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("steps", "write steps=VALUE"),
        ("sp", "did you mean parallel=sp?"),
        ("nonsense", "write key=value"),
        ("=3", "write key=value"),
        ("parallel.=3", "unknown key"),
    ],
)
def test_word_without_value(word, meant):
    assert meant in answer(word)


def test_folder_given_as_the_kind_of_data(tmp_path):
    assert f"data=folder data.path={tmp_path}" in answer(f"data={tmp_path}")


@pytest.mark.parametrize("word", ["data.path=${nope}", "data.path=${oc.env:HIRES_NOT_SET}"])
def test_reference_to_something_unset(word):
    assert "nope" in answer(word).lower() or "HIRES_NOT_SET" in answer(word)


def test_custom_network_without_target():
    assert "model.target=package.module:function" in answer("model=custom")
