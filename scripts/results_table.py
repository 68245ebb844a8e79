"""Writes the tables of results/README.md and README.md: figures of the pages beside them.

A line has the result, the number of samples, the spread (p10 to p90), the load at the end, and the
machine and commit, at the digits of its page. What is wrong or was not measured has none. Lines of
other pages stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SPEED, OTHERS = "speed-up", "over the fastest other"
RATIOS = {
    "layouts": (
        ("speed of two tiles over one process, training ResNet-101 at 512x512", "tiles 2x1", SPEED),
        ("bound of that: two half images without a message", "half images", SPEED),
        ("speed of two replicas over DistributedDataParallel", "dp", OTHERS),
        ("speed of a `gpipe` pipeline over torch's, the same cut", "pp gpipe", OTHERS),
        ("speed of a `1f1b` pipeline over torch's, the same cut", "pp 1f1b", OTHERS),
    ),
    "precision": (
        ("speed of fp32 over the fastest library, inference of ResNet-101", "hires fp32", OTHERS),
        ("speed of bf16 over the fastest library, the same", "hires bf16", OTHERS),
        ("speed of int8 over the fastest library, inference of ResNet-101", "hires int8", OTHERS),
        ("speed of two tiles over one thread, fp32", "hires fp32, two tiles", SPEED),
        ("speed of two tiles over one thread, bf16", "hires bf16, two tiles", SPEED),
        ("speed of two tiles over one thread, int8", "hires int8, two tiles", SPEED),
        ("speed of int8 over fp32, one thread", "hires int8", SPEED),
    ),
}
"""Of a page: what it is, row, and the ratio of it that is quoted."""
COMMANDS = {"layouts": "model=resnet101 image=512", "precision": "model=resnet101 image=256"}
"""What a page's command must have: its lines are of that network."""
SMALLEST = "16 B"
"""Size of the all-reduce that is quoted."""
CHOICES = ("mean error of a predicted step", "choices within 5% of the best measured layout")
"""Facts of the page of choices."""
FOLDERS = (*RATIOS, "comm", "choose")
IN_README = (
    *(what for what, _, _ in RATIOS["layouts"] if "gpipe" not in what),
    RATIOS["precision"][2][0],
    CHOICES[1],
)
"""Lines that README.md quotes, too."""


class Page:
    """What a benchmark has written: its command, facts by name, and tables of rows by title."""

    def __init__(self, path: Path) -> None:
        self.command, self.facts = "", dict[str, str]()
        self.tables: dict[str, list[dict[str, str]]] = {}
        title, heads = "", list[str]()
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            if line.startswith("    hires "):
                self.command = line
            elif line.startswith("* "):
                name, _, fact = line[2:].partition(": ")
                self.facts[name] = fact
            elif line.startswith("## "):
                title, heads = line[3:], []
            elif line.startswith("| "):
                cells = [cell.strip() for cell in line.strip("|").split("|")]
                if heads:
                    self.tables.setdefault(title, []).append(dict(zip(heads, cells, strict=True)))
                heads = heads or cells

    @property
    def origin(self) -> list[str]:
        """The load; the machine, and the commit."""
        machine, _, load = self.facts["machine"].partition("; load average at the end ")
        commit = self.facts["commit"].partition(";")[0]
        commit = commit[:8] + "-dirty" * ("-dirty" in commit)
        return [f"{float(load.split(',')[0]):.1f}", f"{machine.rpartition(', ')[0]}; {commit}"]

    def ratios(self, folder: str) -> Iterator[list[str]]:
        """Yields lines that quote ratios of rows, as ``1.28 (1.19-1.41)``."""
        for what, name, ratio in RATIOS[folder]:
            for title, rows in self.tables.items():
                own = what if len(self.tables) == 1 else f"{what} ({title})"
                cells = next((row for row in rows if row.get("row") == name), {})
                if value := re.fullmatch(r"(\S+) \((\S+)-(\S+)\)", cells.get(ratio, "")):
                    yield [own, value[1], cells["n"], f"{value[2]} to {value[3]}"]

    def messages(self) -> Iterator[list[str]]:
        """Yields how much longer hires takes for the smallest sum than mpi4py alone."""
        spread = self.facts["noise"].partition(" by ")[2].partition(",")[0]
        for title, rows in self.tables.items():
            name, _, cell = title.removesuffix(", us").partition(", ")
            for row in rows if name == "all_reduce" else ():
                for way in ("mpi", "shm"):
                    us = [row.get(one, "-") for one in (way, "raw:mpi4py")]
                    if row["size"] == SMALLEST and all(value[0].isdigit() for value in us):
                        what = f"us of a blocking all-reduce of {SMALLEST} ({cell}) by {way}"
                        both = f"{us[0]} and {us[1]}"
                        yield [f"{what}, and raw mpi4py", both, row["n"], f"{spread} of rounds"]

    def choices(self) -> Iterator[list[str]]:
        """Yields how well `hires plan --choose` predicts."""
        for what in CHOICES:
            if what in self.facts:
                result, count, spread = self.facts[what].split("; ")
                yield [what, result, count, spread]

    def quotes(self, folder: str) -> list[list[str]]:
        """Returns lines of a folder: what it is, result, number of samples, spread."""
        is_other = COMMANDS.get(folder, "") not in self.command
        if is_other or "stopped before its end" in self.facts:
            return []
        if folder in RATIOS:
            return [*self.ratios(folder)]
        return [*(self.messages() if folder == "comm" else self.choices())]


def texts(root: Path = ROOT) -> dict[Path, str]:
    """Returns what README.md and results/README.md must hold."""
    pages = root / "README.md", root / "results/README.md"
    lines = {page: page.read_text(encoding="utf-8").splitlines() for page in pages}
    for folder in FOLDERS:
        page = Page(root / "results" / folder / "README.md")
        if not page.facts:
            continue
        quoted, (load, origin) = page.quotes(folder), page.origin
        for path, prefix in zip(pages, ("results/", ""), strict=True):
            own = [[*cells, load, origin] for cells in quoted]
            if prefix:
                own = [[*c[:2], c[3], origin] for c in quoted if c[0] in IN_README]
            link = f"[{folder}]({prefix}{folder}/README.md) |"
            where = [n for n, text in enumerate(lines[path]) if text.endswith(link)]
            kept = [text for text in lines[path] if not text.endswith(link)]
            last = max(n for n, text in enumerate(kept) if text.endswith(" |"))
            at = where[0] if where else last + 1
            new = [f"| {' | '.join(cells)} | {link}" for cells in own]
            lines[path] = [*kept[:at], *new, *kept[at:]]
    return {path: "\n".join(text) + "\n" for path, text in lines.items()}


if __name__ == "__main__":
    for path, text in texts().items():
        path.write_text(text, encoding="utf-8")
