"""Names of dump files: the suffix by which every command recognises one."""

from __future__ import annotations

import os

from mfu_jax.errors import UserError
from mfu_jax.storage.addresses import check_path

SUFFIX = ".mfu"


def check_name(path: str | os.PathLike[str], what: str) -> None:
    """Refuses a name that `mfu-jax compare` would not recognise.

    Args:
        path: path of the dump to write.
        what: the setting that the path comes from, for messages.

    Raises:
        UserError: the path has another suffix, or contains a NUL.
    """
    if not str(check_path(path, what)).endswith(SUFFIX):
        raise UserError(
            f"{what} {os.fspath(path)!r}: expected a name that ends with {SUFFIX}, by which "
            "mfu-jax compare knows it",
            hint=f"pass {os.fspath(path)}{SUFFIX}",
        )
