"""Which keys go with ``hires quantize``, and with scales that are there already?"""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import pytest

from hires.cli.compose.compose_config import compose
from hires.cli.screens.show_scales import auto_lines, auto_lines_of
from hires.core.errors import ConfigError
from hires.launcher.local.local_launcher import Outcome
from hires.quant.scales import read_scales
from tests.cli.conftest import SMALL
from tests.cli.verbs.conftest import INT8, NET

pytestmark = pytest.mark.usefixtures("traced")


def test_precision_int8_is_what_the_file_is_for(hires, ranks):
    answer = hires(*NET, "data=synthetic", "precision=int8", "out=a.safetensors")
    assert answer.code == 0, answer.err
    assert ranks[0]["precision"]["name"] == "fp32"
    answer = hires(*NET, "data=synthetic", "precision=int8", "task=train", "out=a.safetensors")
    assert answer.code == 2
    assert "task=train learns real numbers" in answer.err


def test_a_place_that_cannot_be_written_costs_no_calibration(hires, ranks, monkeypatch):
    Path("n8.json").write_text("{}")
    answer = hires(*NET, "data=synthetic", "out=n8.json/x.safetensors")
    assert answer.code == 2
    assert "a file is where a folder should be: move it, or choose out=FILE" in answer.err

    def closed(**where):  # root may write anywhere
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("hires.cli.verbs.verb_quantize.tempfile.NamedTemporaryFile", closed)
    answer = hires(*NET, "data=synthetic", "out=closed/x.safetensors")
    assert answer.code == 2
    assert "Permission denied; choose a folder that you may write to with out=FILE" in answer.err
    assert ranks == []


def test_weights_whose_scales_cannot_be_written_are_removed(hires, ranks, monkeypatch):
    def full(path, scales):
        raise ConfigError("cannot write n8.json: No space left on device")

    monkeypatch.setattr("hires.cli.verbs.verb_quantize.write_scales", full)
    answer = hires(*NET, "data=synthetic", "out=n8.safetensors")
    assert answer.code == 2
    assert "No space left" in answer.err
    assert not list(Path().glob("n8*"))


@pytest.mark.usefixtures("quantised")
def test_a_quantised_file_is_not_quantised_again(hires, ranks):
    words = "weights=n8.safetensors", "quant.keep=[conv1]", "out=b.safetensors"
    answer = hires(*NET, "data=synthetic", *words)
    assert answer.code == 2
    assert "n8.safetensors holds a network of 8 bits already" in answer.err
    assert "`hires quantize weights=FLOAT quant.keep=[conv1] out=...`" in answer.err
    assert len(ranks) == 1


@pytest.mark.usefixtures("quantised")
@pytest.mark.parametrize("name", ["conv1", "maxpool"])
def test_layers_that_a_file_holds_in_8_bits_are_not_kept_in_float(hires, name):
    """Also one without tensors: its neighbour then has another scale, under the same name."""
    answer = hires(*INT8, f"quant.keep=[fc,{name}]")
    assert answer.code == 2
    assert f"quant.keep={name}: weights=" in answer.err
    assert f"was quantised with {name} in 8 bits; quantise the float weights" in answer.err
    assert f"`hires quantize quant.keep=[fc,{name}]`, or leave quant.keep out" in answer.err
    assert hires(*INT8, "quant.keep=[fc]").code == 0


@pytest.mark.usefixtures("quantised")
@pytest.mark.parametrize("verb", ["plan", "run"])
def test_layers_are_not_chosen_where_scales_are_given(hires, ranks, verb):
    answer = hires(verb, *INT8[1:], "data=synthetic", "quant.auto=30dB")
    assert answer.code == 2
    assert "quant.auto=30dB chooses layers while it calibrates" in answer.err
    assert "n8.json has scales already; leave quant.auto out" in answer.err
    assert len(ranks) == 1


@pytest.mark.usefixtures("quantised")
def test_keys_of_a_calibration_that_do_nothing_are_named(hires):
    answer = hires(*INT8, "quant.observer=min_max", "quant.data.split=train", "quant.keep=[fc]")
    assert answer.code == 0, answer.err
    assert "note: quant.data.split, quant.observer do nothing: weights=" in answer.out


def test_scales_that_lack_a_value_serve_only_who_keeps_it(hires, ranks, traced):
    """A calibration leaves out the values of kept layers that are not finite."""
    words = *NET, "data=synthetic", "quant.keep=[fc]"
    assert hires(*words, "out=a.json").code == 0
    [place] = Path("results").glob("calibrations/*/a0/scales.json")
    held = json.loads(place.read_text())
    for name in ("values", "ranges", "noise"):
        del held[name]["fc"]
    place.write_text(json.dumps(held))
    assert hires(*words, "out=b.json").code == 0
    assert len(ranks) == 1
    assert hires(*NET, "data=synthetic", "out=c.json").code == 0
    assert len(ranks) == 2
    assert "fc" in read_scales("c.json").values


