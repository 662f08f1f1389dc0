"""Optional packages, imported when used; if one is missing, one line says how to get it."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable
from typing import Any

from mfu_jax.errors import UserError

TRAIN = "'mfu-jax[train]'"
QUANTIZE = "'mfu-jax[quantize]'"


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Those of the packages that are installed → their versions.

    >>> versions_of(["no-such-package"])
    {}
    """
    from importlib import metadata  # most commands never load it

    found = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def require(module: str, user: str, *, install: str) -> Any:
    """Imports a package that may be missing.

    Args:
        module: its import name.
        user: what needs it, such as ``the sink 'wandb'``.
        install: the argument of `pip install` for it: `TRAIN`, another extra, or a package.

    Raises:
        UserError: it is not installed, or cannot be imported.

    >>> require("no_such_part", "the example", install=TRAIN)
    Traceback (most recent call last):
    mfu_jax.errors.UserError: the example needs the package 'no_such_part' (No module named \
'no_such_part'), which the default install leaves out
    hint: run pip install 'mfu-jax[train]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{user} needs the package {module.partition('.')[0]!r} ({error}), which the "
            "default install leaves out",
            hint=f"run pip install {install}",
        ) from error
