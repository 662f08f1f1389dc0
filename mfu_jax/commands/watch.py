"""Follows a running job: steps, MFU, slow hosts, alarms.

usage: mfu-jax watch RUN [interval=2] [--once] [--json]

RUN         the run's folder, or its metrics file; it may grow, be replaced and resume. The first
            step of a folder without a metrics file is waited for.
interval=2  seconds between updates
--once      prints one frame, and exits; so does watch without a terminal, 80 columns wide
--json      one JSON object on stdout, and exits

example: mfu-jax watch runs/a"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from mfu_jax.runs.live.following import MetricsTail, local_metrics_file
from mfu_jax.runs.live.frame import frame, snapshot
from mfu_jax.util.arguments import parse
from mfu_jax.util.formatting import json_text
from mfu_jax.util.optional_deps import TRAIN, require
from mfu_jax.util.values import number_of

_COLUMNS = 80


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code.

    Raises:
        UserError: wrong arguments, no metrics file, or `rich` is missing.
    """
    if not argv:
        print(__doc__)
        return 2
    arguments = parse(argv, keys=("interval",), flags=("--once", "--json"))
    run = arguments.one_name("run")
    interval = number_of(arguments.values, "interval", float, 2.0, is_positive=True)
    once = bool(arguments.flags) or not sys.stdout.isatty()
    follower = MetricsTail(local_metrics_file(run, may_come=not once))
    follower.update()
    if "--json" in arguments.flags:
        print(json_text(snapshot(follower, time.time())))
        return 0
    console = _console()
    if once:
        console.print(frame(follower, time.time()))
    else:
        _follow(follower, console, interval)
    return 0


def _follow(follower: MetricsTail, console: Any, interval: float) -> None:
    """Redraws the frame until Ctrl-C."""
    live = require("rich.live", "mfu-jax watch", install=TRAIN)

    def now() -> Any:
        return frame(follower, time.time(), console.width, console.height)

    with live.Live(now(), console=console, auto_refresh=False, screen=True) as shown:
        try:
            while True:
                time.sleep(interval)
                follower.update()
                shown.update(now(), refresh=True)
        except KeyboardInterrupt:
            return


def _console() -> Any:
    rich = require("rich.console", "mfu-jax watch", install=TRAIN)
    if sys.stdout.isatty():
        return rich.Console()
    return rich.Console(width=_COLUMNS, file=sys.stdout, soft_wrap=False)
