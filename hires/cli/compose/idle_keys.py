"""Names the keys of a command that the run which it starts does not read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hires.core.config.run_config import MemoryConfig, RunConfig
from hires.core.config.task_config import ONE_PASS
from hires.core.config.value_checks import changed_names
from hires.core.errors import ConfigError
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


def require_keys_of_task(config: RunConfig) -> None:
    """Raises ConfigError if a config of another task sets keys that ``task=train`` alone reads."""
    task = config.task.name
    if task == "train":
        return
    sections = (config.optimizer, config.lr_schedule, config.augment)
    words = [f"{name}={value}" for section in sections for name, value in changed_names(section)]
    if config.data.balance:
        words.append("data.balance=true")
    if task in ONE_PASS and not config.data.shuffle:
        words.append("data.shuffle=false")
    if config.memory.checkpoint != MemoryConfig.checkpoint:
        words.append(f"memory.checkpoint={config.memory.checkpoint}")
    if words:
        raise ConfigError(
            f"task={task} does not read {', '.join(words)}, as task=train does; leave "
            f"{'it' if len(words) == 1 else 'them'} out"
        )
