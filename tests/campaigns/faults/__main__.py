"""The cost of each kind of fault: kills, bad sinks, full disks, bad records, clocks, hostile input.

    python -m tests.campaigns.faults [--seed 0] [--scale 1.0]
        [--only logger-kills,disks] [--write]

Prints the table. Scale 1 is about 500 kills and 3,000 hostile inputs: a quarter of an hour on two
cores. The exit code is 1 if a promise was broken.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts import results
from tests.campaigns.faults import (
    bad_records,
    bad_sinks,
    clocks,
    disks,
    logger_kills,
    trainer_kills,
    two_processes,
)
from tests.campaigns.hostile import hostile_inputs, promises
from tests.campaigns.promises import Promise, first_failures, seeded, verdict

_TRAINER_KILLS = {"training": 24, "checkpoint": 16, "resume": 16}

Measure = Callable[[float, int, Path], list[Promise]]
# Everything that forks comes first: a process that has used a JAX device cannot fork.
PARTS: dict[str, Measure] = {
    "logger-kills": lambda scale, seed, folder: [
        logger_kills.kills(_count(424, scale), seed, folder)
    ],
    "trainer-kills": lambda scale, seed, folder: trainer_kills.rows(
        {kind: _count(count, scale) for kind, count in _TRAINER_KILLS.items()}, seed, folder
    ),
    "two-processes": lambda scale, seed, folder: [
        two_processes.promise(_count(20, scale), seed, folder)
    ],
    "disks": lambda scale, seed, folder: disks.rows(_count(40, scale), seed, folder),
    "hostile": lambda scale, seed, folder: promises(hostile_inputs(seed, _count(3000, scale))),
    "records": lambda scale, seed, folder: bad_records.rows(folder),
    "clocks": lambda scale, seed, folder: clocks.rows(_count(20, scale), seed),
    "sinks": lambda scale, seed, folder: bad_sinks.rows(folder),
}


def _count(count: int, scale: float) -> int:
    return max(1, round(count * scale))


def measure(parts: Sequence[str], scale: float, seed: int) -> list[Promise]:
    """All rows of the named parts."""
    rows = []
    for name in parts:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            made = PARTS[name](scale, seed, Path(folder))
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
        rows += made
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, and writes if requested."""
    parser = seeded(__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the full counts")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--write", action="store_true", help="write to scripts/results/")
    options = parser.parse_args(arguments)
    wanted = options.only.split(",")
    rows = measure([name for name in PARTS if name in wanted], options.scale, options.seed)
    code = verdict(rows)
    if options.write:
        notes = [f"Seed {options.seed}.", *first_failures(rows)]
        cells = [row.cells() for row in rows]
        results.write("faults", "what is lost, by kind of fault", cells, notes=notes)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
