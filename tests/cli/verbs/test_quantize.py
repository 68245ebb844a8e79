"""``hires quantize`` calibrates on what was asked for, finds it again, leaves whole files or none,
and says what the scales are worth."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch.nn.functional as F
from safetensors.numpy import save_file
from torch import nn

from hires.core.errors import ConfigError
from hires.launcher.local.local_launcher import Outcome
from hires.plan.plan import Plan
from hires.quant.affine import affine_of
from hires.quant.scales import read_scales
from tests.cli.verbs.conftest import INT8, NET
from tests.helpers.commands import SMALL
from tests.helpers.tiny_nets import traced as trace

pytestmark = pytest.mark.usefixtures("traced")
MADE_UP = (*NET, "data=synthetic")
AUTO = (*MADE_UP, "quant.auto=30dB", "out=a.safetensors")


def test_scales_and_weights_are_written_and_the_worst_values_shown(hires, ranks, traced):
    answer = hires(*MADE_UP, "parallel=sp", "precision=int8", "out=net.safetensors")
    assert answer.code == 0, answer.err
    assert "no weights=PATH" in answer.err
    assert "made-up images" in answer.err
    [config] = ranks
    assert (config["task"]["name"], config["precision"]["name"]) == ("calibrate", "fp32")
    assert config["steps"] == 3  # of 4 images, for 10
    assert config["parallel"]["tiles"] == [2, 1]
    scales = read_scales("net.json")
    worst, noise = min(scales.noise.items(), key=lambda item: item[1])
    assert worst in answer.out
    assert f"{noise:.1f}" in answer.out
    assert "40.0 MiB -> 10.0 MiB" in answer.out
    assert scales.values["input"] == affine_of(-2.0, 2.0)
    calibrated = scales.origin["calibration"]
    assert (calibrated["image"], calibrated["data"]["name"]) == ([32, 32], "synthetic")
    assert [path.name for path in sorted(Path().glob("net*"))] == ["net.json", "net.safetensors"]
    # Layers with weights in int8 are counted without those that stay in float.
    every = json.loads(hires(*MADE_UP, "out=net.safetensors", "--json").out)
    assert every["quantised"] == sum(node.kind == "conv2d" for node in traced.nodes) + 1
    less = json.loads(hires(*MADE_UP, "out=net.safetensors", "--json", "quant.keep=[fc]").out)
    assert less["quantised"] == every["quantised"] - 1
    assert less["quantised_others"] == every["quantised_others"] > 0


def test_earlier_calibration_is_found_whatever_its_layout(hires, ranks):
    words = "quant.calibration=noise", "--json"
    first = json.loads(hires(*NET, *words, "out=a.json").out)
    again = hires(*NET, *words, "parallel=sp", "batch=8", "out=b.json")
    assert len(ranks) == 1
    assert json.loads(again.out)["calibration"] == first["calibration"]
    assert "reusing an earlier calibration" in again.err
    assert Path("a.json").read_text() == Path("b.json").read_text()
    for more in ("quant.observer=min_max", "seed=1", "--again"):
        before = len(ranks)
        answer = hires(*NET, *words, more, "out=c.json")
        assert (answer.code, len(ranks)) == (0, before + 1), answer.err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["out=a.json"], "needs real images and none are named"),
        (["data=synthetic", "quant.images=5000", "out=a.json"], "5000 .*than the 1024 images"),
        (["data=synthetic", "out=a.json", "out=b.json"], "name one file to write"),
        (["data=synthetic", "out=a.pt"], "must end in .safetensors"),
        (["data=synthetic", "out=a.json", "quant.auto=2"], "quant.auto=2 is no bound"),
        (["data=synthetic", "out=a.json", "quant.observer=best"], "choose one of entropy"),
        (["data=synthetic", "out=a.json", "quant.percentile=101"], "at most 100"),
        (["data=synthetic", "out=a.json", "quant.keep=[no_such]"], "no_such names no layer"),
        (["data=synthetic", "out=a.json", "precision=int8", "task=train"], "task=train learns"),
        (["quant.data.name=folder", "out=a.json"], "data.path"),
        (["quant.data.colour=red", "out=a.json"], "colour"),
        (["data=synthetic", "quant.scales=b.json", "out=a.json"], "makes scales of its own; leave"),
        (["quant.calibration=noise", "quant.data.name=digits", "out=a.json"], "names others"),
        (["data=synthetic", "out=mine.json/x.safetensors"], "a file is where a folder should be"),
        (["data=synthetic", "out=/proc/x.safetensors"], "cannot write /proc: it takes no new"),
        (["data=synthetic", "out=mine.safetensors"], "mine.json, which `hires quantize` has not"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_rank_starts(hires, ranks, words, text):
    Path("mine.json").write_text('{"mine": 1}')
    answer = hires(*NET, *words)
    assert answer.code == 2, answer.err
    assert re.search(text, answer.err), answer.err
    assert ranks == []
    assert not Path("a.json").exists()
    assert Path("mine.json").read_text() == '{"mine": 1}'


def test_folder_that_is_closed_costs_no_calibration(hires, ranks, monkeypatch):
    def closed(**where):  # root may write anywhere
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("hires.cli.verbs.verb_quantize.tempfile.NamedTemporaryFile", closed)
    answer = hires(*MADE_UP, "out=closed/x.safetensors")
    assert answer.code == 2
    assert "Permission denied; choose a folder that you may write to with out=FILE" in answer.err
    assert ranks == []


@pytest.mark.parametrize("earlier", [False, True])
def test_full_disk_leaves_an_earlier_pair_or_nothing(hires, ranks, monkeypatch, earlier):
    # The weights were replaced first, so both were lost.
    if earlier:
        assert hires(*MADE_UP, "out=n8.safetensors").code == 0
    before = {path.name: path.read_bytes() for path in Path().glob("*n8*")}

    def full(path, scales):
        raise ConfigError("cannot write n8.json: No space left on device")

    monkeypatch.setattr("hires.cli.verbs.verb_quantize.write_scales", full)
    answer = hires(*MADE_UP, "out=n8.safetensors", "quant.keep=[fc]")
    assert (answer.code, "No space left" in answer.err) == (2, True)
    assert {path.name: path.read_bytes() for path in Path().glob("*n8*")} == before


@pytest.mark.parametrize(
    ("state", "code", "how"), [("failed", 1, "failed"), ("cancelled", 130, "was cancelled")]
)
def test_calibration_that_does_not_end_well_leaves_no_file(hires, monkeypatch, state, code, how):
    ended = Outcome(state, "conv1 cannot be calibrated", {0: code}, [])
    begun = []
    monkeypatch.setattr(
        "hires.launcher.kinds.this_machine.launch", lambda *a, **k: begun.append(a) or ended
    )
    answer = hires(*MADE_UP, "out=n8.safetensors")
    assert answer.code == code
    assert answer.err.count("conv1 cannot be calibrated") == 1
    assert f"{how}, so there are no scales: conv1 cannot be calibrated" in answer.err
    assert not list(Path().glob("n8*"))
    # Ctrl-C in a calibration ends a sweep: it was a point that cannot run, and the next one began.
    begun.clear()
    int8 = "task=infer", "precision=int8", "data=synthetic", "quant.images=10", "seed=1,2"
    answer = hires("sweep", *SMALL, *int8)
    assert answer.code == code, answer.err
    assert len(begun) == (1 if state == "cancelled" else 2)


@pytest.mark.usefixtures("quantised")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("plan", "quant.keep=[fc,conv1]"), "was quantised with conv1 in 8 bits; quantise the"),
        # One without tensors, too: its neighbour then has another scale, under the same name.
        (("plan", "quant.keep=[fc,maxpool]"), "was quantised with maxpool in 8 bits"),
        (("plan", "quant.auto=30dB"), "n8.json has scales already; leave quant.auto out"),
        (("run", "data=synthetic", "quant.auto=30dB"), "chooses layers while it calibrates"),
        (("plan", "precision=fp32"), "holds a quantised network; use it with task=infer"),
        (("plan", "quant.weights=int4"), "which holds 8-bit weights; leave it out"),
        (("plan", "quant.linear=dynamic"), "which holds linear layers with static scales"),
        (("plan", "weights=null", "quant.scales=other.json"), "other.json are of another"),
    ],
)
def test_keys_that_contradict_a_quantised_file_are_refused(hires, ranks, words, told):
    held = json.loads(Path("n8.json").read_text())
    Path("other.json").write_text(json.dumps({**held, "network": "0" * 64, "weights": ""}))
    verb, *more = words
    answer = hires(verb, *INT8[1:], *more)
    assert answer.code == 2
    assert told in answer.err
    assert len(ranks) == 1


def test_layer_kept_by_name_stays_in_float_where_the_file_is_read(hires, quantised, ranks):
    assert "quant.keep=fc" in quantised.out
    answer = hires(*INT8, "parallel=sp", "--json")
    assert answer.code == 0, answer.err
    plan = Plan.from_dict(json.loads(answer.out))
    assert plan.graph.by_name["fc"].kind == "linear"
    assert not any(fact.recipe for fact in plan.graph.params.values())
    answer = hires(*INT8, "quant.observer=min_max", "quant.data.split=train", "quant.keep=[fc]")
    assert answer.code == 0, answer.err
    assert "note: quant.data.split, quant.observer do nothing: weights=" in answer.out
    answer = hires(*MADE_UP, "weights=n8.safetensors", "quant.keep=[conv1]", "out=b.safetensors")
    assert (answer.code, len(ranks)) == (2, 1)
    assert "`hires quantize weights=FLOAT quant.keep=[conv1] out=...`" in answer.err
    assert hires(*MADE_UP, "out=n8.safetensors").code == 0  # an earlier pair is overwritten
    assert read_scales("n8.json").kept == {}
    Path("n8.json").unlink()
    for verb in ("plan", "run"):
        answer = hires(verb, *INT8[1:], "data=synthetic")
        assert answer.code == 2
        assert "n8.json with its scales is missing; copy it from where" in answer.err
        assert "calibrating" not in answer.err


@pytest.mark.parametrize("lost", ["fc", "auto"])
def test_earlier_scales_that_lack_something_are_not_reused(hires, ranks, lost):
    """A calibration leaves out the values of kept layers; an old one did not measure choices."""
    words = AUTO if lost == "auto" else (*MADE_UP, "out=a.json")
    assert hires(*words).code == 0
    [place] = Path("results").glob("calibrations/*/a0/scales.json")
    held = json.loads(place.read_text())
    for name in ("values", "ranges", "noise") if lost == "fc" else ():
        del held[name]["fc"]
    if lost == "auto":
        del held["auto"]
    place.write_text(json.dumps(held))
    assert hires(*words).code == 0
    assert len(ranks) == 2
    assert "fc" in read_scales("a.json").values


def test_signal_of_the_int8_network_and_of_each_operator_is_shown_and_kept(hires, ranks):
    answer = hires(*AUTO)
    assert answer.code == 0, answer.err
    text = "the int8 network itself has 31.5 dB of signal over noise on the first 4 images"
    assert f"quant.auto=30dB: {text}, 30.0 dB was the bound; 20 operators in 8 bits" in answer.out
    assert read_scales("a.json").auto["signal_db"] == 31.5
    facts = json.loads(hires(*AUTO, "--json").out)
    assert facts["auto"] == {"asked_db": 30, "images": 4, "operators": 20, "signal_db": 31.5}
    assert facts["alone"][0] == {"operator": "fc", "db": 38.5, "in": "int8"}
    assert len(ranks) == 1
    answer = hires(*AUTO, "quant.keep=[fc]")
    assert len(ranks) == 2  # what is kept by name decides what else has to be
    assert re.search(r"fc +38\.5 +float", answer.out), answer.out
    assert re.search(r"conv1.* +41\.2 +int8", answer.out), answer.out


@pytest.mark.parametrize(
    ("found", "words", "told"),
    [
        (
            {"signal_db": 26.25},
            AUTO,
            "warning: quant.auto=30dB was not reached: the int8 network itself has 26.2",
        ),
        (
            {"operators": 0, "alone": {}},
            (*AUTO, "quant.keep=[*]"),
            "warning: quant.auto=30dB had nothing to choose from: no operator can",
        ),
        (  # it was a success of 200.0 dB, which is where decibels end
            {"operators": 0},
            (*AUTO, "quant.observer=min_max"),
            "leaves nothing in 8 bits, all is computed in float; ask for less than 30.0 dB",
        ),
        (
            {"min_max_noise": {"fc": 90.0, "conv1": 95.0}},  # fc, the output, is not rounded
            (*MADE_UP, "out=a.safetensors"),
            "warning: quant.observer=entropy rounds 1 value much worse than min_max does: conv1",
        ),
        ({"min_max_noise": {"conv1": 95.0}}, (*MADE_UP, "out=a.json", "quant.keep=[*]"), None),
    ],
)
def test_scales_that_are_worth_little_are_a_warning(hires, ranks, found, words, told):
    vars(ranks).update(found)
    answer = hires(*words)
    assert answer.code == 0, answer.err
    assert told in answer.err if told else "quant.observer" not in answer.err


CALIBRATE = *SMALL[:3], "task=calibrate"


def test_calibration_by_its_task_is_that_of_the_verb(hires, ranks):
    """After 12 steps of 8 images it failed for want of the others, and named weights as remedy."""
    for words, text in (
        (["quant.images=8"], "a calibration needs real images and none are named"),
        (["data=synthetic", "data.length=8"], "quant.images=256 asks for more than the 8 images"),
        (["data=synthetic", "quant.keep=[conv11]"], "quant.keep=conv11 names no layer"),
    ):
        answer = hires("run", *CALIBRATE, *words)
        assert (answer.code, text in answer.err, ranks) == (2, True, [])
    answer = hires("run", *CALIBRATE, "data=synthetic", "quant.images=10", "campaign=own")
    assert answer.code == 0, answer.err
    [config] = ranks
    assert (config["steps"], config["quant"]["images"], config["campaign"]) == (3, 10, "own")
    answer = hires(*MADE_UP, "out=a.json")
    assert "reusing an earlier calibration" in answer.err, answer.err
    words = "plan", *SMALL, "task=infer", "precision=int8", "quant.images=11"
    assert "needs real images" in hires(*words).out
    shown = hires(*words, "data=synthetic").out
    assert "a run calibrates on 11 images of data=synthetic first" in shown
    assert len(ranks) == 1


def merged_relus():
    """Two equal ReLUs of a value that is read by something else, too: a run computes one."""

    def forward(net, x):
        y = net.stem(x)
        return net.head((net.left(F.relu(y)) + net.right(F.relu(y)) + y).mean((2, 3)))

    def conv(width):
        return nn.Conv2d(width, 8, 3, padding=1)

    parts = {"stem": conv(3), "left": conv(8), "right": conv(8), "head": nn.Linear(8, 10)}
    return trace(forward, (4, 3, 32, 32), training=False, **parts)


class TestMergedOperators:
    """What a calibration keeps or measures of equal operators holds for both."""

    @pytest.fixture
    def graph(self):
        return merged_relus()

    def test_both_stay_in_float_and_are_shown(self, hires, ranks, graph):
        """One was in 8 bits: the file named those alone that the network of one process has."""
        both = [node.name for node in graph.nodes if node.kind == "relu"]
        assert len(both) == 2
        answer = hires(*MADE_UP, "quant.keep=[*relu*]", "out=n8.safetensors")
        assert answer.code == 0, answer.err
        assert sorted(read_scales("n8.json").kept) == sorted(both)
        for keep in ("quant.keep=[*relu*]", "quant.keep=[]"):
            plan = hires(*INT8, keep, "--json")
            assert plan.code == 0, plan.out + plan.err
            kept = Plan.from_dict(json.loads(plan.out)).graph.kept
            assert both[0] in kept
            assert all(why.startswith("quant.keep") for n, why in kept.items() if n in both)
        ranks.alone = {name: 40.0 + k for k, name in enumerate(both)}
        facts = json.loads(hires(*AUTO, "--json").out)["alone"]
        assert [(one["operator"], one["in"]) for one in facts] == [(n, "int8") for n in both]


def test_float_weights_beside_another_json_are_read_and_an_evaluation_without_any_warned_of(
    hires, traced
):
    names = traced.own_params(name for node in traced.nodes for name in node.params)
    facts = {name: traced.params[name] for name in names}
    save_file({n: np.zeros(f.shape, f.dtype) for n, f in facts.items()}, "w.safetensors")
    Path("w.json").write_text('{"epochs": 90}')
    warning = "no weights=PATH: the network that is evaluated has first weights from the seed"
    words = (*SMALL, "data=digits", "task=evaluate")
    assert f"warning: {warning}" in hires("plan", *words).out
    answer = hires("plan", *words, "weights=w.safetensors")
    assert (answer.code, "no weights=PATH" in answer.out) == (0, False), answer.err
    # Points that differ in weights alone share all else of their plan.
    for order in ("null,w.safetensors", "w.safetensors,null"):
        answer = hires("sweep", *words, f"weights={order}", "--dry-run", "--json")
        for point in json.loads(answer.out)["points"]:
            warned = any(warning in text for text in point["warnings"])
            assert warned == ("weights=null" in point["overrides"])
    first = ("--first", "task=train", "--first", "checkpoint.every=3")
    [point] = json.loads(hires("sweep", *words, *first, "--dry-run", "--json").out)["points"]
    assert point["warnings"] == []  # it will have the weights of a run before it
