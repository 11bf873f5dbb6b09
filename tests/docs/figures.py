"""`python -m tests.docs.figures`: put the figures of build/bench.json into README.md."""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from tests.docs.documents import ROOT

BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"


def table(figures: Mapping[str, Mapping[str, Any]], cores: int | None = None) -> str:
    """Markdown; a sentence where nothing was measured."""
    if not figures:
        return "Not measured yet: run `make bench`."
    commits = ", ".join(sorted({str(one["commit"]) for one in figures.values()}))
    rows = [
        f"| `{name}` | {one['value']:.4g} | {one['unit']} | {one['n']} | {one['summary']} |"
        for name, one in sorted(figures.items())
    ]
    machine = f"{cores or os.cpu_count()} cores, control plane and all nodes on them; commit {commits}."
    return "\n".join([machine, "", "| figure | value | unit | samples | summary |", "|---|---|---|---|---|", *rows])


def main() -> int:
    """Exit code 1 when nothing was measured here."""
    measured = ROOT / "build" / "bench.json"
    if not measured.exists():
        print("there is no build/bench.json: run make bench", file=sys.stderr)
        return 1
    page = ROOT / "README.md"
    head, _, rest = page.read_text().partition(BEGIN)
    tail = rest.partition(END)[2]
    page.write_text(f"{head}{BEGIN}\n{table(json.loads(measured.read_text()))}\n{END}{tail}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
