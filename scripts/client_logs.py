"""Writes tests/data/client_logs.md: what `instrument` prints for each loop in tests/clients/.

    python -m scripts.client_logs

Each loop runs a few steps on this machine's CPU. The times are this machine's; the FLOPs are not.
"""

from __future__ import annotations

import inspect
import io
import itertools
import os
from pathlib import Path

PAGE = Path(__file__).parents[1] / "tests" / "data" / "client_logs.md"
_LINE = 120  # columns per line in a block
_STEPS = 8
_PEAK = 0.05  # TFLOP/s of one core, roughly
_HEAD = """# What each kind of client prints

Written by `python -m scripts.client_logs` with JAX {version} on {devices} virtual CPU devices with
a made-up peak. `tests/clients/test_kinds.py` runs the same loops: outputs are bitwise those of the
bare loop, and FLOPs are what arithmetic gives. Compare the counts, not the speed: the steps are
tiny. Ledger lines of 0 FLOPs are left out here. Recipes: docs/clients.md.
"""


def main() -> None:
    """Runs every client and writes the page."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    import jax

    from tests.support.client_loops import CLIENTS

    head = _HEAD.format(version=jax.__version__, devices=jax.device_count())
    PAGE.write_text("\n".join([head, *map(_section, CLIENTS)]), encoding="utf-8")
    print(f"wrote {PAGE}")


def _section(client) -> str:  # type: ignore[no-untyped-def]  # its type is known once JAX is set up
    lines = [f"## {client.name}", "", _about(client.loop), ""]
    lines += [f"Model FLOPs of one step: {client.flops:,}", ""]
    return "\n".join([*lines, "```", *_printed(client), "```", ""])


def _about(loop: object) -> str:
    """The loop's docstring, and the location of its source."""
    file = Path(inspect.getsourcefile(loop)).relative_to(PAGE.parents[2])  # type: ignore[arg-type]
    return f"{inspect.getdoc(loop)} Source: `{loop.__name__}` in `{file}`."  # type: ignore[attr-defined]


def _printed(client) -> list[str]:  # type: ignore[no-untyped-def]
    """The set-up, the ledger, and the last line of the log."""
    from mfu_jax.sinks import make_sink
    from tests.support.client import Observed

    stream = io.StringIO()
    console = make_sink("console", stream, progress=False)
    observer = Observed(
        shares_logger=client.shares_logger, sinks=[console], peak_tflops_per_device=_PEAK
    )
    for _ in itertools.islice(client.loop(observer), _STEPS):
        pass
    observer.close()
    lines = stream.getvalue().splitlines()
    last = [line for line in lines if line.startswith("completed step")][-2]
    before = [line for line in lines if not line.startswith(("completed step", "summary:"))]
    shown = [line for line in before if _says_something(line)]
    return [line if len(line) <= _LINE else f"{line[: _LINE - 1]}…" for line in [*shown, last]]


def _says_something(line: str) -> bool:
    is_summary = line.startswith(tuple(f"  {word} " for word in _SUMMARY))
    return not is_summary and not (" 0.00%" in line and " 0 " in line)


_SUMMARY = ("step time", "rates", "utilisation", "last loss", "compiling", "wall time")


if __name__ == "__main__":
    main()
