"""An expression of ``--where`` keeps what it says, and executes nothing else."""

from __future__ import annotations

import pytest

from hires.cli.choices import groups
from hires.cli.compose_config import compose
from hires.cli.expression import Expression
from hires.cli.sweep_points import Where
from hires.core.errors import ConfigError

CONFIG = compose(
    ["image=512", "batch=8", "parallel=sp", "parallel.tiles=[2,2]", "optimizer.lr=0.5"]
)
CHOICES = {"parallel": "sp", "precision": "bf16"}


def keeps(text: str, config=CONFIG) -> bool:
    return Where(text, groups()).keeps(config, CHOICES)


def test_true():
    for text in (
        "image * batch <= 4096 and not (image > 512 or batch != 8)",
        "256 < image <= 512 and ranks == 4 and height == width",
        "parallel == 'sp' and precision in ['bf16', 'fp32'] and 'sp' in parallel",
        "optimizer.lr * 2 - 1 == 0 and -batch < 0 and +batch // 3 == 2 and batch % 3 == 2",
        "data.shuffle == true and data.path == null and model.target == None",
        "not " * 120 + "true",  # deep, and yet within what Python can nest
    ):
        assert keeps(text)
        assert not keeps(f"not ({text})")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("image < 5 or parallel.stagse == 1", "did you mean parallel.stages"),
        ("parallel == sp", "text needs quotes, as 'sp'"),
        ("image", "is 512 and neither true nor false"),
        ("1 / (batch - 8) < 1", "cannot be worked out"),
        ("", "is empty; leave it out to keep all"),
        ("(" * 300 + ")" * 300, "longer than"),
    ],
)
def test_mistakes_are_named(text, meant):
    with pytest.raises(ConfigError, match="--where") as caught:
        keeps(text)
    assert meant in str(caught.value)


def test_percent_is_a_share_and_more_than_one_is_percent():
    def keeps(text, **values):
        return Expression(text, {"top1", "batch"}, {"top1"}).truth(values.__getitem__)

    for text in (
        "top1 > 90%",
        "top1 >= 91.5 % and batch % 3 == 2",
        "(top1 > 91%)",
        "90%<top1",
        "top1 > 90",
        "top1 - 90% > 0",
    ):
        assert keeps(text, top1=0.915, batch=8), text
        assert not keeps(text, top1=0.89, batch=8), text
    assert keeps("90.5 < top1 < 92 and batch > 7 and top1 > 0.9", top1=0.915, batch=8)
    assert keeps("top1 == 1", top1=1.0)  # 1 stays, as 100 %
    # A missing value was shown as an object of Python.
    for value in (None, 0.9):
        with pytest.raises(
            ConfigError, match=r"is (missing|0\.9) and .*; compare it, as --where 'acc"
        ):
            keeps("top1", top1=value)


def test_nothing_but_arithmetic_comparisons_and_keys(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in (
        "__import__('os').system('touch x')",
        "image.__class__ == 1",
        "().__class__.__bases__",
        "(lambda: 1)() == 1",
        "9 ** 9 ** 9 > 1",
        "1 << 99999999 > 1",
        "(x := 1) == 1",
        "print",
    ):
        with pytest.raises(ConfigError, match="--where"):
            keeps(text)
    assert not list(tmp_path.iterdir())


def test_image_of_two_sizes_is_a_list():
    config = compose(["image=[480,640]"])
    with pytest.raises(ConfigError, match="write height or width"):
        keeps("image < 600", config)
    assert keeps("height < 600 and width > 600 and image == [480,640]", config)
