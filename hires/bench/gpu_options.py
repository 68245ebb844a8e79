"""Declares and checks the options of ``hires bench gpu``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hires.bench.bench_output import names_of, option
from hires.bench.frozen_runs import run_folders
from hires.bench.gpu_runs import FAMILIES, GRACE_S
from hires.core.errors import ConfigError

DEVICES = ("cuda", "cpu", "simulated")
PARTS = ("runs", "parity", "resume", "precision", "streams", "memory", "speed")


def image_sizes(flag: str, text: str) -> tuple[int, ...]:
    """Returns the sizes of ``256,512``."""
    if not all(size.isdecimal() and int(size) >= 32 for size in text.split(",")):
        raise ConfigError(f"{flag} {text} must be sizes of 32 pixels or more, as 256,512")
    return tuple(map(int, text.split(",")))


@dataclass(frozen=True)
class GpuOptions:
    """The options of ``hires bench gpu``."""

    device: str = option("cuda", "cuda, or cpu or simulated for a rehearsal")
    only: tuple[str, ...] = option(",".join(PARTS), "sections", parse=names_of(PARTS))
    runs: tuple[str, ...] = option(
        (), "run folders frozen for this device, or folders of them", flag="--runs", nargs="+",
        metavar="DIR",
    )  # fmt: skip
    layouts: tuple[str, ...] = option(
        ",".join(FAMILIES), "of parity and memory", parse=names_of(tuple(FAMILIES))
    )
    images: Sequence[int] = option("256,512,1024,2048", "of speed, in pixels", parse=image_sizes)
    tasks: tuple[str, ...] = option("infer,train", "of speed", parse=names_of(("infer", "train")))
    seconds: float = option(450.0, f"after which nothing more begins; {GRACE_S:g} s later all ends")
    timeout: float = option(300.0, "seconds for each run")

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ConfigError(f"--device {self.device} is unknown; use {', '.join(DEVICES)}")
        if self.device == "cuda" and not torch.cuda.is_available():
            why = "this torch is built for CPUs" if torch.version.cuda is None else "no GPU is seen"
            raise ConfigError(f"--device cuda: {why}; --device cpu or simulated is a rehearsal")
        if self.runs and "runs" not in self.only:
            raise ConfigError("--runs needs the section runs; add runs to --only")
        if "runs" in self.only and not self.runs and {*self.only} != {*PARTS}:
            raise ConfigError("--only runs needs run folders; add --runs DIR")
        run_folders("--runs", self.runs)
