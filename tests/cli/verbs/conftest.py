"""Ranks that find scales at once, for verbs that quantise."""

from __future__ import annotations

from typing import ClassVar

import pytest
import yaml

from hires.core.store import frozen, records
from hires.core.store.ends import write_exit
from hires.launcher.local.local_launcher import Outcome
from hires.plan.calibrated_values import observed_values, params_digest
from hires.plan.plan import Plan
from hires.quant.affine import affine_of
from hires.quant.scales import Scales, calibration_key, write_scales
from tests.helpers.commands import QUANTIZE


class Seen(list):
    """Configs, and what the int8 network of ``quant.auto`` has."""

    signal_db = 31.5
    operators = 20
    alone: ClassVar[dict[str, float]] = {"conv1": 41.25, "fc": 38.5}
    min_max_noise: ClassVar[dict[str, float]] = {}


@pytest.fixture
def ranks(monkeypatch, traced):
    """Stands for the ranks: writes the scales that ranks would, and keeps the frozen configs."""
    seen = Seen()

    def launch(path, attempt, *, args, on_line):
        assert args == ()
        config = yaml.safe_load((path / "config.yaml").read_text())
        seen.append(config)
        key = calibration_key(records.read_config(path), frozen.read(path).inputs.digests)
        graph = Plan.from_dict(records.read_plan(path)).graph
        ranges = dict.fromkeys(observed_values(graph), (-2.0, 2.0))
        values = {name: affine_of(*ends) for name, ends in ranges.items()}
        noise = {name: 60.0 - k for k, name in enumerate(values)}
        facts = params_digest(graph), config["quant"]["observer"], config["quant"]["images"]
        asks = config["quant"]["auto"] is not None
        auto = {"asked_db": 30.0, "images": 4.0, "operators": seen.operators} if asks else {}
        auto |= {"signal_db": seen.signal_db} if asks and seen.operators else {}
        auto = {"auto": auto, "alone": seen.alone if asks else {}}
        all_kept = {} if seen.operators else seen.alone
        auto["kept"] = {name: f"quant.auto: {db:.1f} dB alone" for name, db in all_kept.items()}
        auto["min_max_noise"] = seen.min_max_noise
        scales = Scales(*facts, values, ranges, noise=noise, source=key, **auto)
        write_scales(path / f"a{attempt}" / "scales.json", scales)
        write_exit(path, attempt, {"state": "done", "cause": None, "exit_codes": {0: 0}})
        return Outcome("done", None, {0: 0}, [])

    monkeypatch.setattr("hires.launcher.kinds.this_machine.launch", launch)
    return seen


@pytest.fixture
def quantised(hires, ranks):
    answer = hires(*QUANTIZE, "quant.keep=[fc]", "out=n8.safetensors")
    assert answer.code == 0, answer.err
    return answer