AUTO = "data=synthetic", "quant.auto=30dB"


def test_the_signal_of_the_int8_network_is_shown_and_kept(hires, ranks):
    answer = hires(*NET, *AUTO, "out=a.safetensors")
    assert answer.code == 0, answer.err
    text = "the int8 network itself has 31.5 dB of signal over noise on the first 4 images"
    assert f"quant.auto=30dB: {text}, 30.0 dB was the bound; 20 operators in 8 bits" in answer.out
    assert read_scales("a.json").auto["signal_db"] == 31.5
    facts = json.loads(hires(*NET, *AUTO, "out=a.safetensors", "--json").out)
    assert facts["auto"] == {"asked_db": 30, "images": 4, "operators": 20, "signal_db": 31.5}
    assert len(ranks) == 1
    hires(*NET, *AUTO, "quant.keep=[fc]", "out=a.safetensors")
    assert len(ranks) == 2  # what is kept by name decides what else has to be


@pytest.mark.usefixtures("ranks")
def test_a_signal_below_what_was_asked_is_a_warning(hires, ranks):
    ranks.signal_db = 26.25
    answer = hires(*NET, *AUTO, "out=a.safetensors")
    assert answer.code == 0, answer.err
    assert (
        "warning: quant.auto=30dB was not reached: the int8 network itself has 26.2" in answer.err
    )
    assert "over noise on the first 4 images, 3.8 dB less; 20 operators in 8 bits" in answer.err
    assert "calibrate with quant.observer=min_max, which cuts no range off, or ask" in answer.err


@pytest.mark.usefixtures("ranks")
def test_the_error_of_every_operator_alone_is_shown(hires):
    """That of layers that stay in int8 was in the log of the calibration only."""
    answer = hires(*NET, *AUTO, "quant.keep=[fc]", "out=a.safetensors")
    assert re.search(r"fc +38\.5 +float", answer.out), answer.out
    assert re.search(r"conv1.* +41\.2 +int8", answer.out), answer.out
    facts = json.loads(hires(*NET, *AUTO, "out=a.safetensors", "--json").out)
    assert facts["alone"][0] == {"operator": "fc", "db": 38.5, "in": "int8"}


def test_values_that_another_observer_serves_better_are_a_warning(hires, ranks):
    ranks.min_max_noise = {"fc": 90.0, "conv1": 95.0}
    answer = hires(*NET, "data=synthetic", "out=a.safetensors")
    noise = read_scales("a.json").noise["conv1"]  # the network's output, fc, is not rounded
    text = "quant.observer=entropy rounds 1 value much worse than min_max does: conv1 has"
    ratios = f"{noise:.1f} dB of signal over noise, and 95.0 dB with quant.observer=min_max"
    assert f"warning: {text} {ratios}" in answer.err


def test_values_that_stay_in_float_are_no_reason_for_another_observer(hires, ranks):
    ranks.min_max_noise = {"conv1": 95.0}
    words = *NET, "data=synthetic", "out=a.safetensors"
    kept = "quant.keep=[*]"
    answer = hires(*words, kept)
    assert answer.code == 0, answer.err
    assert "quant.observer" not in answer.err
    assert "rounds 1 value much worse" in hires(*words).err


def test_a_bound_that_has_nothing_to_choose_from_is_not_to_blame(hires, ranks):
    ranks.operators, ranks.alone = 0, {}
    answer = hires(*NET, *AUTO, "quant.keep=[*]", "out=a.safetensors")
    assert answer.code == 0, answer.err
    assert "warning: quant.auto=30dB had nothing to choose from: no operator can" in answer.err


@pytest.mark.parametrize("observer", ["entropy", "min_max"])
def test_a_bound_that_leaves_nothing_in_8_bits_is_a_warning(hires, ranks, observer):
    """It was a success of 200.0 dB, which is where decibels end."""
    ranks.operators = 0
    answer = hires(*NET, *AUTO, f"quant.observer={observer}", "out=a.safetensors")
    assert answer.code == 0, answer.err
    remedy = "ask for less than 30.0 dB"
    if observer == "entropy":
        remedy = f"calibrate with quant.observer=min_max, which cuts no range off, or {remedy}"
    text = "quant.auto=30dB leaves nothing in 8 bits, all is computed in float"
    assert f"warning: {text}; {remedy}" in answer.err
    assert "200.0 dB" not in answer.out + answer.err


