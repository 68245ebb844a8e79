"""Values of a sweep are split, joined, paired and read from a file as whoever typed them means."""

from __future__ import annotations

import itertools

import pytest

from hires.cli.axes import MOST_POINTS, axes_of, stored_sweep
from hires.cli.choices import groups
from hires.cli.compose_config import Composer
from hires.cli.overrides import checked
from hires.core.errors import ConfigError


def points(*words: str, zipped: tuple[str, ...] = ()) -> list[list[str]]:
    steps = [axis.steps for axis in axes_of(words, zipped, groups())]
    return [[word for step in point for word in step] for point in itertools.product(*steps)]


def refusal(*words: str, zipped: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        axes_of(words, zipped, groups())
    return str(caught.value)


def test_first_key_changes_slowest_and_zipped_keys_change_together_in_the_place_of_the_first():
    assert points("image=512,1024", "batch=4", "precision=fp32,bf16") == [
        ["image=512", "batch=4", "precision=fp32"],
        ["image=512", "batch=4", "precision=bf16"],
        ["image=1024", "batch=4", "precision=fp32"],
        ["image=1024", "batch=4", "precision=bf16"],
    ]
    assert points("image=64,96", "precision=fp32", "batch=8,4", zipped=("image,batch",)) == [
        ["image=64", "batch=8", "precision=fp32"],
        ["image=96", "batch=4", "precision=fp32"],
    ]


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("model.args={a:1,b:2},{a:3}", ["{a:1,b:2}", "{a:3}"]),
        ("data.path='it\\'s','x,y'", ["'it\\'s'", "'x,y'"]),
        ("batch=range(2,9,3)", ["2", "5", "8"]),
        ("parallel=gems+sp,sp", ["sp+gems", "sp"]),
        ("model=glob(resnet1?)", ["resnet18"]),
        ("parallel.balance=null,[1,2]", ["null", "[1,2]"]),
    ],
)
def test_values_of_one_word(word, values):
    key = word.partition("=")[0]
    assert points(word) == [[f"{key}={value}"] for value in values]


def test_odd_texts_are_values_that_come_back_unchanged():
    composer = Composer()
    for text in ("/tmp/$(touch x)", "a;b", "`x`", "it's", 'say "hi"', "a)b", "tail\\'"):
        [[word]] = points(f"data.path={text}")
        assert composer.composed([word])[0]["data"]["path"].endswith(text)
    assert points("data.path='/a$(x)','/b;y'") == [["data.path='/a$(x)'"], ["data.path='/b;y'"]]
    for words in points("parallel=sp,pp", "model.args.x=1,2", "~data", "data.path='a b',c"):
        assert checked(words, groups())  # words that one run takes


@pytest.mark.parametrize(
    ("words", "zipped", "meant"),
    [
        (["seed=1,2"], ("seed",), "name two or more"),
        (["parallel=sp,spp", "bogus=1,2"], (), "unknown key 'bogus'"),  # all wrong ones at once
        (["batch=interval(1,2)"], (), "use range() or commas"),
        (["batch=range(2,2)"], (), "holds no value"),
        (["data.path=/a$(x),/b$(y)"], (), "put each value"),
        (["batch=1,2", "image=1,2,3"], ("batch,image",), "batch 2, image 3"),
        (["batch=1,2"], ("batch,image",), "'image' is given no values"),
        (["seed=range(0,1000)", "steps=range(3,1000)"], (), f"{MOST_POINTS} is the most"),
        (["optimizer.lr=range(0.0,1e9,1e-9)"], (), "larger step"),
    ],
)
def test_mistakes_say_what_would_work(words, zipped, meant):
    assert meant in refusal(*words, zipped=zipped)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("- image=64\n", "must hold keys, one a line, as `overrides: [model=resnet18]`"),
        ("overrides: [experiment=other]\n", "none may"),
        ("repeats: 3\n", "did you mean repeat"),
        ("overrides: [\n", "line 2: this is no YAML"),
    ],
)
def test_mistake_in_the_file_names_it(tmp_path, text, meant):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"mine\.yaml") as caught:
        stored_sweep(["experiment=mine"], tmp_path)
    assert meant in str(caught.value)
