"""Do the stored figures resolve to the published sizes, and are they predicted and measured?"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from hires.cli.compose.choices import experiments, groups
from hires.cli.compose.compose_config import Composer
from hires.cli.sweep.axes import axes_of, stored_sweep
from hires.cli.sweep.figure_sweep import AUTO, PUBLISHED, SMALL, FigureSweep, require_size
from hires.cli.sweep.sweep_points import Where, compose_all
from hires.core.config.run_config import from_dict
from hires.core.errors import ConfigError
from hires.core.published import FIGURES, TABLE_2_1_RUN
from hires.nets.trace import trace_config
from hires.plan.graph import Graph
from hires.plan.partition import layer_starts
from tests.cli.conftest import SMALL as SMALL_RUN

NAMES = [name for name in experiments() if name.startswith("fig")]
ON_CPU = "device=cpu"


def sweep_of(name, *typed, size=AUTO):
    """Returns the points to predict and those to measure, and the figure's sweep."""
    _, stored = stored_sweep([f"experiment={name}"], None)
    zipped, where = stored.options.get("zip", []), stored.options.get("where")
    keeps = None if where is None else Where(where, groups())
    made, composer = FigureSweep(stored, typed, zipped, size), Composer(None)
    words = made.words(composer, keeps)
    measured = compose_all(axes_of(words, zipped, composer.groups), composer, keeps)
    return made.published.valid, measured.valid, made


def sizes(points):
    """Returns image, batch, layout and ranks of points."""
    configs = [point.config for point in points]
    return {(c.height, c.batch, c.parallel.label, c.parallel.num_ranks) for c in configs}


def precisions(points):
    return {point.config.precision.name for point in points}


def test_every_published_figure_of_the_chapter_has_its_experiment():
    stored = {name: stored_sweep([f"experiment={name}"], None)[1] for name in NAMES}
    assert {name: one.figure.number for name, one in stored.items()} == {
        f"fig{number}": number for number in dict.fromkeys(one.figure for one in FIGURES)
    }
    assert all(one.small for one in stored.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fig2.4", {(n, 32, "single", 1) for n in (256, 512, 1024)}),
        ("fig2.5", {(n, 32, "single", 1) for n in (256, 512, 1024)}),
        ("fig2.6", {(4096, 1, "sp+lp", 5)}),
        ("fig2.7", {(4096, 1, "sp+lp", 9)}),
        ("fig2.8", {(2048, 16, "sp+lp", 3), (2048, 32, "sp+lp", 5), (2048, 64, "sp+lp", 9)}),
        ("fig2.9", {(4096, 16, "sp+lp", 5), (4096, 32, "sp+lp", 9), (4096, 64, "sp+lp", 17)}),
        ("fig2.10", {(8192, 1, "single", 1), (8192, 1, "sp", 4), (8192, 1, "sp", 8)}),
        (
            "fig2.11",
            {(2048, 4, "single", 1)}
            | {(2048, 4, "sp", n) for n in (2, 4, 8)}
            | {(2048, 4, "sp+lp", n + 1) for n in (2, 4, 8)},
        ),
    ],
)
def test_published_points_have_the_sizes_of_the_text(name, expected):
    published, measured, _ = sweep_of(name, ON_CPU)
    assert sizes(published) == expected
    number = name.removeprefix("fig")
    assert {one.precision for one in FIGURES if one.figure == number} <= precisions(published)
    assert {point.config.model.n for point in published} == {TABLE_2_1_RUN["model"]["n"]}
    assert {point.config.task.name for point in published} == {"infer"}
    # What is measured here is smaller in every way, in the same precisions.
    assert {point.config.model.n for point in measured} == {1}
    assert max(sizes(measured))[0] <= 512
    assert precisions(measured) == precisions(published)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fig2.6", "fig2.7", "fig2.8", "fig2.9", "fig2.11"])
def test_one_gpu_beside_the_tiles_has_half_of_the_modules(name):
    for points in sweep_of(name, ON_CPU)[:2]:
        cut = {(p.config.model.n, tuple(p.config.parallel.balance or ())) for p in points}
        for n, balance in cut - {(n, ()) for n, _ in cut}:
            assert list(balance) == equal_modules(_graph(n))


