"""Writes the records that a sink could not take in time from its backlog to their destination.

usage: mfu-jax replay FOLDER

FOLDER          a backlog/ folder, or its parent: the folder of the metrics file

A resumed run does this by itself. Steps that a file already has are skipped, and written records
are removed from the backlog. The exit code is 1 if records stay there because they are older than
the last step of their file."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from mfu_jax.errors import UserError
from mfu_jax.logger.delivery.backlog_files import FOLDER, Segment, last_step, segments, steps_of
from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.logger.sinks.base import Sink, find_sink, is_permanent, make_sink
from mfu_jax.util.arguments import parse

_BATCH = 1000
_LAST_STEP = 2**53  # resuming a file there keeps everything in it


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code.

    Raises:
        UserError: there is no backlog, or it cannot be written to its sink.
    """
    folder = Path(parse(argv, keys=()).one_name("folder"))
    if (folder / FOLDER).is_dir():
        folder /= FOLDER
    files = sorted(folder.glob("*.jsonl")) if folder.is_dir() else []
    if not files or (folder.name != FOLDER and not any(map(_is_backlog, files))):
        raise UserError(
            f"{str(folder)!r} holds no backlog; expected files NAME.jsonl in a folder {FOLDER}/; "
            f"usually every record was written, or the run that resumed wrote them; nothing is "
            f"left to do"
        )
    kept = 0
    for _, group in itertools.groupby(files, lambda path: path.name.split(".")[0]):
        # Steps in a later file ran again, and the later records count.
        found = segments(list(group), -sys.maxsize, sys.maxsize)
        kept += sum(_replay(segment.path, segment.steps.stop) for segment in found)
    return int(kept > 0)


def _is_backlog(path: Path) -> bool:
    try:
        return bool(Segment(path).header())
    except (UserError, OSError):
        return False


def _replay(path: Path, stop: int) -> int:
    """Writes a file's records before step `stop`; returns how many stay in the file."""
    header = Segment(path).header()
    name, base = header["sink"], path.parent.parent
    paths = {key: base / relative for key, relative in header["paths"].items()}
    made_by = name, {**header["arguments"], **paths}
    target = ", ".join(map(str, paths.values())) or name
    takes_any_order = name == "tensorboard"
    last = -1 if takes_any_order else last_step(made_by)
    known = steps_of(made_by) if takes_any_order else set()
    missing = _missing(path, made_by, last)
    segment = Segment(path, steps=range(last + 1, stop))
    sink = _open(made_by)
    try:
        written, refused = _write(segment, sink, known)
    except (OSError, UserError) as error:
        if not missing:
            segment.trim()
        raise UserError(
            f"{target} cannot be written ({error}); expected an output that this user may write "
            f"to; usually a full or read-only disk; what is not written stays in {path}; make room "
            f"and run this again"
        ) from error
    finally:
        sink.close()
    if not missing:
        segment.trim()
    print(f"{name} {target}: {written} records written" + _left(path, last, missing, refused))
    return missing


def _left(path: Path, last: int, missing: int, refused: int) -> str:
    text = f"; {refused} can never be written" if refused else ""
    if missing:
        text += f"; {missing} stay in {path}, because the file goes on to step {last} without them"
    return text


def _missing(path: Path, made_by: tuple[str, dict[str, Any]], last: int) -> int:
    """How many steps of a backlog its output lacks although it has later ones."""
    behind = Segment(path, steps=range(-sys.maxsize, last + 1))
    steps: set[int] = set()
    while records := behind.read(_BATCH):
        steps.update(record.step for record in records)
        behind.advance(len(records))
    return len(steps - steps_of(made_by)) if steps else 0


def _open(made_by: tuple[str, dict[str, Any]]) -> Sink:
    name, arguments = made_by
    kind = find_sink(name)
    if kind is not None and "resume_from_step" in inspect.signature(kind).parameters:
        arguments = {**arguments, "resume_from_step": _LAST_STEP}
    return make_sink(name, **arguments)


def _write(segment: Segment, sink: Sink, known: Container[int]) -> tuple[int, int]:
    written = refused = 0
    while records := segment.read(_BATCH):
        for record in records:
            if record.step not in known:
                is_written = _is_written(sink, record)
                written, refused = written + is_written, refused + (not is_written)
            segment.advance(1)
    sink.flush()
    return written, refused


def _is_written(sink: Sink, record: StepRecord) -> bool:
    """Writes a record; False if it can never be written."""
    try:
        sink.write(record)
    except Exception as error:
        if not is_permanent(error):
            raise
        return False
    return True
