"""Files of scales: whole ones come back, all others are a ConfigError that says why."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest

from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import ConfigError
from hires.quant.affine import Affine
from hires.quant.scales import Scales, calibration_key, read_scales, scales_of, write_scales

GOOD = Scales(
    "0123456789abcdef",
    "entropy",
    256,
    {"input": Affine(0.015686274509803921, 128), "conv1": Affine(0.1, 0)},
    {"input": (-2.0, 2.0), "conv1": (0.0, 25.5)},
    {"fc": "quant.keep"},
    {"conv1": 41.25},
    source="fedcba9876543210",
)


DAMAGE = {
    "another version": {"version": 1},
    "no values": {"values": None},
    "a scale of zero": {"values": {"input": [0.0, 3], "conv1": [0.1, 0]}},
    "nan": {"values": {"input": [float("nan"), 3], "conv1": [0.1, 0]}},
    "a scale that float32 cannot hold": {"values": {"input": [1e-60, 3], "conv1": [0.1, 0]}},
    "a zero point of 9 bits": {"values": {"input": [0.1, 256], "conv1": [0.1, 0]}},
    "a zero point below 0": {"values": {"input": [0.1, -1], "conv1": [0.1, 0]}},
    "half a zero point": {"values": {"input": [0.1, 2.5], "conv1": [0.1, 0]}},
    "a list of values": {"values": [1, 2]},
    "a scale of names": {"values": {"input": {"scale": 1}}},
    "a value without a range": {"ranges": {"input": [-2.0, 2.0]}},
    "a range upside down": {"ranges": {"input": [2.0, -2.0], "conv1": [0.0, 1.0]}},
    "no images": {"images": 0},
    "a hostile name": {"kept": {"\x1b[2J": "x"}},
    "a list of kept": {"kept": ["fc"]},
    "scales of linear layers that are none": {"linear": "sometimes"},
    "weights of 6 bits": {"weight_type": "int6"},
    "a signal that is none": {"auto": {"asked_db": 30, "signal_db": "31", "images": 4}},
}


def test_wrong_numbers_are_refused(tmp_path):
    for damage in DAMAGE.values():
        (tmp_path / "a.json").write_text(json.dumps(json.loads(GOOD.text()) | damage))
        with pytest.raises(ConfigError, match=r"a\.json.*again with `hires quantize`") as refused:
            read_scales(tmp_path / "a.json")
        assert "\x1b" not in str(refused.value)
        assert len(str(refused.value)) < 600


def test_calibration_is_named_by_all_that_decides_its_scales_and_no_more():
    inputs = {name: name for name in ("network", "data", "weights")}
    keys = {
        "image": [48, 48], "seed": 1, "model": {"name": "unet"}, "data": {"length": 7},
        "precision": {"name": "fp64"}, "quant": {"images": 7}, "engine": {"fuse": "off"},
    }  # fmt: skip
    names = [calibration_key(RunConfig(), inputs | {name: "other"}) for name in inputs]
    names += [calibration_key(from_dict({key: one}), inputs) for key, one in keys.items()]
    others = {"batch": 8, "steps": 9}, {"parallel": {"tiles": [2, 1]}}, {"quant": {"keep": ["fc"]}}
    others += ({"quant": {"weights": "int7"}},)
    same = {calibration_key(from_dict(one), inputs) for one in ({}, *others)}
    # What stays in float is a part of what quant.auto chooses from.
    names += [calibration_key(from_dict({"quant": {"auto": "30dB", "keep": k}}), inputs)
              for k in ([], ["fc"])]  # fmt: skip
    assert (len({*names, *same}), len(same)) == (len(inputs) + len(keys) + 3, 1)


def test_every_fact_is_kept_and_decides_the_digest(tmp_path):
    write_scales(tmp_path / "a.json", GOOD)
    assert read_scales(tmp_path / "a.json") == GOOD
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    auto = {"asked_db": 30.0, "signal_db": 31.5, "images": 4.0}
    for keys in ({"auto": auto}, {"alone": {"conv1": 31.0}}):
        new = dataclasses.replace(GOOD, **keys)
        write_scales(tmp_path / "a.json", new)
        assert read_scales(tmp_path / "a.json") == new
        assert new.digest != GOOD.digest
        assert new.mark != GOOD.mark


def test_truncated_files_and_missing_keys_are_refused(tmp_path):
    text = GOOD.text().rstrip()
    for end in range(0, len(text), 29):
        (tmp_path / "a.json").write_text(text[:end])
        with pytest.raises(ConfigError, match="no whole JSON"):
            read_scales(tmp_path / "a.json")
    for key in json.loads(text):
        held = json.loads(text)
        del held[key]
        (tmp_path / "a.json").write_text(json.dumps(held))
        with pytest.raises(ConfigError, match=f"no '{key}'"):
            read_scales(tmp_path / "a.json")


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "deep.json").write_text("[" * 10**5)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "list.json").write_text("[1]")
    for path in tmp_path.iterdir():
        with pytest.raises(ConfigError, match=path.name):
            read_scales(path)
    with pytest.raises(ConfigError, match="does not exist"):
        read_scales(tmp_path / "none.json")


def test_scales_stand_beside_the_weights_or_are_named(tmp_path):
    config = RunConfig()
    assert scales_of(config) is None
    beside = dataclasses.replace(config, weights=str(tmp_path / "net.safetensors"))
    assert scales_of(beside) is None
    write_scales(tmp_path / "net.json", GOOD)
    assert scales_of(beside) == GOOD
    quant = dataclasses.replace(config.quant, scales=str(tmp_path / "other.json"))
    with pytest.raises(ConfigError, match=r"quant\.scales=.* does not exist"):
        scales_of(dataclasses.replace(beside, quant=quant))
