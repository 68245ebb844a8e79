"""Does a MONAI inferer on tiles return what the network computes of whole images?"""

from __future__ import annotations

import pytest

from tests.helpers.adapter_jobs import infer_with_monai
from tests.helpers.ranks import run_ranks

pytest.importorskip("monai", reason="needs hires[adapters]")


@pytest.mark.dist
def test_inferer_returns_what_the_network_computes_of_whole_images():
    for errors in run_ranks(infer_with_monai, 4):
        assert len(errors) == 3
        assert max(errors) < 1e-12
