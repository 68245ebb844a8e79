"""Does a Lightning module on tiles train as the plain module does?"""

from __future__ import annotations

import pytest

from tests.helpers.adapter_jobs import train_with_lightning
from tests.helpers.ranks import run_ranks

pytest.importorskip("lightning", reason="needs hires[adapters]")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("net", "ranks", "gather"), [("whole", 2, "local"), ("of samples", 4, "full")]
)
def test_trainer_moves_the_parameters_as_plain_torch_does(net, ranks, gather):
    for names, errors in run_ranks(train_with_lightning, ranks, net, gather):
        assert "model.first.weight" in names
        assert max(errors) < 1e-10
