"""Follows a running job: steps, MFU, slow hosts, alarms.

usage: mfu-jax watch RUN [interval=2] [--once] [--json]

RUN         the run's folder, or its metrics file; it may grow, be replaced and resume. The first
            step of a folder without a metrics file is waited for.
interval=2  seconds between updates, 0.1 to 3600
--once      prints one frame, and exits; so does watch without a terminal, 80 columns wide
--json      one JSON object on stdout, and exits

example: mfu-jax watch runs/a"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence

from mfu_jax.errors import UserError
from mfu_jax.runs.live.following import MetricsTail, local_metrics_file
from mfu_jax.runs.live.frame import frame, snapshot
from mfu_jax.util.arguments import parse
from mfu_jax.util.formatting import Paper, json_text
from mfu_jax.util.values import typed

_COLUMNS = 80
_SHORTEST, _LONGEST = 0.1, 3600.0  # seconds: less keeps a core busy, more follows nothing
# Another screen, whose long lines are cut, without a cursor; and back.
_OTHER_SCREEN, _OWN_SCREEN = "\x1b[?1049h\x1b[?7l\x1b[?25l", "\x1b[?25h\x1b[?7h\x1b[?1049l"
_HOME = "\x1b[H"
_REST_OF_LINE, _REST_OF_SCREEN = "\x1b[K", "\x1b[J"  # are cleared


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code.

    Raises:
        UserError: wrong arguments, or no metrics file.
    """
    arguments = parse(argv, keys=("interval",), flags=("--once", "--json"))
    run = arguments.one_name("run")
    text = arguments.values.get("interval", "2")
    interval = typed("interval", text, float)
    if not _SHORTEST <= interval <= _LONGEST:
        raise UserError(
            f"interval={text}: expected {_SHORTEST:g} to {_LONGEST:g} s",
            hint="leave it out for 2 s",
        )
    once = bool(arguments.flags) or not sys.stdout.isatty()
    follower = MetricsTail(local_metrics_file(run, may_come=not once))
    follower.update()
    if "--json" in arguments.flags:
        print(json_text(snapshot(follower, time.time())))
        return 0
    if once:
        paper = Paper.of(sys.stdout) if sys.stdout.isatty() else Paper(_COLUMNS)
        print("\n".join(frame(follower, time.time(), paper)))
    else:
        _follow(follower, interval)
    return 0


def _follow(follower: MetricsTail, interval: float) -> None:
    """Redraws the frame until Ctrl-C, on the terminal's other screen."""
    print(_OTHER_SCREEN, end="")
    try:
        while True:
            size = shutil.get_terminal_size()
            paper = Paper.of(sys.stdout)._replace(columns=size.columns)
            lines = frame(follower, time.time(), paper, size.lines)[: size.lines]
            print(_HOME + f"{_REST_OF_LINE}\n".join(lines) + _REST_OF_SCREEN, end="", flush=True)
            time.sleep(interval)
            follower.update()
    except KeyboardInterrupt:
        return
    finally:
        print(_OWN_SCREEN, end="", flush=True)
