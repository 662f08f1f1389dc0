"""Reads a large metrics file in pieces, one process each: a million steps in seconds.

    python -m mfu_jax.runs.metrics.pieces FILE BEGIN END

reads the lines between two bytes, and writes the pickled reader to standard output.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from mfu_jax.runs.metrics.reader import Reader
from mfu_jax.util.child_process import child_environment
from mfu_jax.util.user_files import line_blocks, opened

EXPECTED = (
    "a metrics file or a log; usually a wrong path or a folder; pass the file that metrics_file "
    "named, or - and pipe it in"
)
# Fewer bytes are not worth a process, which takes 0.1 s to start; more processes wait for disks.
_LEAST_BYTES = 2**25
_MOST_PIECES = 16
# A record of ours or MaxText's is a single line; other formats spread a step over several.
_ONE_LINE_EACH = b'"perf/step_time_seconds"'
_HEAD_BYTES = 2**20


class Piece(NamedTuple):
    """Whole lines: from byte `begin` up to `end`."""

    begin: int
    end: int


def pieces_of(file: BinaryIO) -> list[Piece]:
    """Pieces of equal size, one per core.

    Returns:
        An empty list if the file is small, there is one core, or steps span several lines.
    """
    size = os.fstat(file.fileno()).st_size
    count = min(size // _LEAST_BYTES, _cores(), _MOST_PIECES)
    if count < 2:
        return []
    is_known = _ONE_LINE_EACH in file.read(_HEAD_BYTES)
    file.seek(0)
    if not is_known:
        return []
    bounds = [0]
    for number in range(1, count):
        file.seek(max(bounds[-1], size * number // count))
        file.readline()
        bounds.append(file.tell())
    file.seek(0)
    # What is written in the meantime belongs to the last piece.
    return list(itertools.starmap(Piece, itertools.pairwise([*bounds, sys.maxsize])))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_pieces(path: str | Path, file: BinaryIO, pieces: Sequence[Piece]) -> Reader:
    """Reads all pieces: the first in this process, the others in parallel processes.

    Args:
        path: of the file.
        file: the same file, open.
        pieces: in order.

    Raises:
        UserError: a line is too long for a string.
    """
    workers = [_start(path, piece) for piece in pieces[1:]]
    try:
        reader = _read(path, file, pieces[0])
        for worker, piece in zip(workers, pieces[1:], strict=True):
            reader.join(_answer(worker) or _read(path, file, piece))
    finally:
        for worker in workers:
            if worker is not None and worker.poll() is None:
                worker.kill()
                worker.communicate()
    return reader


def _answer(worker: subprocess.Popen[bytes] | None) -> Reader | None:
    """What a process has read; None if it could not start or failed, which only costs time."""
    if worker is None:
        return None
    output, _ = worker.communicate()
    found: Reader | None = None if worker.returncode else pickle.loads(output)
    return found


def _start(path: str | Path, piece: Piece) -> subprocess.Popen[bytes] | None:
    try:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "mfu_jax.runs.metrics.pieces",
                os.fspath(path),
                *map(str, piece),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
        )
    except OSError:  # no Python, no memory, too many processes
        return None


def _read(path: str | Path, file: BinaryIO, piece: Piece) -> Reader:
    """Reads one piece."""
    file.seek(piece.begin)
    reader = Reader()
    reader.read(line_blocks(io.BufferedReader(_Part(file, piece)), path, EXPECTED))
    return reader


class _Part(io.RawIOBase):
    """The bytes of a piece as a file object."""

    def __init__(self, file: BinaryIO, piece: Piece) -> None:
        self._file = file
        self._left = piece.end - piece.begin

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        found = self._file.read(min(len(view), self._left))
        view[: len(found)] = found
        self._left -= len(found)
        return len(found)


def main(argv: Sequence[str]) -> int:
    """Reads one piece and writes the result for `read_pieces`."""
    path, begin, end = argv
    with opened(path, EXPECTED) as file:
        reader = _read(path, file, Piece(int(begin), int(end)))
    sys.stdout.buffer.write(pickle.dumps(reader))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
