"""``hires quantize`` calibrates on what was asked for, finds it again, leaves whole files or none,
and says what the scales are worth; its file is read in any layout as it is, and refused if it was
changed."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from hires.cli.compose_config import compose
from hires.core.errors import ConfigError
from hires.core.store import frozen, records, rundir
from hires.core.store.ends import End
from hires.core.store.network_weights import find_weights
from hires.plan.passes.int8 import observed_values, params_digest
from hires.plan.plan import Plan
from hires.quant.affine import affine_of
from hires.quant.scales import Scales, calibration_key, read_scales, write_scales
from tests.helpers.commands import SMALL

pytestmark = pytest.mark.usefixtures("traced")
REAL = ("quantize", *SMALL, "quant.images=10")
"""Names no data."""
QUANTIZE = (*REAL, "data=synthetic")
AUTO = (*QUANTIZE, "quant.auto=30dB", "--out=a.safetensors")
INT8 = ("plan", *SMALL, "task=infer", "precision=int8", "weights=n8.safetensors")
INT8_OF_IMAGES = (*SMALL, "task=infer", "precision=int8", "data=synthetic", "quant.images=10")
INT8_OF_IMAGES += ("quant.keep=[fc]",)  # as ``quantised``
FILE, SCALES = Path("n8.safetensors"), Path("n8.json")


@pytest.fixture
def ranks(monkeypatch, traced):
    """Stands for the ranks: writes the scales that ranks would, and keeps the frozen configs."""
    seen, alone = [], {"conv1": 41.25, "fc": 38.5}

    def launch(path, attempt, *, args, on_line):
        config = yaml.safe_load((path / "config.yaml").read_text())
        seen.append(config)
        key = calibration_key(records.read_config(path), frozen.read(path).inputs.digests)
        graph = Plan.from_dict(records.read_plan(path)).graph
        ranges = dict.fromkeys(observed_values(graph), (-2.0, 2.0))
        values = {name: affine_of(*ends) for name, ends in ranges.items()}
        facts = params_digest(graph), config["quant"]["observer"], config["quant"]["images"]
        asks = config["quant"]["auto"] is not None
        auto = {"asked_db": 30.0, "images": 4.0, "operators": 20, "signal_db": 31.5}
        more = {"auto": auto, "alone": alone} if asks else {}
        more["noise"] = {name: 60.0 - k for k, name in enumerate(values)}
        scales = Scales(*facts, values, ranges, source=key, **more)
        write_scales(path / f"a{attempt}" / "scales.json", scales)
        End("done", exit_codes={0: 0}).write(path, attempt)
        return End("done", exit_codes={0: 0})

    monkeypatch.setattr("hires.launcher.kinds.this_machine.launch", launch)
    return seen


@pytest.fixture
def quantised(hires, ranks):
    answer = hires(*QUANTIZE, "quant.keep=[fc]", "--out=n8.safetensors")
    assert answer.code == 0, answer.err
    return answer


def test_scales_and_weights_are_written_and_the_worst_values_shown(hires, ranks, traced):
    answer = hires(*QUANTIZE, "parallel=sp", "precision=int8", "--out=net.safetensors")
    assert answer.code == 0, answer.err
    assert "no weights=PATH" in answer.err
    assert "made-up images" in answer.err
    [config] = ranks
    assert (config["task"]["name"], config["precision"]["name"]) == ("calibrate", "fp32")
    assert config["steps"] == 3  # of 4 images, for 10
    assert config["parallel"]["tiles"] == [2, 1]
    scales = read_scales("net.json")
    worst, noise = min(scales.noise.items(), key=lambda item: item[1])
    assert all(text in answer.out for text in (worst, f"{noise:.1f}", "40.0 MiB -> 10.0 MiB"))
    assert scales.values["input"] == affine_of(-2.0, 2.0)
    assert [path.name for path in sorted(Path().glob("net*"))] == ["net.json", "net.safetensors"]
    # Layers that stay in float are not counted.
    every, less = (
        json.loads(hires(*QUANTIZE, "--out=net.safetensors", "--json", f"quant.keep={keep}").out)
        for keep in ("[]", "[fc]")
    )
    assert every["quantised"] == sum(node.kind == "conv2d" for node in traced.nodes) + 1
    assert less["quantised"] == every["quantised"] - 1


def test_weights_of_7_bits_are_offered_with_what_they_cost(hires, ranks, monkeypatch):
    for flags, weights, recommends in (
        ({"avx2", "avx_vnni"}, "int8", False),
        ({"avx2"}, "int8", True),
        ({"avx2"}, "int7", False),
    ):
        monkeypatch.setattr("hires.plan.checks.cpu_flags", lambda flags=flags: flags)
        answer = hires(*QUANTIZE, f"quant.weights={weights}", "--out=n8.safetensors")
        assert answer.code == 0, answer.err
        assert "quant.weights=int8: 33.2 dB\n" in answer.out
        assert "quant.weights=int7: 27.5 dB, 97.5 % of the classes of fp32\n" in answer.out
        assert ("recommended here: quant.weights=int7" in answer.out) is recommends
        assert read_scales(SCALES).weight_type == weights
    assert len(ranks) == 1  # the ranges are the same
    # A run takes what the file holds.
    plan = Plan.from_dict(json.loads(hires(*INT8, "--json").out))
    assert plan.graph.by_name["conv1"].args["largest"] == 63
    assert not [one for one in plan.findings if "would saturate" in one.text]
    # Scales of a file serve float weights, too, with integers of any range.
    scales = "quant.scales=n8.json", "weights=null"
    for weights, warns in (("int8", True), ("int7", False)):
        answer = hires(*INT8, *scales, f"quant.weights={weights}", "--json")
        findings = Plan.from_dict(json.loads(answer.out)).findings
        assert any("would saturate" in one.text for one in findings) is warns


def test_images_without_classes_calibrate(hires, ranks, tmp_path):
    for number in range(2):
        Image.new("RGB", (32, 32), (number, 9, 200)).save(tmp_path / f"{number}.png")
    keys = "data=images", f"data.path={tmp_path}", "model.classes=10", "quant.images=2", "batch=2"
    answer = hires("quantize", *SMALL, *keys, "--out=net.safetensors")
    assert answer.code == 0, answer.err
    assert ranks[0]["data"]["name"] == "images"


def test_layers_are_chosen_with_the_scales_of_an_earlier_calibration(hires, ranks):
    assert hires(*QUANTIZE, "--out=a.safetensors").code == 0
    answer = hires(*AUTO, "parallel=sp", "quant.keep=[fc]")
    assert answer.code == 0, answer.err
    plain, choosing = ranks
    assert "choosing layers with the scales of an earlier calibration" in answer.err
    assert choosing["quant"]["scales"].endswith("scales.json")
    assert (plain["steps"], choosing["steps"]) == (3, 1)
    assert hires(*AUTO, "--again").code == 0
    assert ranks[2]["quant"]["scales"] is None


def test_earlier_calibration_is_found_whatever_its_layout(hires, ranks):
    words = "quant.calibration=noise", "--json"
    first = json.loads(hires(*REAL, *words, "--out=a.json").out)
    again = hires(*REAL, *words, "parallel=sp", "batch=8", "--out=b.json")
    assert len(ranks) == 1
    assert json.loads(again.out)["calibration"] == first["calibration"]
    assert "reusing an earlier calibration" in again.err
    assert Path("a.json").read_text() == Path("b.json").read_text()
    others = "quant.observer=min_max", "seed=1", "engine.fuse=off", "--again"
    for number, more in enumerate(others, 2):
        answer = hires(*REAL, *words, more, "--out=c.json")
        assert (answer.code, len(ranks)) == (0, number), answer.err
    # One that lacks values, as one that left layers in float, is made again.
    values = json.loads(Path(first["calibration"]).read_text())
    for name in ("values", "ranges", "noise"):
        del values[name]["fc"]
    for file in Path("results").glob("calibrations/*/a*/scales.json"):
        file.write_text(json.dumps(values))
    assert hires(*REAL, *words, "--out=a.json").code == 0
    assert (len(ranks), "fc" in read_scales("a.json").values) == (6, True)


def test_network_is_prepared_as_that_of_a_run(hires, ranks):
    # The layout stayed open.
    answer = hires(*QUANTIZE, "parallel=auto", "ranks=2", "--out=a.json")
    assert answer.code == 0, answer.err
    assert "note: parallel=auto chose parallel." in answer.err
    assert ranks[0]["parallel"]["name"] != "auto"


def test_verification_takes_an_earlier_calibration(hires, quantised, monkeypatch):
    # It was looked for in the folder that a verification leaves nothing in.
    launch = "hires.launcher.kinds.this_machine.launch"
    monkeypatch.setattr(launch, lambda *_, **__: End("done", exit_codes={0: 0}))
    answer = hires("verify", *INT8_OF_IMAGES)
    assert "reusing an earlier calibration" in answer.err
    assert (answer.code, "without comparing" in answer.err) == (1, True)


def test_scales_of_earlier_calibrations_are_read_once_in_a_command(hires, quantised, monkeypatch):
    files = []
    read = "hires.cli.planning.read_scales"
    monkeypatch.setattr(read, lambda path: files.append(path) or read_scales(path))
    answer = hires("sweep", *INT8_OF_IMAGES, "steps=2,4", "--dry-run")
    assert (answer.code, len(files)) == (0, 1), answer.err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--out=a.json"], "needs real images and none are named"),
        (["data=synthetic", "quant.images=5000", "--out=a.json"], "5000 .*than the 1024 images"),
        (["data=synthetic", "--out=a.pt"], "must end in .safetensors"),
        (["data=synthetic", "--out=a.json", "quant.keep=[no_such]"], "no_such names no layer"),
        (["data=synthetic", "--out=a.json", "precision=int8", "task=train"], "task=train learns"),
        (
            ["data=synthetic", "quant.scales=b.json", "--out=a.json"],
            "makes scales of its own; leave",
        ),
        (["data=synthetic", "--out=/proc/x.safetensors"], "cannot write /proc: "),
        (["data=synthetic", "--out=mine.safetensors"], "mine.json, which `hires quantize` has not"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_rank_starts(hires, ranks, words, text):
    Path("mine.json").write_text('{"mine": 1}')
    answer = hires(*REAL, *words)
    assert answer.code == 2, answer.err
    assert re.search(text, answer.err), answer.err
    assert (ranks, Path("a.json").exists()) == ([], False)
    assert Path("mine.json").read_text() == '{"mine": 1}'


def test_full_disk_leaves_an_earlier_pair_or_nothing(hires, ranks, monkeypatch):
    def full(path, scales):
        raise ConfigError("cannot write n8.json: No space left on device")

    for earlier in (False, True):
        if earlier:
            assert hires(*QUANTIZE, "--out=n8.safetensors").code == 0
        before = {path.name: path.read_bytes() for path in Path().glob("*n8*")}
        with monkeypatch.context() as patch:
            patch.setattr("hires.cli.verbs.verb_quantize.write_scales", full)
            answer = hires(*QUANTIZE, "--out=n8.safetensors", "quant.keep=[fc]")
        assert (answer.code, "No space left" in answer.err) == (2, True)
        assert {path.name: path.read_bytes() for path in Path().glob("*n8*")} == before


@pytest.mark.parametrize(
    ("state", "code", "how"), [("failed", 1, "failed"), ("cancelled", 130, "was cancelled")]
)
def test_calibration_that_does_not_end_well_leaves_no_file(hires, monkeypatch, state, code, how):
    ended, begun = End(state, "conv1 cannot be calibrated", exit_codes={0: code}), []
    launch = "hires.launcher.kinds.this_machine.launch"
    monkeypatch.setattr(launch, lambda *a, **k: begun.append(a) or ended)
    answer = hires(*QUANTIZE, "--out=n8.safetensors")
    assert answer.code == code
    assert f"{how}, so there are no scales: conv1 cannot be calibrated" in answer.err
    assert not list(Path().glob("n8*"))
    # Ctrl-C in a calibration ends a sweep: it was a point that cannot run, and the next one began.
    begun.clear()
    int8 = "task=infer", "precision=int8", "data=synthetic", "quant.images=10", "seed=1,2"
    # It was begun before the points were shown, and for those that cannot run, too.
    answer = hires("sweep", *SMALL, *int8, "parallel.stages=1,200")
    assert answer.code == code, answer.err
    assert len(begun) == (1 if state == "cancelled" else 2)
    assert "4 points: 2 to run, 0 complete, 2 excluded" in answer.out


def test_keys_that_contradict_a_quantised_file_are_refused(hires, quantised, ranks):
    scales = json.loads(SCALES.read_text())
    Path("other.json").write_text(json.dumps({**scales, "network": "0" * 64, "weights": ""}))
    for (verb, *more), text in (
        (("plan", "quant.keep=[fc,conv1]"), "was quantised with conv1 in 8 bits; quantise the"),
        (("plan", "quant.auto=30dB"), "n8.json has scales already; leave quant.auto out"),
        (("run", "data=synthetic", "quant.auto=30dB"), "chooses layers while it calibrates"),
        (("plan", "precision=fp32"), "holds a quantised network; use it with task=infer"),
        (("plan", "task=calibrate", "quant.calibration=noise"), "use it with task=infer"),
        (("plan", "quant.linear=dynamic"), "n8.safetensors, which holds linear layers with static"),
        (("plan", "quant.weights=int7"), "n8.safetensors, which holds weights of int8; leave it"),
        (("plan", "quant.scales=other.json"), "n8.safetensors, which has scales of its own"),
        (("plan", "weights=null", "quant.scales=other.json"), "other.json are of another"),
    ):
        answer = hires(verb, *INT8[1:], *more)
        assert (answer.code, text in answer.err) == (2, True), answer.err
    assert len(ranks) == 1


def test_layer_kept_by_name_stays_in_float_where_the_file_is_read(hires, quantised):
    assert "quant.keep=fc" in quantised.out
    plan = Plan.from_dict(json.loads(hires(*INT8, "parallel=sp", "--json").out))
    assert plan.graph.by_name["fc"].kind == "linear"
    assert not any(fact.recipe for fact in plan.graph.params.values())
    assert hires(*QUANTIZE, "--out=n8.safetensors").code == 0  # an earlier pair is overwritten
    assert read_scales("n8.json").kept == {}
    SCALES.unlink()
    answer = hires("run", *INT8[1:], "data=synthetic")
    assert answer.code == 2
    assert "n8.json with its scales is missing; copy it from where" in answer.err


def damage(name: str) -> str:
    """Damages the pair of files; returns the name of the tensor that was changed."""
    tensors = load_file(FILE)
    with safe_open(FILE, framework="np") as file:
        facts = file.metadata()
    weight = next(n for n, tensor in tensors.items() if tensor.dtype == np.int8)
    scales = json.loads(SCALES.read_text())
    if name == "other numbers":
        save_file({**tensors, weight: tensors[weight] + np.int8(1)}, FILE)
    elif name == "a tensor less":
        save_file({n: tensor for n, tensor in tensors.items() if n != weight}, FILE, facts)
    elif name == "other type":
        save_file({**tensors, weight: tensors[weight].astype(np.float32)}, FILE, facts)
    elif name == "no scales named":
        save_file(tensors, FILE)
    elif name == "another network":
        scales["network"] = "0" * 16
    elif name == "other scales":
        scale, zero_point = scales["values"]["input"]
        scales["values"]["input"] = [3 * scale, zero_point]
    if name not in ("other numbers", "another network"):
        scales["weights"] = find_weights(str(FILE)).digest()  # the digest fits
    SCALES.write_text(json.dumps(scales))
    return weight


def test_files_that_do_not_belong_together_are_refused(hires, quantised):
    kept = {path: path.read_bytes() for path in (FILE, SCALES)}
    for name, text in (
        ("other numbers", "not the file that the scales beside it"),
        ("a tensor less", "1 missing (conv1:weight8); use"),
        ("another network", "are of another network"),
        ("other type", "other types: WEIGHT is float32 there and int8 here"),
        ("no scales named", "does not say which scales belong to it"),
        ("other scales", "are not those that it was written with"),
    ):
        for path, data in kept.items():
            path.write_bytes(data)
        text = text.replace("WEIGHT", damage(name))
        answer = hires(*INT8)
        assert (answer.code, text in answer.err) == (2, True), answer.err


def test_network_image_and_images_are_those_of_the_run_of_the_weights(hires, tmp_path):
    keys = ["data=digits", "image=[16,20]", "model=preact_resnet", "model.depth=11", "epochs=1"]
    config = compose([*keys, "model.channels=1", "validate.every=epoch"])
    run = rundir.create(dataclasses.replace(config, results=str(tmp_path)), {}, ["hires"]).path
    for words in ((), ("task=infer", "data.shuffle=true"), ("precision=int8", "data=digits")):
        answer = hires("quantize", f"weights={run}", *words, "--cfg=job", "--json")
        assert answer.code == 0, answer.err
        made = json.loads(answer.out)
        assert (made["image"], made["model"]["depth"], made["model"]["channels"]) == (
            [16, 20],
            11,
            1,
        )
        data = made["data"]
        assert (data["name"], data["split"]) == (
            "digits",
            "all" if "data=digits" in words else "train",
        )
    answer = hires("quantize", f"weights={run}", "model=resnet50", "--cfg=job", "--json")
    assert json.loads(answer.out)["model"]["name"] == "resnet"
