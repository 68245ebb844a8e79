"""Names the keys of a command that change nothing in the run that it starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hires.core.config.run_config import RunConfig
from hires.core.config.task_config import ONE_PASS
from hires.plan.plan import Finding


def idle_keys(config: RunConfig, words: Iterable[str]) -> Iterator[Finding]:
    """Yields a note for each key among the typed ``words`` that a config does not read.

    ``config`` has the steps of its one pass (``with_classes``).
    """
    typed = {word.lstrip("+~").partition("=")[0] for word in words}
    if config.task.name == "calibrate" and "steps" in typed:
        text = (
            f"steps does nothing: task=calibrate takes as many as quant.images="
            f"{config.quant.images} need in batches of {config.batch}"
        )
        yield Finding("note", "steps", text)
    if config.task.name in ONE_PASS and "steps" in typed:
        text = (
            f"steps does nothing: task={config.task.name} makes one pass over its data, "
            f"{config.steps} steps of batch={config.batch}"
        )
        yield Finding("note", "steps", text)
