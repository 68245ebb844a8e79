"""Declares the keys of what a run does with its network: ``task``."""

from __future__ import annotations

from dataclasses import dataclass

from hires.core.config.value_checks import Section, choice

INFERENCE = ("infer", "evaluate", "predict")
"""Tasks that compute forward and keep no value for anything else."""
ONE_PASS = ("evaluate", "predict")
"""Tasks that take each sample of the data once, in its order; ``steps`` is what that takes."""


CHOICES = {
    "train": "Forward, backward and a step of the optimiser",
    "infer": "Forward only, batch norms in evaluation mode",
    "evaluate": "Forward only, once over the data: accuracy, predictions of every image",
    "predict": "Forward only, once over the data: writes classes, or a map of each image",
    "calibrate": "Forward only, for the scales of precision=int8 (hires quantize)",
}
"""Choices of ``task`` without further keys, and what each is."""


@dataclass
class TaskConfig(Section, key="task", choices=CHOICES):
    """``task=NAME``: training, inference, evaluation or prediction."""

    name: str = choice("train", ("train", *INFERENCE, "calibrate"))
    """``train`` (forward, backward, optimiser step), ``infer`` (forward only), ``evaluate`` (one
    pass over the data: accuracy; ``steps`` is what that takes), ``predict`` (the same pass, whose
    outputs are written: ``predict.reduce``) or ``calibrate`` (forward only, to find the scales of
    ``precision=int8``: `hires quantize` does that)."""
