"""Values of a sweep are split, joined, paired and read from a file as whoever typed them means."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from hires.cli.compose.choices import groups
from hires.cli.compose.compose_config import Composer
from hires.cli.compose.overrides import checked
from hires.cli.sweep.axes import MOST_POINTS, axes_of, stored_sweep
from hires.core.errors import ConfigError


def points(*words: str, zipped: tuple[str, ...] = ()) -> list[list[str]]:
    steps = [axis.steps for axis in axes_of(words, zipped, groups())]
    return [[word for step in point for word in step] for point in itertools.product(*steps)]


def answer(*words: str, zipped: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        axes_of(words, zipped, groups())
    return str(caught.value)


def test_product_whose_first_key_changes_slowest():
    assert points("image=512,1024", "batch=4", "precision=fp32,bf16") == [
        ["image=512", "batch=4", "precision=fp32"],
        ["image=512", "batch=4", "precision=bf16"],
        ["image=1024", "batch=4", "precision=fp32"],
        ["image=1024", "batch=4", "precision=bf16"],
    ]


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("image=[480,640],512", ["[480,640]", "512"]),
        ("parallel.tiles=[2,2],[4,1]", ["[2,2]", "[4,1]"]),
        ("parallel.tiles=[[2,2],[1,2]],[2,1]", ["[[2,2],[1,2]]", "[2,1]"]),
        ("model.args={a:1,b:2},{a:3}", ["{a:1,b:2}", "{a:3}"]),
        ("data.path='a,b','c d'", ["'a,b'", "'c d'"]),
        ("data.path='it\\'s','x'", ["'it\\'s'", "'x'"]),
        ("batch=range(2,9,3)", ["2", "5", "8"]),
        ("batch=choice(4,8)", ["4", "8"]),
        ("seed=1,1,2", ["1", "2"]),
        ("parallel=gems+sp,sp", ["sp+gems", "sp"]),
        ("model=glob(resnet1?)", ["resnet18"]),
        ("parallel.balance=null,[1,2]", ["null", "[1,2]"]),
    ],
)
def test_values_of_one_word(word, values):
    key = word.partition("=")[0]
    assert points(word) == [[f"{key}={value}"] for value in values]


def test_odd_texts_are_values_that_come_back_unchanged():
    for text in ("/tmp/$(touch x)", "a;b", "`x`", "it's", "a\nb", 'say "hi"', "a)b", "tail\\'"):
        [[word]] = points(f"data.path={text}")
        assert Composer().composed([word])[0]["data"]["path"].endswith(text)
    # With a comma they need quotes.
    assert "put each value" in answer("data.path=/a$(x),/b$(y)")
    assert points("data.path='/a$(x)','/b;y'") == [["data.path='/a$(x)'"], ["data.path='/b;y'"]]
    for words in points("parallel=sp,pp", "model.args.x=1,2", "~data", "data.path='a b',c"):
        assert checked(words, groups())  # words that one run takes


def test_every_wrong_value_is_told_at_once():
    text = answer("parallel=sp,spp", "bogus=1,2", "model=resnet18,resnet19")
    assert "unknown parallel 'spp'" in text
    assert "unknown key 'bogus'" in text
    assert "unknown model 'resnet19'" in text


@pytest.mark.parametrize(
    ("words", "zipped", "meant"),
    [
        (["campaign=a,b"], (), "it has one"),
        (["batch=interval(1,2)"], (), "use range() or commas"),
        (["batch=range(1,2,0)"], (), "no values"),
        (["batch=range(2,2)"], (), "holds no value"),
        (["model=glob(nothing*)"], (), "fits no choice"),
        (["batch=1,2", "image=1,2,3"], ("batch,image",), "batch 2, image 3"),
        (["batch=1,2"], ("batch,image",), "'image' is given no values"),
        (["batch=1,2"], ("batch",), "name two or more"),
        ([], ("batch,image",), "write them as batch=1,2"),
        (["parallel=sp", "pp"], (), "is not an override"),
        (["image=[1,2"], (), "bracket"),
        (["experiment=layouts"], (), "hires sweep experiment="),
    ],
)
def test_mistakes_say_what_would_work(words, zipped, meant):
    assert meant in answer(*words, zipped=zipped)


def test_more_points_than_anybody_waits_for_are_refused_at_once():
    assert f"{MOST_POINTS} is the most" in answer("seed=range(0,1000)", "steps=range(3,1000)")
    assert "larger step" in answer("seed=range(0,1000000000)")
    assert "larger step" in answer("optimizer.lr=range(0.0,1e9,1e-9)")


def test_zipped_keys_change_together_in_the_place_of_the_first():
    made = points("image=64,96", "precision=fp32,bf16", "batch=8,4", zipped=("image,batch",))
    assert made == [
        ["image=64", "batch=8", "precision=fp32"],
        ["image=64", "batch=8", "precision=bf16"],
        ["image=96", "batch=4", "precision=fp32"],
        ["image=96", "batch=4", "precision=bf16"],
    ]


def store(folder: Path, text: str) -> None:
    (folder / "experiment").mkdir(exist_ok=True)
    (folder / "experiment" / "mine.yaml").write_text(text)


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
