"""The environment of child processes that run a module of this package."""

from __future__ import annotations

import os
from pathlib import Path

_ABOVE_PACKAGE = Path(__file__).parents[2]


def child_environment(**variables: str) -> dict[str, str]:
    """This process's environment, with this package first on the child's path.

    Args:
        **variables: what the child gets beside or instead of its parent's variables.
    """
    paths = [str(_ABOVE_PACKAGE), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    return {**os.environ, "PYTHONPATH": path, **variables}
