"""A trace's folder: its newest session, with one file for each host, and dumps of its programs."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mfu_jax.dumps.files import SUFFIX as DUMP_SUFFIX
from mfu_jax.errors import UserError

PROGRAMS = "programs"
"""Folder, beside ``plugins/profile``, that holds dumps of the programs that ran."""

_SUFFIX = ".xplane.pb"
_NO_FILE_NAME = re.compile(r"[^\w.<>-]")
_DEPTH = 4  # FOLDER/plugins/profile/SESSION


def trace_files(path: Path) -> list[Path]:
    """The trace files of the newest session in a folder, one for each host; or the file itself.

    Raises:
        UserError: there is none.
    """
    if path.is_file():
        return [path]
    sessions: dict[Path, list[Path]] = {}
    for file in sorted(path.rglob(f"*{_SUFFIX}")) if path.is_dir() else ():
        sessions.setdefault(file.parent, []).append(file)
    if not sessions:
        seen = "an empty folder, or one without traces" if path.is_dir() else "no such folder"
        raise UserError(
            f"{str(path)!r}: {seen}; expected the folder given to jax.profiler.start_trace or "
            f"profile_dir=, with {_SUFFIX} files in it; usually another folder, or a trace that "
            f"was not ended; trace again with mfu_jax.profile or profile_steps="
        )
    return sessions[max(sessions, key=lambda folder: (folder.name, folder))]


def dump_files(trace: Path) -> list[Path]:
    """Dumps of programs beside a trace's file, the newest first."""
    folders = [folder / PROGRAMS for folder in list(trace.absolute().parents)[:_DEPTH]]
    found = [file for folder in folders for file in folder.glob(f"*{DUMP_SUFFIX}")]
    return sorted(found, key=lambda file: (-file.stat().st_mtime, file.name))


def dump_path(folder: str | os.PathLike[str], name: str) -> Path:
    """Where the dump of a program, such as ``train_step``, goes in a trace's folder."""
    return Path(folder) / PROGRAMS / f"{_NO_FILE_NAME.sub('_', name)}{DUMP_SUFFIX}"
