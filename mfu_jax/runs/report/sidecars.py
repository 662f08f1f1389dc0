"""What a logger writes beside a metrics file: set-up, hosts, totals of the run."""

from __future__ import annotations

import json
from typing import Any, Literal

from mfu_jax.errors import UserError
from mfu_jax.storage.addresses import Address, open_object, path_of
from mfu_jax.util.user_files import opened


def read_beside(metrics_file: str, name: Literal["setup", "summary", "hosts"]) -> dict[str, Any]:
    """The object in ``<metrics_file>.<name>.json``; empty if there is no readable file.

    Args:
        metrics_file: its path or address; ``-``: standard input, with nothing beside it.
        name: of the file.
    """
    metrics = path_of(metrics_file)
    place = metrics.parent / f"{metrics.name}.{name}.json"
    try:
        with open_object(place) if isinstance(place, Address) else opened(place, "JSON") as file:
            found = json.load(file)
    except (UserError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
