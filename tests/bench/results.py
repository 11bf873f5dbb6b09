"""Where measurements go: build/bench.json and build/soak.json, and the samples behind each figure."""

import json
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

BUILD = Path(__file__).resolve().parents[2] / "build"


@dataclass(frozen=True)
class Measurement:
    """One figure. `value` summarises `samples` (all in `unit`); `summary` says how: median, p99, max."""

    value: float
    unit: str
    samples: tuple[float, ...]
    summary: str


def commit() -> str:
    """The commit that was measured, with + where the tree differs from it."""
    return _git("rev-parse", "--short=12", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, cwd=BUILD.parent)
    return done.stdout.strip()


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def keep(file: str, name: str, one: Measurement, started: str, **more: object) -> None:
    """Put one figure into build/<file>.json, beside those that are there, with its samples in a file of its own."""
    BUILD.mkdir(exist_ok=True)
    samples = BUILD / file / f"{name}.json"
    samples.parent.mkdir(exist_ok=True)
    samples.write_text(json.dumps(one.samples))
    path = BUILD / f"{file}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    known[name] = {
        "value": round(one.value, 4),
        "unit": one.unit,
        "n": len(one.samples),
        "summary": one.summary,
        "commit": commit(),
        "started": started,
        "samples": str(samples.relative_to(BUILD.parent)),
        **more,
    }
    path.write_text(json.dumps(dict(sorted(known.items())), indent=2) + "\n")
