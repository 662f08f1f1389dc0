"""What a sweep has compiled so far, one line per point: a killed sweep resumes from it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mfu_jax.errors import UserError
from mfu_jax.planning.sweep.outcomes import Outcome
from mfu_jax.planning.sweep.space import Point
from mfu_jax.storage.files import unwritable
from mfu_jax.util.user_files import read_text

_MOST_BYTES = 2**26
_EXPECTED = "the state of a sweep; usually another file; pass another state=FILE"


class StateFile:
    """Reads and appends outcomes.

    Args:
        path: path of the file, which need not exist.
        identity: identifies the sweep. A file of another sweep is an error.

    Raises:
        UserError: the file belongs to another sweep, is not a state file, or is not writable.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self.path = path
        self.identity = identity
        self.outcomes = self._read()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(path, "state", error) from None

    def add(self, point: Point, outcome: Outcome) -> None:
        """Appends a point, which is on disk when this returns.

        Raises:
            UserError: the file cannot be written.
        """
        held = {"point": point.pairs, "outcome": dataclasses.asdict(outcome)}
        start = b"" if self.path.exists() else json.dumps({"sweep": self.identity}).encode()
        try:
            with open(self.path, "ab") as file:
                # Newline first, because a killed process may have left half a line.
                file.write(start + b"\n" + json.dumps(held).encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise unwritable(self.path, "state", error) from None

    def _read(self) -> dict[Point, Outcome]:
        if not self.path.exists():
            return {}
        lines = read_text(str(self.path), _EXPECTED, _MOST_BYTES).splitlines()
        if not lines:
            return {}
        if _parsed(lines[0]).get("sweep") != self.identity:
            raise UserError(
                f"state {str(self.path)!r} is of another sweep: its keys, chips, flags or versions "
                "differ; pass another state=FILE, or delete it"
            )
        return dict(_outcome(_parsed(line)) for line in lines[1:] if _parsed(line))


def _parsed(line: str) -> Mapping[str, Any]:
    """A parsed line; empty if broken: a killed process may leave half a line."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _outcome(line: Mapping[str, Any]) -> tuple[Point, Outcome]:
    return Point(tuple((key, text) for key, text in line["point"])), Outcome(**line["outcome"])
