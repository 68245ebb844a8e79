"""Images have any number of classes, or numbers, as a table says, and nothing else is learned."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from hires.cli.data_keys import resolve_data
from hires.core.config.data_config import DataConfig
from hires.core.errors import ConfigError
from hires.data.data_check import check_data
from hires.data.opening import AugmentedSource, open_data, open_source
from hires.data.start_check import data_findings
from tests.helpers.layouts import config_of, plan_of

LABELS = "name,label\n1,dog|cat\na/0.png,cat; bird\n2.png,\n3,cat\n"
COLUMNS = "name,dog,cat,bird\n1,1,1,0\n0,0,1,1.0\n2,0,0,0\n3,0,1,0\n"
NUMBERS = "name,age,weight\n1,20.5,-1e3\n0,31,2\n2,42,3\n3,50,0.1\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a").mkdir()
    for number, name in enumerate(("a/0.png", "1.png", "2.png", "3.png", "4.png")):
        Image.fromarray(np.full((8, 8, 3), 60 * number + 9, np.uint8)).save(tmp_path / name)
    return tmp_path


def config(folder, text, targets, *, task="train", model=None, loss=None, **keys):
    (folder / "t.csv").write_text(text)
    data = {"name": "images", "path": str(folder), "labels": "t.csv", "targets": targets, **keys}
    model = {"name": "preact_resnet", "depth": 11, "classes": None, **(model or {})}
    more = {} if loss is None else {"loss": loss}
    return config_of(data=data, model=model, image=[8, 8], task={"name": task}, **more)


def table(source):
    return {
        source.name(i): dict(
            zip(source.class_names, source.target(i, (0, 0), (0, 0)).tolist(), strict=True)
        )
        for i in range(len(source))
    }


@pytest.mark.parametrize("text", [LABELS, COLUMNS])
def test_images_have_any_number_of_classes(folder, text):
    found = table(open_data(config(folder, text, "classes")))
    assert [*found] == ["1.png", "2.png", "3.png", "a/0.png"]  # one is not listed
    held = {name: {one for one, has in row.items() if has} for name, row in found.items()}
    assert [*held.values()] == [{"cat", "dog"}, set(), {"cat"}, {"bird", "cat"}]
    assert resolve_data(config(folder, text, "classes")).model.classes == 3


def test_images_have_numbers(folder):
    resolved = resolve_data(config(folder, NUMBERS, "numbers"))
    assert (resolved.model.classes, resolved.data.names) == (2, ["age", "weight"])
    found = table(open_data(resolved))
    assert found["a/0.png"] == {"age": 31.0, "weight": 2.0}
    assert found["3.png"] == {"age": 50.0, "weight": 0.1}  # not rounded to 32 bits
    one = config(folder, "name,age,split\n1,20,train\n2,42,train\n", "numbers", split_file="t.csv")
    assert open_data(one).class_names == ("age",)


def test_rows_follow_the_order_of_the_network_its_parts_and_changes(folder):
    order = ["dog", "horse", "bird", "cat"]
    source = open_data(config(folder, LABELS, "classes", order=order))
    assert [*table(source)["a/0.png"].values()] == [0, 0, 1, 1]
    order = ["weight", "age"]
    source = open_data(config(folder, NUMBERS, "numbers", order=order, split="train"))
    changed = config_of(augment={"flip": "both"}).augment
    augmented = AugmentedSource(source, (8, 8), changed, 0)
    assert len(source) == 3
    assert all(row["weight"] < row["age"] for row in table(source).values())
    assert table(augmented) == table(source)
    with pytest.raises(ConfigError, match=r"data\.order=age must name the numbers of the data"):
        open_data(config(folder, NUMBERS, "numbers", order=["age"]))


@pytest.mark.parametrize(
    ("text", "targets", "words"),
    [
        ("name,age\n1,old\n", "numbers", "line 2 has 'old' as age, and data.targets=numbers needs"),
        ("name,age\n1,3\n2,\n", "numbers", "line 3 has '' as age, .*a finite number in each col"),
        ("name,age\n1,nan\n", "numbers", "line 2 has 'nan' as age"),
        ("name,age\n1,3\n9,4\n", "numbers", r"names no image below .* with 9"),
        ("name,age\n1,3\n1,4\n", "numbers", "1 is 3 and, later, 4"),
        ("name,age,age\n1,3,4\n", "numbers", "has two columns 'age'; give each its own name"),
        ("name\n1\n", "numbers", "has no column but name; data.targets=numbers needs one for each"),
        ("file,age\n1,3\n", "numbers", "has the columns file, age; its first line must name name"),
        ("name,age\n,3\n", "numbers", "line 2 lacks its name"),
        ("name,cat\n1,2\n", "classes", "line 2 has '2' as cat, and data.targets=classes needs 0 o"),
        ("name,label\n1,\n", "classes", "no line has a class; .* needs labels as cat;dog"),
        ("name,label\n", "class", r"t.csv has no lines below its first \(name,label\); add"),
        ("name,label\n", "classes", r"t.csv has no lines below its first \(name,label\); add"),
    ],
)
def test_table_that_lacks_something_is_refused(folder, text, targets, words):
    wrong = config(folder, text, targets)
    with pytest.raises(ConfigError, match=words):
        resolve_data(wrong)
    finding = check_data(str(folder), wrong, "images").findings[0]
    assert (finding.severity, finding.text.startswith("data.labels=")) == ("error", True)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"loss": {"name": "cross_entropy"}},
            "compares classes, and data.targets=classes gives ea",
        ),
        ({"loss": {"name": "dice"}}, "any number of classes; use loss=bce, or leave loss out"),
        ({"loss": {"name": "bce", "ignore_index": 2}}, "loss.ignore_index is of a class an image"),
        ({"loss": {"name": "bce", "targets": "labels"}}, "follows from data.targets here; leave"),
        ({"balance": True}, "data.balance=true is of a class an image, not data.targets=classes"),
        (
            {"model": {"classes": 4}},
            "model.classes=4 does not fit the data, which has 3 labels .bird, cat",
        ),
    ],
)
def test_wrong_combination_is_refused_before_anything_starts(folder, keys, words):
    with pytest.raises(ConfigError, match=words):
        resolve_data(config(folder, LABELS, "classes", **keys))


def test_network_of_another_number_of_outputs_is_refused(folder):
    target = "tests.helpers.custom_nets:slim_resnet"
    resolved = resolve_data(
        config(
            folder, NUMBERS, "numbers", model={"name": "custom", "target": target, "depth": None}
        )
    )
    texts = " ".join(one.text for one in plan_of(resolved).findings if one.severity == "error")
    weighted = resolve_data(config(folder, LABELS, "classes", loss={"weights": [1.0, 2.0]}))
    [finding] = [one for one in plan_of(weighted).findings if one.severity == "error"]
    assert "loss.weights=[1.0, 2.0] are 2 factors, and the network returns 3" in finding.text
    assert "data.targets=numbers are 2 for each image; make it return (n, 2)" in texts


def test_check_counts_classes_and_says_how_far_numbers_spread(folder):
    report = check_data(str(folder), config(folder, LABELS, "classes"), "images")
    assert report.classes == {"bird": 1, "cat": 3, "dog": 1}
    texts = {finding.text: finding.files for finding in report.findings}
    assert texts["of none of the classes"] == ["2.png"]
    assert texts["not in data.labels=t.csv, which no run uses"] == ["4.png"]
    numbers = config(folder, NUMBERS, "numbers")
    texts = {one.text: one.files for one in check_data(str(folder), numbers, "images").findings}
    [text] = [text for text in texts if text.startswith("numbers: mean, deviation")]
    assert texts[text][0] == "age: 35.875, 11.1489, 20.5, 50"
    found = [one.text for one in data_findings(numbers) if "deviation" in one.text]
    assert [text.split(" has a deviation")[0] for text in found] == ["age", "weight"]


def test_data_without_a_table_has_what_its_run_learned(folder, tmp_path):
    from tests.helpers.saved import run_folder

    trained = resolve_data(config(folder, NUMBERS, "numbers"))
    run = run_folder(tmp_path / "run", trained)
    keys = {"task": {"name": "predict"}, "image": [8, 8], "weights": str(run)}
    keys["model"] = {"name": "preact_resnet", "depth": 11, "classes": None}
    new = resolve_data(config_of(**keys, data={"name": "images", "path": str(folder)}))
    assert (new.data.targets, new.data.names) == ("numbers", ["age", "weight"])
    assert (new.model.classes, new.objective.compares) == (2, "numbers")
    keys["task"]["name"] = "infer"  # which compares nothing
    assert resolve_data(config_of(**keys, data={"classes": 2})).data.targets == "class"
    keys["task"]["name"] = "predict"
    with pytest.raises(
        ConfigError, match=r"data=digits has data.targets=class, and weights=.* lea"
    ):
        resolve_data(config_of(**keys, data={"name": "digits"}))


def test_slides_with_labels_have_a_class_each():
    with pytest.raises(ConfigError, match=r"data\.labels of data=slide are a class an image"):
        open_source(DataConfig("slide", "x", labels="l.csv", targets="numbers"), (8, 8), 3, 0)
