"""Declares the keys of saving a run and of going on: ``checkpoint``."""

from __future__ import annotations

from dataclasses import dataclass

from hires.core.config.value_checks import MOST_STEPS, Section, choice, cosmetic, number, word


@dataclass
class CheckpointConfig(Section, key="checkpoint"):
    """``checkpoint.*``: when a run saves its state, and where it resumes."""

    every: int = cosmetic(number(0, most=MOST_STEPS))
    """Steps from one saved checkpoint to the next; 0: only when SIGUSR2 requests one. What the
    backward pass computes again is ``memory.checkpoint``."""
    keep: int = cosmetic(number(2, least=1))
    """Checkpoints of the run that are kept, the latest ones."""
    at_end: str = cosmetic(choice("auto", ("auto", "always", "never")))
    """Whether a training saves its state after its last step: ``always``, ``never``, or ``auto``:
    where ``every`` saves it before, too, and where the training learns, from data that are not
    ``synthetic``, or with ``epochs`` or ``validate.every``. Other runs measure a layout."""
    resume: str = word("auto")
    """Where an attempt begins: at the run's latest checkpoint (``auto``), at step 0 (``never``), or
    at a run folder or checkpoint, perhaps of another layout, until the run has one of its own."""
    continues: str | None = cosmetic(word())
    """Checkpoint of a run that differs in its steps only, where this one begins until it has one of
    its own; ``--continue`` finds it."""

    @property
    def saves_end(self) -> bool:
        """Whether a training saves its state after its last step."""
        return self.at_end == "always" or (self.at_end == "auto" and self.every > 0)

    @property
    def source(self) -> str | None:
        """The path that ``continues`` or ``resume`` names; None if they name none."""
        return self.continues or (None if self.resume in ("auto", "never") else self.resume)