def test_choices_that_were_not_measured_are_no_earlier_calibration(hires, ranks):
    assert hires(*NET, *AUTO, "out=a.json").code == 0
    [place] = Path("results").glob("calibrations/*/a0/scales.json")
    held = json.loads(place.read_text())
    del held["auto"]
    place.write_text(json.dumps(held))
    assert hires(*NET, *AUTO, "out=a.json").code == 0
    assert len(ranks) == 2
    lines = auto_lines(compose([*SMALL, *AUTO]), read_scales(place))
    assert lines == [
        "warning: quant.auto=30dB: the int8 network itself could not be measured; the log of the "
        "calibration's rank 0 says why"
    ]


CALIBRATE = *SMALL[:3], "task=calibrate"


def test_a_calibration_by_its_task_takes_the_steps_of_its_images(hires, ranks):
    """After 12 steps of 8 images it failed for want of the others, and named weights as remedy."""
    answer = hires("run", *CALIBRATE, "data=synthetic", "quant.images=10", "campaign=own")
    assert answer.code == 0, answer.err
    assert "data=synthetic: these scales are of made-up images" in answer.err
    [config] = ranks
    assert (config["steps"], config["quant"]["images"], config["campaign"]) == (3, 10, "own")
    assert [*Path("results/own").glob("*/a0/scales.json")]
    answer = hires(*NET, "data=synthetic", "out=a.json")
    assert "reusing an earlier calibration" in answer.err, answer.err
    assert len(ranks) == 1


@pytest.mark.parametrize("verb", ["run", "plan"])
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["quant.images=8"], "a calibration needs real images and none are named"),
        (["data=synthetic", "data.length=8"], "quant.images=256 asks for more than the 8 images"),
    ],
)
def test_a_calibration_by_its_task_has_the_checks_of_the_others(hires, ranks, verb, words, text):
    answer = hires(verb, *CALIBRATE, *words)
    assert answer.code == 2, answer.err
    assert text in answer.err
    assert ranks == []


def test_a_calibration_by_its_task_says_what_quant_auto_has(hires, ranks):
    """Nothing was said of it but in the log."""
    answer = hires("run", *CALIBRATE, *AUTO, "quant.images=10", "campaign=own")
    assert answer.code == 0, answer.err
    [run] = Path("results/own").glob("*-*")
    [line] = auto_lines_of(run, 0)
    assert line.startswith("quant.auto=30dB: the int8 network itself has 31.5 dB of signal over")
    assert auto_lines_of(run, 7) == []


def test_a_calibration_by_its_task_refuses_a_layer_that_does_not_exist(hires, ranks):
    answer = hires("run", *CALIBRATE, "data=synthetic", "quant.keep=[conv11]")
    assert answer.code == 2, answer.err
    assert "quant.keep=conv11 names no layer of the network" in answer.err
    assert ranks == []


def test_calibration_that_is_stopped_ends_as_any_other_command_does(hires, monkeypatch):
    stopped = Outcome("cancelled", "stopped by Ctrl-C", {0: 130}, [])
    monkeypatch.setattr("hires.launcher.kinds.this_machine.launch", lambda *a, **k: stopped)
    answer = hires(*NET, "data=synthetic", "out=n8.safetensors")
    assert answer.code == 130
    assert "was cancelled, so there are no scales" in answer.err
    assert not list(Path().glob("n8*"))


def test_calibration_that_is_stopped_ends_a_sweep(hires, monkeypatch):
    """It was a point that cannot run, and the next calibration began."""
    begun = []

    def launch(path, *rest, **named):
        begun.append(path)
        return Outcome("cancelled", "stopped by Ctrl-C", {0: 130}, [])

    monkeypatch.setattr("hires.launcher.kinds.this_machine.launch", launch)
    int8 = "task=infer", "precision=int8", "data=synthetic", "quant.images=10"
    answer = hires("sweep", *SMALL, *int8, "seed=1,2")
    assert answer.code == 130, answer.err
    assert "was cancelled, so there are no scales" in answer.err
    assert len(begun) == 1


def test_folder_that_takes_no_files_is_refused_before_the_calibration(hires, ranks):
    answer = hires(*NET, "data=synthetic", "out=/proc/x.safetensors")
    assert answer.code == 2
    assert "cannot write /proc: it takes no new files" in answer.err
    assert "choose a folder that you may write to with out=FILE" in answer.err
    assert not ranks


@pytest.mark.usefixtures("quantised")
def test_scales_of_another_network_are_named(hires):
    held = json.loads(Path("n8.json").read_text())
    Path("other.json").write_text(json.dumps({**held, "network": "0" * 64, "weights": ""}))
    answer = hires("plan", *SMALL, "task=infer", "precision=int8", "quant.scales=other.json")
    assert re.search(r"the scales of quant\.scales=\S*other\.json are of another", answer.err), (
        answer
    )
