"""The fastest of kernels with the same bits is taken, found by a measurement that is kept."""

from __future__ import annotations

import json
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hires.parallel import kernel_choice
from hires.parallel.kernel_choice import LEAST_WORK, fastest, random_numbers, sample_shape

WHAT = {"operator": "test", "input": [1, 2]}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel_choice._kept.cache_clear()
    yield tmp_path / "hires" / "kernels"
    kernel_choice._kept.cache_clear()


class Kernels:
    """Two kernels of one operator, which remember their calls."""

    def __init__(self, slow: str, other_bits: bool = False) -> None:
        self.built: list[str] = []
        self._slow, self._other_bits = slow, other_bits

    def build(self, name):
        self.built.append(name)

        def compute():
            if name == self._slow:
                time.sleep(0.02)
            wrong = self._other_bits and name == "second"
            return torch.tensor([1.0 + wrong])

        return compute

    def choice(self, work: int = LEAST_WORK) -> str:
        return fastest(WHAT, work, ["first", "second"], self.build)


@pytest.mark.parametrize(("slow", "taken"), [("first", "second"), ("second", "first")])
def test_fastest_is_taken_and_kept(cache, slow, taken):
    kernels = Kernels(slow)
    assert kernels.choice() == taken
    [path] = cache.iterdir()
    [line] = [json.loads(line) for line in path.read_text().splitlines()]
    assert (line["what"], line["kernel"]) == (WHAT, taken)
    kernel_choice._kept.cache_clear()  # as in a process that starts later
    later = Kernels(taken)
    assert later.choice() == taken
    assert later.built == [], "it was measured again"


def test_first_kernel_that_makes_nan_stands(monkeypatch):
    monkeypatch.setattr(torch, "equal", lambda a, b: False)
    assert Kernels("first").choice() == "first"


def test_kernel_of_other_bits_is_never_taken():
    assert Kernels("first", other_bits=True).choice() == "first"


def test_first_is_taken_unmeasured_for_little_work_and_in_rehearsals(cache):
    kernels = Kernels("first")
    assert kernels.choice(LEAST_WORK - 1) == "first"
    with FakeTensorMode():
        assert kernels.choice() == "first"
    assert kernels.built == []
    assert not cache.exists()


@pytest.mark.parametrize("content", ["{", '["kernel"]\n', '{"what": 1, "kernel": {}}\n', "\x00"])
def test_damaged_files_are_measured_again(cache, content):
    Kernels("first").choice()
    [path] = cache.iterdir()
    path.write_text(content)
    kernel_choice._kept.cache_clear()
    assert Kernels("first").choice() == "second"


def test_choice_that_has_changed_is_measured_again(cache):
    assert Kernels("first").choice() == "second"
    [path] = cache.iterdir()
    path.write_text(path.read_text().replace("second", "first"))
    kernel_choice._kept.cache_clear()
    assert Kernels("first").choice() == "second"


def test_file_of_another_version_that_names_an_unknown_kernel(cache):
    Kernels("first").choice()
    [path] = cache.iterdir()
    path.write_text(json.dumps({"what": WHAT, "kernel": "third"}) + "\n")
    kernel_choice._kept.cache_clear()
    assert Kernels("first").choice() == "second"


def test_folder_that_cannot_be_written_costs_only_the_measurement(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    kernel_choice._kept.cache_clear()
    assert Kernels("first").choice() == "second"


def test_samples_are_small_parts_of_maps():
    assert sample_shape([8, 64, 32, 32], 256) == [8, 64, 32, 32]
    n, channels, rows, columns = sample_shape([8, 64, 8192, 8192], 256)
    assert (n, channels, columns) == (1, 64, 8192)
    assert rows == 64
    assert random_numbers([1, 2, 3, 4]).is_contiguous(memory_format=torch.channels_last)
