"""Is a plan drawn as it is? Expected drawings are written out."""

from __future__ import annotations

from hires.cli.screens.show_plan import (
    finding_lines,
    message_lines,
    placement_lines,
    plan_lines,
    proof_lines,
)
from tests.helpers.small_plans import plan_of


def facts(replicas: int, *tiles: list[int]) -> dict:
    """The placement of stages with these tile grids, ranks in order."""
    placement = []
    for replica in range(replicas):
        for stage, (rows, cols) in enumerate(tiles):
            for tile in range(rows * cols):
                where = list(divmod(tile, cols)) if rows * cols > 1 else None
                slot = {"rank": len(placement), "replica": replica, "stage": stage, "tile": where}
                placement.append({**slot, "direction": "down", "shard": None})
    stages = [{"index": i, "tiles": list(grid), "shards": 1} for i, grid in enumerate(tiles)]
    return {"placement": placement, "stages": stages, "world": len(placement)}


def test_one_process():
    assert placement_lines(facts(1, [1, 1])) == ["stage 0", "[ 0 ]"]


def test_tiles_stand_as_they_cut_the_image():
    assert placement_lines(facts(1, [2, 3])) == [
        "stage 0",
        "[ 0 1 2 ]",
        "[ 3 4 5 ]",
    ]


def test_stages_stand_side_by_side_and_replicas_below_each_other():
    assert placement_lines(facts(2, [2, 2], [2, 2], [1, 1])) == [
        "replica 0",
        "stage 0   stage 1   stage 2",
        "[ 0 1 ]   [ 4 5 ]   [ 8 ]",
        "[ 2 3 ]   [ 6 7 ]",
        "replica 1",
        "stage 0     stage 1     stage 2",
        "[  9 10 ]   [ 13 14 ]   [ 17 ]",
        "[ 11 12 ]   [ 15 16 ]",
    ]


def test_one_of_many_replicas_stands_for_all():
    assert placement_lines(facts(100, [1, 2])) == [
        "replica 0",
        "stage 0",
        "[ 0 1 ]",
        "and 99 more replicas, alike, each 2 ranks further",
    ]


def test_directions_stand_below_each_other_and_shards_in_a_column():
    stages = [
        {"index": 0, "tiles": [1, 2], "shards": 1},
        {"index": 1, "tiles": [1, 1], "shards": 2},
    ]
    placement = []
    for direction, ranks in (("down", [0, 1, 2, 3]), ("up", [3, 2, 1, 0])):
        for rank, stage, tile, shard in zip(
            ranks, [0, 0, 1, 1], [[0, 0], [0, 1], None, None], [None, None, 0, 1], strict=True
        ):
            slot = {"rank": rank, "replica": 0, "direction": direction, "stage": stage}
            placement.append({**slot, "tile": tile, "shard": shard})
    assert placement_lines({"placement": placement, "stages": stages}) == [
        "down",
        "stage 0   stage 1",
        "[ 0 1 ]   [ 2 ]",
        "          [ 3 ]",
        "up",
        "stage 0   stage 1",
        "[ 3 2 ]   [ 1 ]",
        "          [ 0 ]",
    ]


def test_messages_by_kind_with_their_sum():
    halo, none = {"messages": 12, "bytes": 3 << 20}, {"messages": 0, "bytes": 0}
    totals = {"messages": 12, "bytes": 3 << 20, "by_kind": {"halo": halo, "join": none}}
    assert message_lines(totals) == [
        "kind  messages    bytes",
        "halo        12  3.0 MiB",
        "all         12  3.0 MiB",
    ]


def test_one_process_sends_nothing():
    assert message_lines({"messages": 0, "bytes": 0, "by_kind": {}}) == ["none"]


def test_errors_come_first_and_name_their_key():
    found = [
        {"severity": "note", "key": "batch", "text": "small"},
        {"severity": "error", "key": "parallel.tiles", "text": "too many"},
    ]
    assert finding_lines(found) == ["error: too many [parallel.tiles]", "note: small [batch]"]


def test_failed_proof_lists_what_it_found_up_to_a_limit():
    proof = {
        "semantics": "rendezvous",
        "backends": ["gloo"],
        "order": "ahead",
        "decides": True,
        "ok": False,
        "messages": 1,
        "collectives": 0,
        "seconds": 0.002,
        "problems": ["deadlock: rank 0 waits; rank 1 waits", *["rank 2 waits"] * 9],
    }
    assert proof_lines([proof]) == [
        "semantics   backends  receives posted   verdict  messages  collectives    time",
        "rendezvous  gloo      one action ahead  FAILS           1            0  2.0 ms",
        "    deadlock: rank 0 waits",
        "      rank 1 waits",
        *["    rank 2 waits"] * 7,
        "    and 2 more; --json shows all",
    ]


def test_tables_and_findings_of_a_plan_fit_a_narrow_screen(monkeypatch):
    plan = plan_of(tiles=[2, 1], stages=3, directions=2, schedule="gems").to_dict()
    plan["findings"] = [{"severity": "note", "key": "memory", "text": "a sentence " * 30}]
    for stage in plan["stages"]:
        stage["last_layer"] = "layer4.1.a_long_name_of_a_layer.conv2"
    whole = plan_lines(plan, ["F0"])
    assert max(map(len, whole)) > 300  # in a file a finding is one line
    monkeypatch.setenv("COLUMNS", "80")
    narrow = plan_lines(plan, ["F0"])
    assert max(map(len, narrow)) <= 80
    [note] = [line for line in narrow if "shows all" in line]
    assert "  (texts are shortened; COLUMNS=" in note or "left out" in note
    stages = narrow[narrow.index("stages") + 1]
    assert stages.split()[:3] == ["stage", "layers", "from"]