def equal_modules(graph: Graph) -> list[int]:
    """Returns the layers of two stages with as many modules each, as MPI4DL cuts."""
    layers = [graph.nodes[start].layer.split(".") for start in layer_starts(graph)]
    ends = [next((i for i, n in enumerate(path) if n.isdecimal()), 0) for path in layers]
    modules = [".".join(path[: end + 1]) for path, end in zip(layers, ends, strict=True)]
    order = list(dict.fromkeys(modules))
    first = sum(order.index(module) < len(order) // 2 for module in modules)
    return [first, len(modules) - first]


def _graph(n: int) -> Graph:
    model = {**TABLE_2_1_RUN["model"], "n": n}
    return trace_config(from_dict({"model": model, "image": 64, "batch": 1}))


@pytest.mark.slow
def test_size_is_chosen_by_the_gpus_that_there_are(monkeypatch):
    monkeypatch.setattr("hires.plan.hardware.gpus.visible_gpus", lambda gpus=None: ["0"] * 4)
    gpus = ("device=cuda", "cluster.gpus=4")
    published, measured, made = sweep_of("fig2.4", *gpus)
    assert sizes(measured) == sizes(published)
    assert "at the same sizes" in made.figure.setting
    _, measured, made = sweep_of("fig2.6", *gpus)
    assert sizes(measured) == {(256, 1, "sp+lp", 5)}
    assert "5 GPUs are needed and there are 4" in made.figure.setting
    assert "model.n=1 image=256" in made.figure.setting


@pytest.mark.slow
def test_size_can_be_chosen():
    assert sizes(sweep_of("fig2.6", ON_CPU, size=PUBLISHED)[1]) == {(4096, 1, "sp+lp", 5)}
    assert "--size small was chosen" in sweep_of("fig2.6", size=SMALL)[2].figure.setting
    with pytest.raises(ConfigError, match="this sweep has one size"):
        require_size(SMALL, stored_sweep(["experiment=layouts"], None)[1])


def test_typed_words_hold_for_both_but_sizes_for_what_is_measured():
    published, measured, _ = sweep_of("fig2.6", ON_CPU, "precision=fp32,int8", "image=128")
    assert precisions(published) == precisions(measured) == {"fp32", "int8"}
    assert {size for size, *_ in sizes(published)} == {4096}
    assert {size for size, *_ in sizes(measured)} == {128}


FIGURE = """# A figure
figure: {number: "2.5", title: memory, shows: [memory, speed]}
overrides: ["precision=fp32,fp16", task=infer, image=64, batch=8]
small: [image=32, batch=4]
"""


@pytest.fixture
def mine(tmp_path):
    folder = tmp_path / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(FIGURE)
    own = [word for word in SMALL_RUN if not word.startswith(("image", "batch"))]
    return ("sweep", "experiment=mine", *own, ON_CPU, "--config-dir", "mine")


@pytest.mark.usefixtures("traced")
def test_dry_run_predicts_and_writes_nothing(hires, mine):
    answer = hires(*mine, "--dry-run")
    assert answer.code == 0, answer.err
    assert "Figure 2.5: what the text gives, and ours" in answer.out
    assert "not published as a number" in " ".join(answer.out.split())
    assert not Path("results").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("traced", "fake_ranks")
def test_figure_is_written_as_tables_and_plot(hires, mine):
    answer = hires(*mine, "--json")
    assert answer.code == 0, answer.err
    facts = json.loads(answer.out)["figure"]
    sources = [(row["source"], row["image"], row["precision"]) for row in facts["points"]]
    assert sources == [
        ("predicted", "64x64", "fp32"),
        ("predicted", "64x64", "fp16"),
        ("measured", "32x32", "fp32"),
        ("measured", "32x32", "fp16"),
    ]
    assert all(row["img_per_s"] > 0 for row in facts["points"])
    folder = Path("results/default")
    with (folder / "figure2.5.csv").open() as file:
        assert [row["source"] for row in csv.DictReader(file)] == [one for one, *_ in sources]
    with (folder / "figure2.5-published.csv").open() as file:
        assert "1.77" in {row["published"] for row in csv.DictReader(file)}
    assert (folder / "figure2.5.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "figure2.5.svg").read_text()


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("figure: {number: '2.4', title: a, shows: [size]}\n", "must hold speed, memory"),
        ("figure: {number: '9', title: a, shows: [speed]}\n", "is none of which"),
        ("figure: [2.4]\n", "figure must"),
        ("small: image=64\n", "small must be a list of words"),
    ],
)
def test_mistake_in_a_stored_figure_names_the_file(tmp_path, text, meant):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"overrides: [image=64]\n{text}")
    with pytest.raises(ConfigError, match=meant) as caught:
        stored_sweep(["experiment=mine"], tmp_path)
    assert "mine.yaml" in str(caught.value)
