"""``hires doctor``: is this machine ready?"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from hires.cli.doctor_checks import all_checks
from hires.cli.options import Parser, add_json

_EXAMPLES = ("hires doctor", "hires doctor --json")


def main(words: Sequence[str]) -> int:
    """Prints one line a check, each with a remedy if it is not ok; returns 1 if one failed."""
    parser = Parser("doctor", "Check what this machine has, and say what would help.", _EXAMPLES)
    add_json(parser)
    args = parser.read(words)
    checks = all_checks()
    if args.json:
        ok = all(check.state != "fail" for check in checks)
        body = {"ok": ok, "checks": [dataclasses.asdict(check) for check in checks]}
        print(json.dumps(body, indent=2))
    else:
        for check in checks:
            print(f"{check.state:<4}  {check.name:<8}  {check.text}")
            if check.remedy:
                print(f"{'':<16}-> {check.remedy}")
    return 1 if any(check.state == "fail" for check in checks) else 0
