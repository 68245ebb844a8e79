"""Does every row have what it is compared with, and do both compute the same?"""

from __future__ import annotations

import pytest

from hires.bench.contestants import GROUPS, TASKS, LayoutsOptions, line_up, model_config
from hires.core.errors import ConfigError, PlanError, RunError
from hires.core.ranks.gpus import Torch
from hires.core.store.naming import model_label

SMALL = {"model": "resnet18", "image": [48, 48], "device": "cpu"}


@pytest.fixture(scope="module", params=TASKS)
def rows(request):
    return line_up(LayoutsOptions(**SMALL), request.param)


def test_baselines_and_peers_are_rows_that_do_the_same(rows):
    by_name = {row.name: row for row in rows}
    assert len(by_name) == len(rows)
    for row in rows:
        assert by_name[row.baseline].num_ranks == by_name[row.baseline].threads == 1
        for name in row.peers:
            peer = by_name[name]
            assert (peer.num_ranks, peer.threads) == (row.num_ranks, row.threads)
            assert peer.config.batch == row.config.batch
            assert peer.config.model == row.config.model


def test_every_layout_of_hires_stands_beside_torch_where_torch_has_it(rows):
    ours = {row.name for row in rows if row.kind == "hires" and row.peers}
    assert {"single", "dp"} < ours
    assert any(name.startswith("pp") for name in ours)


def test_pipelines_are_cut_at_the_same_node(rows):
    ours_of_pipelines = [row for row in rows if row.name.startswith("pp")]
    pairs = [(r, next(p for p in rows if p.name == r.peers[0])) for r in ours_of_pipelines]
    assert pairs
    for ours, torchs in pairs:
        cut = [[stage.first, stage.last] for stage in ours.plan.stages]
        assert cut == [[stage.first, stage.last] for stage in torchs.plan.stages]


def test_all_microbatches_have_the_same_size(rows):
    for row in rows:
        layout = row.config.parallel
        assert row.config.batch == layout.pieces


@pytest.mark.sampled(3)
@pytest.mark.parametrize("group", GROUPS)
def test_only_the_chosen_layouts_and_one_process_run(group):
    names = {row.name for row in line_up(LayoutsOptions(**SMALL, only=(group,)), "train")}
    assert {"single", "module", "two threads"} < names
    assert ("tiles 1x2" in names) == (group == "sp")
    assert any(name.startswith("ddp") for name in names) == (group == "dp")
    assert any(name.startswith("pp") for name in names) == (group == "pp")


@pytest.mark.parametrize("group", ["halo", "memory"])
def test_what_two_tiles_are_measured_by_runs_beside_them(group):
    rows = line_up(LayoutsOptions(**SMALL, only=(group,)), "train")
    assert [row.name for row in rows].count("tiles 2x1") == 1
    both = line_up(LayoutsOptions(**SMALL, only=("sp", group)), "train")
    assert [row.name for row in both].count("tiles 2x1") == 1


@pytest.mark.parametrize("name", ["resnet101", "preact_resnet110"])
def test_model_is_named_as_everywhere(name):
    assert model_label(model_config(name)) == name


def test_unknown_model_is_refused():
    with pytest.raises(ConfigError, match="vgg16 is unknown"):
        model_config("vgg16")


def test_layout_that_cannot_be_cut_is_a_plan_error():
    with pytest.raises(PlanError, match="use at most 1"):
        line_up(LayoutsOptions(model="resnet18", image=[1, 1], only=("sp",)), "infer")


@pytest.mark.parametrize(
    ("device", "gpus", "not_run"),
    [
        ("cpu", 0, set()),
        ("simulated", 0, {"ddp", "ddp views", "torch gpipe", "torch 1f1b"}),
        ("cuda", 1, {"torch gpipe", "torch 1f1b"}),  # two ranks of NCCL need two GPUs
        ("auto", 2, set()),
    ],
)
def test_device_and_backend_are_those_of_a_run(device, gpus, not_run, monkeypatch):
    monkeypatch.setattr("hires.core.ranks.gpus.device_files", lambda: gpus)
    built = Torch("2.13", "13.0")
    monkeypatch.setattr("hires.core.ranks.gpus.installed_torch", lambda: built)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    rows = line_up(LayoutsOptions(**{**SMALL, "device": device, "only": ("pp", "dp")}), "train")
    on_cores = {"module, no trick", "two threads"} if device != "cpu" else set()
    assert {row.name for row in rows if row.not_run} == not_run | on_cores
    own = "cuda" if device == "auto" else device
    for row in rows:
        assert row.config.device == own
        if row.plan is not None:
            backend = "nccl" if own == "cuda" and row.num_ranks <= gpus else "gloo"
            assert (row.plan.device, row.plan.backend) == (own, backend)


def test_missing_gpu_is_refused_as_for_a_run(monkeypatch):
    monkeypatch.setattr("hires.core.ranks.gpus.device_files", lambda: 0)
    with pytest.raises(RunError, match="this machine shows no NVIDIA GPU"):
        line_up(LayoutsOptions(**{**SMALL, "device": "cuda"}), "infer")
