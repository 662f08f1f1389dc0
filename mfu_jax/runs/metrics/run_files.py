"""The files of a run: its metrics file, and what its processes wrote beside it.

Version 0.1.0 wrote a journal, ``….journal.N.jsonl``, in place of the events file of process N, and
JSON files such as ``….setup.json`` in place of some events.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mfu_jax.errors import UserError
from mfu_jax.logger.run_log.events import START, SUMMARY
from mfu_jax.runs.metrics.lines import object_of
from mfu_jax.storage.addresses import Address, filesystem_of, open_object, open_place, path_of
from mfu_jax.util.formatting import counted
from mfu_jax.util.user_files import line_blocks, opened

_LOG = re.compile(r"(.+)\.(?:events|journal)\.\d+(?:\.\d+)?\.jsonl")
_HEAD = ("e", "seq", "t", "m")  # of every event
_EXPECTED = "the events of a run"


class RunLogLines(NamedTuple):
    """What one process wrote.

    Attributes:
        name: of the file.
        lines: one event each.
        modified: when the file changed last, in seconds since 1970; None for an object, whose time
            is that of an upload.
    """

    name: str
    lines: Iterable[bytes]
    modified: float | None


def metrics_file_of(run: Path | Address) -> Path | Address:
    """The metrics file of a run, given by its folder or by the file itself.

    Raises:
        UserError: the folder holds none, or several.
    """
    if isinstance(run, Address):
        return run if run.name.endswith(".jsonl") else run / "metrics.jsonl"
    if not run.is_dir():
        return run
    found = [name for name in os.listdir(run) if name.endswith(".jsonl")]  # glob hides errors
    names = {log[1] if (log := _LOG.fullmatch(name)) else name for name in found}
    if "metrics.jsonl" in names:
        names = {"metrics.jsonl"}
    if not names:
        below = sorted(run.glob("*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
        hint = "pass the run's folder, or its file"
        if below:
            runs = counted(len(below), "run")
            hint = f"it is the folder of {runs}; pass one, such as {below[-1].parent}"
        raise UserError(
            f"the folder {str(run)!r} holds no metrics file; expected one, such as metrics.jsonl",
            hint=hint,
        )
    if len(names) > 1:
        raise UserError(
            f"the folder {str(run)!r} holds several metrics files: "
            f"{', '.join(sorted(names)[:5])}; expected metrics.jsonl, or one",
            hint="usually several runs share it; pass one of them",
        )
    return run / names.pop()


def run_logs(metrics_file: Path | Address) -> Iterator[RunLogLines]:
    """The logs beside a metrics file, of this version and of 0.1.0, each open until the next.

    Raises:
        UserError: one cannot be read.
    """
    for place in _log_places(metrics_file):
        if isinstance(place, Address):
            with open_object(place) as file:
                yield RunLogLines(place.name, file, None)
        else:
            with opened(place, _EXPECTED) as file:
                yield RunLogLines(place.name, file, os.fstat(file.fileno()).st_mtime)


def read_beside(metrics_file: str, kind: str) -> dict[str, Any]:
    """The values of the last event of a kind in the log of process 0: ``setup`` or ``hosts``.

    Without one, version 0.1.0's ``<metrics_file>.<kind>.json``; empty if there is neither.

    Args:
        metrics_file: its path or address; ``-``: standard input, with nothing beside it.
        kind: of the event.
    """
    metrics = path_of(metrics_file)
    try:
        if found := _last_event(metrics, kind):
            return _values_of(found)
        with open_place(metrics.parent / f"{metrics.name}.{kind}.json", "JSON") as file:
            return object_of(file.read())
    except UserError:
        return {}


def logged_summary(metrics_file: str) -> dict[str, Any]:
    """The totals that the last process logged; empty if it was killed, or logged none.

    Args:
        metrics_file: its path or address.

    Raises:
        UserError: a log cannot be read.
    """
    metrics = path_of(metrics_file)
    summary, start = _last_event(metrics, SUMMARY), _last_event(metrics, START)
    return _values_of(summary) if summary and summary["t"] >= start.get("t", 0.0) else {}


def _values_of(event: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in _HEAD}


def _last_event(metrics_file: Path | Address, kind: str) -> dict[str, Any]:
    """The last event of a kind in the logs of process 0; empty if they have none."""
    found = [_last_of(place, kind) for place in _log_places(metrics_file, "events.0.")]
    return max(found, key=lambda event: event.get("t", 0.0), default={})


def _last_of(place: Path | Address, kind: str) -> dict[str, Any]:
    """The same of one log."""
    start = f'{{"e":"{kind}",'.encode()
    found: dict[str, Any] = {}
    with open_place(place, _EXPECTED) as file:
        for block in line_blocks(file, place, _EXPECTED):
            at = 0 if block.startswith(start) else -1
            at = max(at, block.rfind(b"\n" + start) + 1 or at)
            if at >= 0:
                found = object_of(block[at:].partition(b"\n")[0]) or found
    return found


def _log_places(metrics_file: Path | Address, which: str = "") -> list[Path | Address]:
    """The logs beside a metrics file whose names go on with `which`, in order of their names."""
    folder = metrics_file.parent
    if isinstance(folder, Address):
        files, remote = filesystem_of(folder / f"{metrics_file.name}.*.jsonl", "run log")
        names = [str(found).rpartition("/")[2] for found in files.glob(remote)]
    else:
        names = [path.name for path in folder.glob("*.jsonl")]
    head = f"{metrics_file.name}.{which}"
    logs = ((name, _LOG.fullmatch(name)) for name in sorted(names) if name.startswith(head))
    return [folder / name for name, log in logs if log and log[1] == metrics_file.name]
