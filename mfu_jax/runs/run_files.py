"""The files of a run: its folder, or the metrics file in it, names them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mfu_jax.errors import UserError
from mfu_jax.storage.addresses import Address, path_of

METRICS = "metrics.jsonl"
_ENDINGS = (".jsonl", ".json", ".log", ".txt", ".out")
_NOT_METRICS = "journal"


def metrics_file(run: str) -> str:
    """The metrics file of a run.

    Args:
        run: the run's folder, local or in an object store, or the file itself; ``-``: stdin.

    Raises:
        UserError: the folder has no metrics file, or several.
    """
    place = path_of(run)
    if isinstance(place, Address):
        return run if place.name.endswith(_ENDINGS) else str(place / METRICS)
    if run == "-" or not _is_folder(place):
        return run
    return str(_in_folder(place))


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # told by whoever reads it
        return False


def _in_folder(folder: Path) -> Path:
    if (folder / METRICS).is_file():
        return folder / METRICS
    found = sorted(p for p in folder.glob("*.jsonl") if not p.name.startswith(_NOT_METRICS))
    if len(found) == 1:
        return found[0]
    seen = f"{len(found)} files *.jsonl" if found else f"no {METRICS}"
    raise UserError(
        f"{str(folder)!r} holds {seen}; expected the folder of one run; usually the folder above "
        f"it; pass the run's own folder or its metrics file"
    )


def beside(metrics: str, name: str) -> str | Address | Path:
    """A file that the logger writes beside the metrics: ``setup`` or ``summary``."""
    place = path_of(metrics)
    return place.parent / f"{place.name}.{name}.json"


def read_beside(metrics: str, name: str) -> dict[str, Any]:
    """The object in such a file; empty if there is none, or none that can be read."""
    import json

    from mfu_jax.storage.addresses import open_object
    from mfu_jax.user_files import opened

    place = beside(metrics, name)
    try:
        with open_object(place) if isinstance(place, Address) else opened(place, "JSON") as file:
            found = json.load(file)
    except (UserError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
