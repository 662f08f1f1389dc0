"""The files of a run: its metrics file, and what a logger writes beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from mfu_jax.errors import UserError
from mfu_jax.logger.journal.lines import journal_name
from mfu_jax.storage.addresses import Address, open_place, path_of


def metrics_file_of(run: Path | Address) -> Path | Address:
    """The metrics file of a run, given by its folder or by the file itself.

    Raises:
        UserError: the folder holds none, or several.
    """
    if isinstance(run, Address):
        return run if run.name.endswith(".jsonl") else run / "metrics.jsonl"
    if not run.is_dir():
        return run
    marker = journal_name("", 0)
    names = {p.name.partition(marker.partition("0")[0])[0] for p in run.glob(f"*{marker}")}
    names |= {p.name for p in run.glob("*.jsonl") if ".journal." not in p.name}
    if "metrics.jsonl" in names:
        names = {"metrics.jsonl"}
    if not names:
        raise UserError(
            f"the folder {str(run)!r} holds no metrics file; expected one, such as metrics.jsonl; "
            f"usually the folder above a run's own was meant; pass the run's folder, or its file"
        )
    if len(names) > 1:
        raise UserError(
            f"the folder {str(run)!r} holds several metrics files: {', '.join(sorted(names)[:5])}; "
            f"expected metrics.jsonl, or one; usually several runs share it; pass one of them"
        )
    return run / names.pop()


def read_beside(metrics_file: str, name: Literal["setup", "summary", "hosts"]) -> dict[str, Any]:
    """The object in ``<metrics_file>.<name>.json``; empty if there is no readable file.

    Args:
        metrics_file: its path or address; ``-``: standard input, with nothing beside it.
        name: of the file.
    """
    metrics = path_of(metrics_file)
    place = metrics.parent / f"{metrics.name}.{name}.json"
    try:
        with open_place(place, "JSON") as file:
            found = json.load(file)
    except (UserError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
