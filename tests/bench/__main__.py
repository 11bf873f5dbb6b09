"""`python -m tests.bench [--name NAME]`: measure, print a table, write build/bench.json."""

import argparse
import sys
from contextlib import ExitStack
from typing import Any

from rich.table import Table

from gpunode.cli.output import console
from gpunode.cluster.cluster import Cluster
from tests.bench.measure import FIGURES, Figure, measure, summarise
from tests.bench.results import keep, now
from tests.fixtures import fresh_cluster


def main() -> int:
    """Exit code 2 for a name that is not measured here."""
    parser = argparse.ArgumentParser(prog="make bench", description="Measure; see tests/bench/measure.py.")
    parser.add_argument("--name", help="one figure, with those of the same run")
    wanted = parser.parse_args().name
    figures = [f for f in FIGURES if not wanted or f.name == wanted]
    if not figures:
        print(f"bench: there is no figure {wanted}; there are {', '.join(f.name for f in FIGURES)}", file=sys.stderr)
        return 2
    groups = list(dict.fromkeys(f.group for f in figures))
    table = Table("name", "value", "unit", "n", "summary")
    with ExitStack() as stack:
        cluster: Cluster | None = None
        for group in groups:
            members = [f for f in FIGURES if f.group == group]
            if members[0].cluster and cluster is None:
                cluster = stack.enter_context(fresh_cluster("bench", 19443))
            print(f"measuring {', '.join(f.name for f in members)}", file=sys.stderr, flush=True)
            _measure(members, cluster if members[0].cluster else None, table)
    console().print(table)
    return 0


def _measure(members: list[Figure], cluster: Cluster | None, table: Any) -> None:
    started = now()
    samples = measure(members[0].group, cluster)
    for figure in members:
        one = summarise(figure, samples[figure.name])
        keep("bench", figure.name, one, started)
        table.add_row(figure.name, f"{one.value:.4g}", one.unit, str(len(one.samples)), one.summary)


if __name__ == "__main__":
    sys.exit(main())
