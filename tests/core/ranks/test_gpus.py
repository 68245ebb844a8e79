"""Are the GPUs and the torch of this machine found without importing torch?"""

from __future__ import annotations

import pytest

from hires.core.ranks import gpus


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("", []),
        ("1", ["1"]),
        ("2, 0", ["2", "0"]),
        ("-1", []),
        ("0,-1,1", ["0"]),
        ("NoDevFiles", []),
        ("GPU-8a1b,MIG-3c/1/0", ["GPU-8a1b", "MIG-3c/1/0"]),
    ],
)
def test_visible_gpus_are_counted_as_cuda_counts_them(visible, expected):
    assert gpus.visible_gpus(4, {"CUDA_VISIBLE_DEVICES": visible}) == expected


def test_fewer_gpus_than_are_visible_count():
    assert gpus.visible_gpus(1, {"CUDA_VISIBLE_DEVICES": "2,0"}) == ["2"]
    assert gpus.visible_gpus(0, {"CUDA_VISIBLE_DEVICES": "2,0"}) == []
    assert gpus.visible_gpus(None, {"CUDA_VISIBLE_DEVICES": "2,0"}) == ["2", "0"]


def test_cards_without_a_driver_are_found(tmp_path, monkeypatch):
    facts = {"gpu": ("0x10de", "0x030200"), "sound": ("0x10de", "0x040300")}
    facts |= {"other": ("0x8086", "0x030000")}
    for name, (vendor, kind) in facts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    monkeypatch.setattr(gpus, "_PCI", tmp_path)
    assert gpus.cards() == 1
    monkeypatch.setattr(gpus, "_DRIVER", tmp_path / "none")
    assert gpus.driver() is None
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23\nGCC version:"
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(gpus, "_DRIVER", tmp_path)
    assert gpus.driver() == "570.86.15"


def test_installed_torch_is_read_as_text():
    found = gpus.installed_torch()
    assert found is not None
    assert found.version[0].isdigit()
    cpu = gpus.torch_of("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip = '6'\n")
    assert cpu == ("2.13.0+cpu", None)
