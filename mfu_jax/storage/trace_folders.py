"""A trace's folder: its newest session, with one file per host, and dumps of its programs."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from mfu_jax.errors import UserError
from mfu_jax.storage.addresses import check_path

DUMP_SUFFIX = ".mfu"
"""By which every command recognises the dump of a program."""

PROGRAMS = "programs"
"""Folder, beside ``plugins/profile``, that holds dumps of the programs that ran."""

_SUFFIX = ".xplane.pb"
_NO_FILE_NAME = re.compile(r"[^\w.<>-]")
_DEPTH = 4  # FOLDER/plugins/profile/SESSION
_SESSIONS = Path("plugins", "profile")
_SESSION_NAME = "%Y_%m_%d_%H_%M_%S"
_OWN = re.compile(r"\.trace\d+")  # one process's, being written
# Each host names its session after the second in which its trace ends.
_SAME_SESSION_SECONDS = 60.0


def check_name(path: str | os.PathLike[str], what: str) -> None:
    """Refuses a name that `mfu-jax compare` would not recognise.

    Args:
        path: path of the dump to write.
        what: the setting that the path comes from, for messages.

    Raises:
        UserError: the path has another suffix, or contains a NUL.
    """
    if not str(check_path(path, what)).endswith(DUMP_SUFFIX):
        raise UserError(
            f"{what} {os.fspath(path)!r}: expected a name that ends with {DUMP_SUFFIX}, by which "
            "mfu-jax compare knows it",
            hint=f"pass {os.fspath(path)}{DUMP_SUFFIX}",
        )


def trace_files(path: Path) -> list[Path]:
    """The trace files of the newest session in a folder, one per host; or the file itself.

    Traces that hosts ended within a minute of each other are one session.

    Raises:
        UserError: there is no trace.
    """
    if path.is_file():
        return [path]
    sessions: dict[Path, list[Path]] = {}
    for file in sorted(path.rglob(f"*{_SUFFIX}")) if path.is_dir() else ():
        if not any(map(_OWN.fullmatch, file.relative_to(path).parts)):
            sessions.setdefault(file.parent, []).append(file)
    if not sessions:
        seen, usual = "no such folder", "usually a typo"
        if path.is_dir():
            seen = "an empty folder, or one without traces"
            usual = (
                "usually a trace that was not ended, or a run without profile_steps=; for a "
                'profile pass profile_steps="10-12" to a run that has these steps'
            )
        raise UserError(
            f"{str(path)!r}: {seen}; expected the folder given to jax.profiler.start_trace or "
            f"profile_dir=, with {_SUFFIX} files in it",
            hint=usual,
        )
    newest = max(sessions, key=lambda folder: (folder.name, folder))
    files: dict[str, Path] = {}
    for folder in _at_once(newest, sessions):
        for file in sessions[folder]:
            files.setdefault(file.name, file)
    return [files[name] for name in sorted(files)]


def _at_once(newest: Path, sessions: Iterable[Path]) -> list[Path]:
    """The newest session, and sibling sessions that other hosts ended at the same time."""
    beside = {folder: _ended(folder) for folder in sessions if folder.parent == newest.parent}
    at = beside.pop(newest)
    near = [
        folder
        for folder, ended in beside.items()
        if at and ended and (at - ended).total_seconds() <= _SAME_SESSION_SECONDS
    ]
    return [newest, *sorted(near, reverse=True)]


def _ended(session: Path) -> datetime | None:
    """When a session ended, from its name; None if the name is not a time."""
    try:
        return datetime.strptime(session.name, _SESSION_NAME)
    except ValueError:
        return None


def own_folder(folder: str | os.PathLike[str], process: int) -> Path:
    """One process's own trace folder, as two on one machine would write the same file."""
    return Path(folder) / f".trace{process}"


def make_sessions(folder: str) -> None:
    """Makes the folder of a trace's sessions.

    Raises:
        OSError: it cannot be made, or is a file.
    """
    Path(folder, _SESSIONS).mkdir(parents=True, exist_ok=True)


def move_to_sessions(folder: str | os.PathLike[str], process: int) -> None:
    """Moves files from a process's own folder to the shared sessions, numbered by process.

    Raises:
        OSError: a file cannot be moved.
    """
    own = own_folder(folder, process)
    for file in sorted(own.glob(f"{_SESSIONS}/*/*")):
        session = Path(folder, _SESSIONS, file.parent.name)
        session.mkdir(parents=True, exist_ok=True)
        file.replace(session / f"process{process}.{file.name}")
    shutil.rmtree(own, ignore_errors=True)


def dump_files(trace: Path) -> list[Path]:
    """Dumps of programs beside a trace's file, newest first."""
    folders = [folder / PROGRAMS for folder in list(trace.absolute().parents)[:_DEPTH]]
    found = [file for folder in folders for file in folder.glob(f"*{DUMP_SUFFIX}")]
    return sorted(found, key=lambda file: (-file.stat().st_mtime, file.name))


def dump_path(folder: str | os.PathLike[str], name: str) -> Path:
    """Where the dump of a program, such as ``train_step``, goes in a trace's folder."""
    return Path(folder) / PROGRAMS / f"{_NO_FILE_NAME.sub('_', name)}{DUMP_SUFFIX}"
