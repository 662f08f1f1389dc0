"""The time in collectives of each host of a run, where its folder has a profile of several."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mfu_jax.errors import UserError, one_line
from mfu_jax.profiling.folders import trace_files
from mfu_jax.runs.collective_waits import CollectiveWait, CollectiveWaits
from mfu_jax.runs.run_data import RunData
from mfu_jax.storage.addresses import path_of

_PLACES = (".", "profile", "tensorboard")  # in a run's folder
# Traces of more bytes take minutes: they are read when asked for.
_MOST_BYTES = 10**9


def with_waits(run: RunData, profile: str | None) -> RunData:
    """The run with what its profile says of its hosts.

    Args:
        run: the run.
        profile: the folder of the profile; None: if there is one in the run's own.

    Raises:
        UserError: there is no trace in `profile`, or only one host's, or one cannot be read.
    """
    if profile is None:
        return _with_own(run)
    waits = _read(Path(profile))
    if waits is None:
        raise UserError(
            f"--profile {profile}: no collectives of several hosts; expected the traces of two or "
            f"more hosts in one folder; usually each host traced to a disk of its own; copy their "
            f"plugins/profile together, or leave --profile out"
        )
    return _with(run, waits)


def _with(run: RunData, waits: CollectiveWaits) -> RunData:
    answer = {**run.answer, "collective_waits": waits.to_json()}
    return dataclasses.replace(run, waits=waits, answer=answer)


def _with_own(run: RunData) -> RunData:
    """With the profile in the run's own folder; one that is large, or damaged, is a note."""
    folder = _folder_of(run)
    if folder is None:
        return run
    try:
        files = trace_files(folder)
        if len(files) < 2:
            return run
        if (size := sum(file.stat().st_size for file in files)) > _MOST_BYTES:
            return _noted(run, f"{size / 1e9:.1f} GB; --profile {folder} reads it")
        waits = _read(folder)
    except UserError as error:
        return _noted(run, one_line(str(error)))
    return run if waits is None else _with(run, waits)


def _noted(run: RunData, why: str) -> RunData:
    notes = (*run.time.notes, f"the profile is left out: {why}")
    time = dataclasses.replace(run.time, notes=notes)
    return dataclasses.replace(run, time=time, answer={**run.answer, "notes": notes})


def _folder_of(run: RunData) -> Path | None:
    """Where the run's own folder has traces of several hosts."""
    metrics = path_of(run.metrics.path)
    if run.metrics.path == "-" or not isinstance(metrics, Path):
        return None
    found = (metrics.parent / place for place in _PLACES)
    return next((f for f in found if (f / "plugins" / "profile").is_dir()), None)


def _read(folder: Path) -> CollectiveWaits | None:
    from mfu_jax.profiling.host_waits import read_host_waits  # numpy, which most reports do without

    hosts = [
        CollectiveWait(
            host=host.host,
            step_seconds=host.step_seconds,
            collective_seconds=host.collective_seconds,
            wait_seconds=host.wait_seconds,
        )
        for host in read_host_waits(folder)
    ]
    return CollectiveWaits(source=str(folder), hosts=hosts) if hosts else None
