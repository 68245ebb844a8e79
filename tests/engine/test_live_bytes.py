"""Are the bytes alive those of the tensors that a program holds, each counted once?"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from hires.engine.live_bytes import LiveBytes


def test_views_count_once_and_freed_storages_not_at_all():
    with LiveBytes() as live:
        x = torch.zeros(10)
        view = x[2:]
        assert live.now["activations"] == 40
        y = x + 1
        del y
        assert live.now["activations"] == 40
        del x
        assert live.now["activations"] == 40
        del view
    assert live.now["activations"] == 0
    assert sum(live.at_peak.values()) == 80


def test_convolution_holds_its_weights_twice_while_it_runs():
    x, weight = torch.zeros(2, 4, 8, 8), torch.zeros(6, 4, 3, 3)
    with LiveBytes() as live:
        F.conv2d(x, weight, padding=1)
    output = 2 * 6 * 8 * 8 * 4
    assert live.at_peak["activations"] == output
    assert live.at_peak["buffers"] == weight.numel() * 4


def test_small_image_or_float64_is_written_out_in_columns():
    for dtype, batch in ((torch.float32, 1), (torch.float64, 2)):
        x, weight = torch.zeros(batch, 4, 8, 8, dtype=dtype), torch.zeros(6, 4, 3, 3, dtype=dtype)
        with LiveBytes() as live:
            F.conv2d(x, weight, padding=1)
        assert live.at_peak["buffers"] == batch * 8 * 8 * 4 * 3 * 3 * x.element_size()


def test_fake_tensors_count_as_real_ones():
    def work() -> dict[str, int]:
        with LiveBytes() as live:
            x = torch.ones(4, 3, 16, 16, requires_grad=True)
            y = F.conv2d(x, torch.ones(8, 3, 3, 3, requires_grad=True)).relu()
            torch.autograd.backward(y.sum())
        return live.at_peak

    real = work()
    with FakeTensorMode():
        assert work() == real
