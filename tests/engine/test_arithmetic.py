"""Is a precision refused or warned of where the device does not have it?"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hires.core.config.precision_config import CPU_FLAGS
from hires.core.config.run_config import from_dict
from hires.core.errors import ConfigError
from hires.engine.device import RankDevice, prepare_arithmetic
from hires.plan import checks


class Ampere(RankDevice):
    """A device with TF32."""

    has_tf32 = True
    allowed: bool | None = None

    def set_tf32(self, allowed: bool) -> None:
        self.allowed = allowed


def config_of(name: str, **keys):
    return from_dict({"precision": {"name": name}, "device": "cpu", **keys})


GRAPH = SimpleNamespace(nodes=[SimpleNamespace(args={"largest": 127})])


def test_tf32_is_refused_before_a_run_and_by_a_rank():
    [found] = checks.check_precision(config_of("tf32"), GRAPH)
    assert (found.severity, found.key) == ("error", "precision")
    assert "compute capability 8" in found.text
    assert not [*checks.check_precision(config_of("tf32", device="cuda"), GRAPH)]
    with pytest.raises(ConfigError, match="rank 3 has none; use precision=fp32"):
        prepare_arithmetic(config_of("tf32"), RankDevice(), 3)
    device = Ampere()
    for name in ("fp32", "tf32"):
        prepare_arithmetic(config_of(name), device, 1)
        assert device.allowed is (name == "tf32")


@pytest.mark.parametrize("name", CPU_FLAGS)
def test_plan_warns_where_the_cpu_lacks_instructions(name, monkeypatch):
    monkeypatch.setattr(checks, "cpu_flags", lambda: {"avx2"})
    infer = {"name": "infer"}
    [found] = checks.check_precision(config_of(name, task=infer), GRAPH)
    assert (found.severity, found.key) == ("warning", "precision")
    assert CPU_FLAGS[name][0] in found.text
    assert checks.EMULATED[name] in found.text
    assert not [*checks.check_precision(config_of("fp32", task=infer), GRAPH)]
    for flag in CPU_FLAGS[name]:
        monkeypatch.setattr(checks, "cpu_flags", lambda flag=flag: {"avx2", flag})
        assert not [*checks.check_precision(config_of(name, task=infer), GRAPH)]
    monkeypatch.setattr(checks, "cpu_flags", lambda: set())  # not shown, as on ARM
    assert not [*checks.check_precision(config_of(name, task=infer), GRAPH)]


@pytest.mark.parametrize(
    ("task", "precision", "weights", "held", "autocast"),
    [
        ("train", "fp16", "auto", "float32", "float16"),
        ("infer", "fp16", "auto", "float16", None),
        ("infer", "bf16", "fp32", "float32", "bfloat16"),
        ("train", "tf32", "auto", "float32", None),
    ],
)
def test_types_of_weights_and_products(task, precision, weights, held, autocast):
    config = from_dict(
        {"task": {"name": task}, "precision": {"name": precision, "weights": weights}}
    )
    assert (config.image_type, config.autocast_type) == (held, autocast)
    assert config.scales_loss is (task == "train" and precision == "fp16")
