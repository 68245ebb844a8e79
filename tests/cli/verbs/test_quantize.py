"""``hires quantize`` calibrates on what was asked for, finds it again, leaves whole files or none,
and says what the scales are worth."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hires.core.errors import ConfigError
from hires.launcher.local.local_launcher import Outcome
from hires.plan.plan import Plan
from hires.quant.affine import affine_of
from hires.quant.scales import read_scales
from tests.helpers.commands import INT8, QUANTIZE, SMALL

pytestmark = pytest.mark.usefixtures("traced")
REAL = QUANTIZE[:-1]
"""Names no data."""
AUTO = (*QUANTIZE, "quant.auto=30dB", "out=a.safetensors")


def test_scales_and_weights_are_written_and_the_worst_values_shown(hires, ranks, traced):
    answer = hires(*QUANTIZE, "parallel=sp", "precision=int8", "out=net.safetensors")
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
    assert [path.name for path in sorted(Path().glob("net*"))] == ["net.json", "net.safetensors"]
    # Layers that stay in float are not counted.
    every, less = (
        json.loads(hires(*QUANTIZE, "out=net.safetensors", "--json", f"quant.keep={keep}").out)
        for keep in ("[]", "[fc]")
    )
    assert every["quantised"] == sum(node.kind == "conv2d" for node in traced.nodes) + 1
    assert less["quantised"] == every["quantised"] - 1


def test_earlier_calibration_is_found_whatever_its_layout(hires, ranks):
    words = "quant.calibration=noise", "--json"
    first = json.loads(hires(*REAL, *words, "out=a.json").out)
    again = hires(*REAL, *words, "parallel=sp", "batch=8", "out=b.json")
    assert len(ranks) == 1
    assert json.loads(again.out)["calibration"] == first["calibration"]
    assert "reusing an earlier calibration" in again.err
    assert Path("a.json").read_text() == Path("b.json").read_text()
    for more in ("quant.observer=min_max", "seed=1", "--again"):
        before = len(ranks)
        answer = hires(*REAL, *words, more, "out=c.json")
        assert (answer.code, len(ranks)) == (0, before + 1), answer.err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["out=a.json"], "needs real images and none are named"),
        (["data=synthetic", "quant.images=5000", "out=a.json"], "5000 .*than the 1024 images"),
        (["data=synthetic", "out=a.pt"], "must end in .safetensors"),
        (["data=synthetic", "out=a.json", "quant.keep=[no_such]"], "no_such names no layer"),
        (["data=synthetic", "out=a.json", "precision=int8", "task=train"], "task=train learns"),
        (["data=synthetic", "quant.scales=b.json", "out=a.json"], "makes scales of its own; leave"),
        (["quant.calibration=noise", "quant.data.name=digits", "out=a.json"], "names others"),
        (["data=synthetic", "out=/proc/x.safetensors"], "cannot write /proc: it takes no new"),
        (["data=synthetic", "out=mine.safetensors"], "mine.json, which `hires quantize` has not"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_rank_starts(hires, ranks, words, text):
    Path("mine.json").write_text('{"mine": 1}')
    answer = hires(*REAL, *words)
    assert answer.code == 2, answer.err
    assert re.search(text, answer.err), answer.err
    assert ranks == []
    assert not Path("a.json").exists()
    assert Path("mine.json").read_text() == '{"mine": 1}'


def test_full_disk_leaves_an_earlier_pair_or_nothing(hires, ranks, monkeypatch):
    def full(path, scales):
        raise ConfigError("cannot write n8.json: No space left on device")

    for earlier in (False, True):
        if earlier:
            assert hires(*QUANTIZE, "out=n8.safetensors").code == 0
        before = {path.name: path.read_bytes() for path in Path().glob("*n8*")}
        with monkeypatch.context() as patch:
            patch.setattr("hires.cli.verbs.verb_quantize.write_scales", full)
            answer = hires(*QUANTIZE, "out=n8.safetensors", "quant.keep=[fc]")
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
    answer = hires(*QUANTIZE, "out=n8.safetensors")
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
        (("plan", "quant.auto=30dB"), "n8.json has scales already; leave quant.auto out"),
        (("run", "data=synthetic", "quant.auto=30dB"), "chooses layers while it calibrates"),
        (("plan", "precision=fp32"), "holds a quantised network; use it with task=infer"),
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
    assert hires(*QUANTIZE, "out=n8.safetensors").code == 0  # an earlier pair is overwritten
    assert read_scales("n8.json").kept == {}
    Path("n8.json").unlink()
    for verb in ("plan", "run"):
        answer = hires(verb, *INT8[1:], "data=synthetic")
        assert answer.code == 2
        assert "n8.json with its scales is missing; copy it from where" in answer.err
        assert "calibrating" not in answer.err


def test_earlier_scales_that_lack_values_are_not_reused(hires, ranks):
    """A calibration leaves out the values of layers that stay in float."""
    words = (*QUANTIZE, "out=a.json")
    assert hires(*words).code == 0
    [path] = Path("results").glob("calibrations/*/a0/scales.json")
    values = json.loads(path.read_text())
    for name in ("values", "ranges", "noise"):
        del values[name]["fc"]
    path.write_text(json.dumps(values))
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
    ("scales", "words", "warning"),
    [
        (
            {"signal_db": 26.25},
            AUTO,
            "warning: quant.auto=30dB was not reached: the int8 network itself has 26.2",
        ),
        (
            {"operators": 0},
            (*AUTO, "quant.observer=min_max"),
            "leaves nothing in 8 bits, all is computed in float; ask for less than 30.0 dB",
        ),
        (
            {"min_max_noise": {"fc": 90.0, "conv1": 95.0}},  # fc, the output, is not rounded
            (*QUANTIZE, "out=a.safetensors"),
            "warning: quant.observer=entropy rounds 1 value much worse than min_max does: conv1",
        ),
    ],
)
def test_scales_that_are_worth_little_are_a_warning(hires, ranks, scales, words, warning):
    vars(ranks).update(scales)
    answer = hires(*words)
    assert (answer.code, warning in answer.err) == (0, True), answer.err


CALIBRATE = *SMALL[:3], "task=calibrate"


def test_calibration_by_its_task_is_that_of_the_verb(hires, ranks):
    """After 12 steps of 8 images it failed for want of the others, and named weights as remedy."""
    answer = hires("run", *CALIBRATE, "data=synthetic", "quant.images=10", "campaign=own")
    assert answer.code == 0, answer.err
    [config] = ranks
    assert (config["steps"], config["quant"]["images"], config["campaign"]) == (3, 10, "own")
    answer = hires(*QUANTIZE, "out=a.json")
    assert "reusing an earlier calibration" in answer.err, answer.err
    words = "plan", *SMALL, "task=infer", "precision=int8", "quant.images=11"
    assert "needs real images" in hires(*words).out
    shown = hires(*words, "data=synthetic").out
    assert "a run calibrates on 11 images of data=synthetic first" in shown
    assert len(ranks) == 1


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
    answer = hires("sweep", *words, "weights=null,w.safetensors", "--dry-run", "--json")
    for point in json.loads(answer.out)["points"]:
        warned = any(warning in text for text in point["warnings"])
        assert warned == ("weights=null" in point["overrides"])
    first = ("--first", "task=train", "--first", "checkpoint.every=3")
    [point] = json.loads(hires("sweep", *words, *first, "--dry-run", "--json").out)["points"]
    assert point["warnings"] == []  # it will have the weights of a run before it
