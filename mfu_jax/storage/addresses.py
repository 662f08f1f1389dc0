"""Addresses in object stores (``gs://…``), as opposed to local paths."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

from mfu_jax.errors import UserError, first_line
from mfu_jax.util.user_files import opened

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
# What pathlib turns an address into; nobody names a folder like that on purpose.
_LOST_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+):/(?!/)")


class Address(str):
    """The address of an object or a folder of objects; ``/`` joins parts as it does for paths.

    >>> Address("gs://bucket/run/") / "metrics.jsonl"
    'gs://bucket/run/metrics.jsonl'
    """

    def __truediv__(self, name: str) -> Address:
        return Address(f"{self.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The last component."""
        return self.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> Address:
        """The folder that contains it."""
        return Address(self.rstrip("/").rpartition("/")[0])


def path_of(text: str | os.PathLike[str]) -> Path | Address:
    """A local path, or an `Address`, which keeps both slashes of its ``://``.

    >>> path_of("gs://bucket/run") / "metrics.jsonl"
    'gs://bucket/run/metrics.jsonl'
    """
    text = os.fspath(text)
    scheme = _SCHEME.match(text)
    if scheme is None:
        return Path(text)
    return Path(text[scheme.end() :]) if scheme[1] in ("file", "local") else Address(text)


def check_path(text: str | os.PathLike[str], what: str) -> Path | Address:
    """`path_of` a setting's value.

    Args:
        text: the value.
        what: the setting, for errors.

    Raises:
        UserError: it contains a NUL, or is an address that has lost a slash.
    """
    text = os.fspath(text)
    if "\0" in text:
        raise UserError(
            f"{what}={text!r} holds a NUL character; expected a path",
            hint="usually binary data; pass another path",
        )
    if lost := _LOST_SLASH.match(text):
        raise UserError(
            f"{what}={text!r} would be a local folder named {lost[1] + ':'!r}",
            hint="usually an address that went through pathlib.Path; pass it as text: "
            f"'{lost[1]}://{text[lost.end() :]}'",
        )
    return path_of(text)


def filesystem_of(address: Address, what: str) -> tuple[Any, str]:
    """fsspec's file system for an address, and the address in that file system's form.

    Raises:
        UserError: the package for this store is not installed, or does not exist.
    """
    try:
        import fsspec

        return fsspec.core.url_to_fs(address)
    except Exception as error:  # a store's client may raise anything: no package, no account
        raise UserError(
            f"{what} {address!r} cannot be reached ({first_line(error)})",
            hint="usually its package for fsspec is missing, such as gcsfs or s3fs; install "
            "it, or pass a local folder",
        ) from error


@contextlib.contextmanager
def open_object(address: Address) -> Iterator[BinaryIO]:
    """Opens an object for reading.

    Raises:
        UserError: the store cannot be reached, or has no such object.
    """
    files, name = filesystem_of(address, "file")
    try:
        with files.open(name, "rb") as file:
            yield file
    except OSError as error:
        raise UserError(
            f"{address!r} cannot be read ({error.strerror or first_line(error)}); expected an "
            "object of that store",
            hint="usually a typo; list its folder",
        ) from None


def open_place(
    place: Path | Address, expected: str, most_bytes: float = float("inf")
) -> AbstractContextManager[BinaryIO]:
    """Opens a local file or an object for reading; `expected` and `most_bytes` as for `opened`.

    Raises:
        UserError: it cannot be read, or is a local file that is too large.
    """
    return open_object(place) if isinstance(place, Address) else opened(place, expected, most_bytes)
