"""`python -m tests.soak [--name EXPRESSION] [--seed N]`: run all tests marked soak, write build/soak.json.

A soak test tells what it did with pytest's `record_property` (for example ("lines", 1000000)); that, its outcome,
its duration, the seed and the commit go into the file, beside those of other tests from earlier runs.
"""

import argparse
import json
import os
import random
import sys

import pytest

from tests.bench.results import BUILD, commit, now

PATH = BUILD / "soak.json"


class Recorder:
    """Writes down the outcome of every soak test as it ends: a run of hours that breaks off is not lost."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.found: dict[str, dict[str, object]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of one test ended."""
        if report.when != "call" and report.outcome == "passed":
            return
        self.found[report.nodeid] = {
            "outcome": report.outcome,
            "seconds": round(report.duration, 1),
            "seed": self.seed,
            "commit": commit(),
            "ended": now(),
            **dict(report.user_properties),
        }
        BUILD.mkdir(exist_ok=True)
        known = json.loads(PATH.read_text()) if PATH.exists() else {}
        PATH.write_text(json.dumps(dict(sorted({**known, **self.found}.items())), indent=2) + "\n")


def main() -> int:
    """pytest's exit code."""
    parser = argparse.ArgumentParser(prog="make soak", description="Run the large counts whole.")
    parser.add_argument("--name", help="only tests that match this expression, as pytest -k")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    options = parser.parse_args()
    os.environ["GPUNODE_SEED"] = str(options.seed)
    print(f"seed {options.seed}")
    recorder = Recorder(options.seed)
    arguments = ["-m", "soak", "-p", "no:cacheprovider", f"--hypothesis-seed={options.seed}", "--timeout=0", "-v"]
    code = pytest.main([*arguments, *(["-k", options.name] if options.name else [])], plugins=[recorder])
    print(f"wrote {PATH.relative_to(BUILD.parent)}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
