"""Recipes for other libraries compute on tiles what the libraries compute of whole images."""

from __future__ import annotations

import pytest

from tests.helpers.adapter_jobs import decode_with_diffusers, infer_with_monai, train_with_lightning
from tests.helpers.ranks import run_ranks


@pytest.mark.dist
def test_diffusers_decodes_what_its_plain_decoder_does():
    pytest.importorskip("diffusers", reason="needs hires[adapters]")
    for errors in run_ranks(decode_with_diffusers, 2):
        assert len(errors) == 4
        assert max(errors) < 1e-12


@pytest.mark.dist
def test_monai_infers_what_the_network_computes_of_whole_images():
    pytest.importorskip("monai", reason="needs hires[adapters]")
    for errors in run_ranks(infer_with_monai, 4):
        assert len(errors) == 3
        assert max(errors) < 1e-12


@pytest.mark.dist
@pytest.mark.parametrize(
    ("net", "ranks", "gather"), [("whole", 2, "local"), ("of samples", 4, "full")]
)
def test_lightning_moves_the_parameters_as_plain_torch_does(net, ranks, gather):
    pytest.importorskip("lightning", reason="needs hires[adapters]")
    for names, errors in run_ranks(train_with_lightning, ranks, net, gather):
        assert "model.first.weight" in names
        assert max(errors) < 1e-10
