"""A trace's folder: its newest session, with one file for each host."""

from __future__ import annotations

from pathlib import Path

from mfu_jax.errors import UserError

_SUFFIX = ".xplane.pb"
PROGRAMS = "programs"
"""Folder beside the traces that holds dumps of the programs that ran."""


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
