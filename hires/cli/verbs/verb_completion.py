"""``hires completion SHELL``: prints the script with which a shell completes command lines.

The scripts call ``hires _complete WORDS...``, which asks the parser of the verb, so a new release
or a new choice in ``conf/`` needs no new script. shtab writes its candidates into the script, where
choices and runs would soon be out of date; with argcomplete the candidates would still be ours,
and the parsers of all verbs would be built at every Tab.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hires.cli.main import VERBS, module_of
from hires.cli.options import Parser, option, overrides
from hires.core.errors import ConfigError
from hires.core.registry import offer

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
_COMPOSING = ("run", "plan", "verify")
"""Verbs that take overrides, for which the launchers behind their parsers need not be imported."""
PARSER = Parser(
    "completion",
    "Print the completion script of a shell.",
    (
        'eval "$(hires completion bash)"              in ~/.bashrc',
        'eval "$(hires completion zsh)"               in ~/.zshrc, after compinit',
        "hires completion fish > ~/.config/fish/completions/hires.fish",
    ),
    option("shell", metavar="SHELL", complete=_SCRIPTS, help="bash, zsh or fish"),
)


def main(words: Sequence[str]) -> int:
    """Prints the script of a shell; returns 0."""
    shell = PARSER.read(words).shell
    if shell not in _SCRIPTS:
        raise ConfigError(f"unknown shell {shell!r}; {offer(shell, _SCRIPTS)}")
    print(_SCRIPTS[shell], end="")
    return 0


def complete(words: Sequence[str]) -> int:
    """Prints the candidates for the last of the words, one a line; returns 0."""
    *before, current = list(words) or [""]
    candidates: Iterable[str] = ()
    if not before:
        candidates = VERBS
    elif before[0] in _COMPOSING and not current.startswith("-") and before[-1][:2] != "--":
        candidates = overrides(current)
    elif before[0] in VERBS:
        candidates = module_of(before[0]).PARSER.candidates(before[1:], current)
    for candidate in sorted(set(candidates)):
        if candidate.startswith(current):
            print(candidate)
    return 0
