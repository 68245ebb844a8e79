"""Makes rows as `hires bench comm` and `hires tune comm` measure them."""

from __future__ import annotations


def row(operation, num_bytes, medians, ranks=2, dtype="float32", near=2, noise=0.0, wrong=()):
    ways = {
        way: {
            "p50_s": seconds,
            "rounds_s": [seconds * (1 - noise / 1.4826), seconds, seconds * (1 + noise / 1.4826)],
            "wrong": int(way in wrong),
        }
        for way, seconds in medians.items()
    }
    return {
        "operation": operation,
        "num_bytes": num_bytes,
        "bytes": num_bytes,
        "dtype": dtype,
        "ranks": ranks,
        "ranks_per_node": near,
        "device": "cpu",
        "ways": ways,
    }
