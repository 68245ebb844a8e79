"""``hires completion SHELL``: which words can follow on the command line?

The scripts are a few lines that ask ``hires _complete WORDS...``, so choices of a new release or of
``conf/`` need no new script.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from hires.cli.compose.choices import EXPERIMENTS, experiments, groups, keys
from hires.cli.compose.nearest import offer
from hires.cli.options import Parser
from hires.cli.verbs.verb_compare import METRICS
from hires.core.config.parallel_config import SCHEDULES
from hires.core.config.run_config import FITS
from hires.core.errors import ConfigError
from hires.core.store import file_names
from hires.core.store.naming import COSMETIC
from hires.launcher.status.run_selection import campaigns
from hires.launcher.status.run_state import INFEASIBLE, RUNNING, STATES

COMPOSING = {"--cfg", "--config-dir", "--help", "--json"}
AFTER = {"--after", "--after-any"}
OPTIONS = {
    "run": COMPOSING | AFTER | {"--again", "--dry-run", "--multirun", "--wait"},
    "sweep": COMPOSING
    | AFTER
    | {"--again", "--budget-gpu-hours", "--dry-run", "--max-parallel", "--order", "--repeat"}
    | {"--where", "--zip"},
    "plan": COMPOSING | {"--prove"},
    "verify": COMPOSING,
    "show": {"--diff", "--help", "--json", "--reproduce", "--results", "--timeline", "--trace"},
    "report": {"--format", "--help", "--json", "--out", "--results", "--title"},
    "status": {"--help", "--json", "--results", "--watch"},
    "logs": {"--attempt", "--follow", "--grep", "--help", "--rank", "--results"},
    "retry": {"--help", "--results", "--set", "--state"},
    "cancel": {"--help", "--results"},
    "list": {"--campaign", "--config-dir", "--csv", "--help", "--json", "--results", "--sort"}
    | {"--where"},
    "compare": {"--cluster", "--help", "--json", "--junit", "--metric", "--reference"}
    | {"--resamples", "--results", "--seed", "--tolerance", "--write-reference"},
    "export": {"--help", "--json", "--out", "--results", "--to"},
    "index": {"--help", "--json", "--results"},
    "data": {"--classes", "--count", "--help", "--json", "--seed", "--size", "--striped"},
    "bench": {"--help"},
    "doctor": {"--cfg", "--config-dir", "--help", "--json", "--nodes", "--patience"},
    "completion": {"--help"},
}
"""Options of every verb; a test holds them against each verb's own help."""

_VALUES = {
    "parallel.schedule": SCHEDULES,
    "data.fit": FITS,
    "data.shuffle": ("true", "false"),
}

_SCRIPTS = {
    "bash": r"""_hires() {
    local line=${COMP_LINE:0:COMP_POINT} words current found
    read -ra words <<<"$line"
    [[ $line == *" " ]] && words+=("")
    current=${words[${#words[@]} - 1]}
    mapfile -t found < <("${words[0]}" _complete "${words[@]:1}" 2>/dev/null)
    # bash breaks words at = and :, and replaces only what follows the last break.
    local last=${current##*[=:]}
    COMPREPLY=("${found[@]#"${current%"$last"}"}")
    [[ ${#found[@]} -gt 0 && ${found[0]} == *= ]] && compopt -o nospace
    return 0
}
complete -o default -F _hires hires
""",
    "zsh": r"""#compdef hires
_hires() {
    local -a found
    found=("${(@f)$(${words[1]} _complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    compadd -Q -S '' -- ${(M)found:#*=}
    compadd -Q -- ${found:#*=}
    _files
}
compdef _hires hires
""",
    "fish": r"""complete -c hires -a '(hires _complete (commandline -opc)[2..] (commandline -ct))'
""",
}
_EXAMPLES = (
    'eval "$(hires completion bash)"              in ~/.bashrc',
    'eval "$(hires completion zsh)"               in ~/.zshrc, after compinit',
    "hires completion fish > ~/.config/fish/completions/hires.fish",
)


def main(words: Sequence[str]) -> int:
    """Prints the script of a shell; returns 0."""
    parser = Parser("completion", "Print the completion script of a shell.", _EXAMPLES)
    parser.add_argument("shell", metavar="SHELL", help="bash, zsh or fish")
    shell = parser.read(words).shell
    if shell not in _SCRIPTS:
        raise ConfigError(f"unknown shell {shell!r}; {offer(shell, _SCRIPTS)}")
    print(_SCRIPTS[shell], end="")
    return 0


def complete(words: Sequence[str]) -> int:
    """Prints what the last of the words may become, one candidate a line; returns 0."""
    *before, current = list(words) or [""]
    for candidate in sorted(_candidates(before, current)):
        if candidate.startswith(current):
            print(candidate)
    return 0


def _candidates(before: list[str], current: str) -> Iterable[str]:
    """Returns every word that could stand here."""
    if not before:
        return OPTIONS
    verb = before[0]
    if current.startswith("-"):
        return OPTIONS.get(verb, ())
    if verb in ("run", "plan", "verify"):
        return _overrides(current)
    if verb == "sweep":
        stored = [f"{EXPERIMENTS}={name}" for name in experiments()]
        inside = current.startswith(f"{EXPERIMENTS}=")
        return stored if inside else [*_overrides(current), f"{EXPERIMENTS}="]
    positional = {
        "list": [*groups(), EXPERIMENTS, "keys", "aliases", "runs"],
        "data": ["make"],
        "bench": ["layouts"],
        "completion": list(_SCRIPTS),
        "show": _runs(),
        "logs": _runs(),
    }
    if verb in ("status", "retry", "cancel", "report", "compare", "export"):  # names, many
        return _option_values(before[-1]) or [*_campaigns(), *_runs()]
    if verb in ("show", "list") and before[-1] in ("--diff", "--campaign", "--sort"):
        return _option_values(before[-1])
    wanted = 1 if verb != "data" or len(before) == 1 else 0
    return positional.get(verb, []) if len(before) == wanted else ()


def _option_values(before: str) -> list[str]:
    """Returns what can follow an option of these verbs."""
    known = {
        "--metric": list(METRICS),
        "--sort": [*METRICS, "state", "started", "model", "image", "layout", "precision"],
        "--to": ["csv", "mlflow"],
        "--diff": _runs(),
        "--campaign": _campaigns(),
    }
    if before in known:
        return known[before]
    if before == "--state":
        return [state for state in STATES if state not in (RUNNING, INFEASIBLE)]
    if before == "--set":
        return [f"{key}=" for key in COSMETIC if key not in ("campaign", "results")]
    return []


def _runs() -> list[str]:
    """Returns the run folders of the present folder."""
    return [str(file.parent) for file in Path("results").glob(f"*/*/{file_names.CONFIG}")]


def _campaigns() -> list[str]:
    """Returns the names of the campaigns of the present folder."""
    return [folder.name for folder in campaigns()]


def _overrides(current: str) -> Iterable[str]:
    """Returns the overrides that begin like the current word."""
    key, equals, _ = current.partition("=")
    found = groups()
    if equals:
        return [f"{key}={value}" for value in found.get(key, _VALUES.get(key, ()))]
    return [f"{name}=" for name in (*found, *keys()) if not name.endswith(".name")]
