"""Does the plan warn where a GPU has fewer queues than a rank has streams?"""

from __future__ import annotations

import pytest

from hires.plan import channels
from hires.plan.channels import carriers
from tests.helpers.small_plans import plan_of


@pytest.mark.parametrize(("queues", "warns"), [(6, True), (7, False)])
def test_more_streams_than_queues_are_named(queues: int, warns: bool, monkeypatch):
    monkeypatch.setattr(channels, "MOST_QUEUES", queues)
    plan = plan_of(tiles=[2, 1], stages=2, spatial_stages=1, replicas=2)
    assert not [finding for finding in carriers(plan) if finding.severity != "note"]
    plan.device, plan.backend = "cuda", "nccl"
    [*_, note] = carriers(plan)
    assert "messages (on up to 3 communicators a rank) and sums go" in note.text
    warnings = [finding for finding in carriers(plan) if finding.severity == "warning"]
    # Rank 0: halos, both ways between the stages, sums of its tiles and of its stage's gradients;
    # beside them that which computes and that of the loader.
    assert ["up to 7 streams" in one.text for one in warnings] == [True] * warns


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ({"replicas": 2}, "sums go from GPU to GPU through nccl;"),
        ({"tiles": [2, 1]}, "messages (on one communicator a rank) and sums go from GPU to GPU"),
    ],
)
def test_note_names_messages_only_where_there_are_some(layout, text):
    plan = plan_of(**layout)
    plan.device, plan.backend = "cuda", "nccl"
    [note] = carriers(plan)
    assert note.text.startswith(text)
