"""Writes the lines of results/README.md that `make results` measures; the others stay.

A line has the median, the number of samples, the spread (p10 to p90), the load at the end, and the
machine and commit. A row that is wrong has none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
LINES = (
    ("two tiles over one process, ResNet-101 at 512x512", "layouts", "tiles 2x1", "speedup"),
    ("bound: two half images without a message", "layouts", "half images", "speedup"),
    ("two replicas beside DistributedDataParallel", "layouts", "dp", "over_best"),
    ("`pp` gpipe beside torch's pipelining, the same cut", "layouts", "pp gpipe", "over_best"),
    ("`pp` 1f1b beside torch's pipelining, the same cut", "layouts", "pp 1f1b", "over_best"),
    ("fp32 beside the fastest library, ResNet-101", "precision", "hires fp32", "over_best"),
    ("bf16 beside the fastest library", "precision", "hires bf16", "over_best"),
    ("int8 beside the fastest library", "precision", "hires int8", "over_best"),
    ("two tiles over one thread, fp32", "precision", "hires fp32, two tiles", "speedup"),
    ("two tiles over one thread, bf16", "precision", "hires bf16, two tiles", "speedup"),
    ("two tiles over one thread, int8", "precision", "hires int8, two tiles", "speedup"),
    ("int8 over fp32, one thread", "precision", "hires int8", "speedup"),
)
"""What it is, folder, row, and the ratio of it that is quoted."""


def main() -> None:
    """Replaces the lines of folders whose JSON is there."""
    path = RESULTS / "README.md"
    lines = path.read_text(encoding="utf-8").splitlines()
    for folder in dict.fromkeys(line[1] for line in LINES):
        file = RESULTS / folder / f"{folder}.json"
        if file.exists():
            result = json.loads(file.read_text(encoding="utf-8"))
            measured = [
                quoted(line[0], line[2], line[3], result) for line in LINES if line[1] == folder
            ]
            link = f"[{folder}]({folder}/README.md) |"
            where = [n for n, text in enumerate(lines) if text.endswith(link)]
            at = where[0] if where else len(lines)
            lines = [text for n, text in enumerate(lines) if n not in where]
            lines[at:at] = [f"{text} {link}" for text in measured if text]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def quoted(what: str, name: str, ratio: str, result: dict[str, Any]) -> str:
    """Returns the line of a row; empty: it was not measured, or is wrong."""
    rows = [row for rows in result["groups"].values() for row in rows if row["name"] == name]
    if not rows or ratio not in rows[0]:
        return ""
    value, hardware = rows[0][ratio], result["hardware"]
    spread = f"{value['p10']:.2f} to {value['p90']:.2f}"
    machine = f"{hardware['cpu']}, {hardware['cores']} cores; {(result['git'] or 'no commit')[:8]}"
    load = result["load_average"][0]
    cells = what, f"{value['median']:.2f}", str(value["count"]), spread, f"{load:.1f}", machine
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
