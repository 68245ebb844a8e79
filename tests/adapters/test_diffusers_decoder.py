"""Does a diffusers VAE decode on tiles what it decodes whole?"""

from __future__ import annotations

import pytest

from tests.helpers.adapter_jobs import decode_with_diffusers
from tests.helpers.ranks import run_ranks

pytest.importorskip("diffusers", reason="needs hires[adapters]")


@pytest.mark.dist
def test_decoded_images_are_those_of_the_plain_decoder():
    for errors in run_ranks(decode_with_diffusers, 2):
        assert len(errors) == 4
        assert max(errors) < 1e-12
