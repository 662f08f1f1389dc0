"""Programs written by XLA itself: ``--xla_dump_to`` folders, HLO text, HLO protos."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mfu_jax.dumps.files import MOST_BYTES
from mfu_jax.dumps.program import ProgramDump
from mfu_jax.errors import UserError, first_line
from mfu_jax.util.protobuf import part
from mfu_jax.util.user_files import read_bytes, read_text, unreadable

_EXPECTED = (
    "a folder that XLA_FLAGS=--xla_dump_to=FOLDER wrote, or one of its files "
    "…after_optimizations.txt or .hlo.pb"
)
_OPTIMIZED = re.compile(r"(.*)after_optimizations(\.hlo\.pb|\.txt)")
_MOST_LISTED = 5


def read_xla(path: Path, module: str = "") -> ProgramDump:
    """Reads a program that XLA wrote, of which only the HLO is known.

    Args:
        path: the folder, or a file in it. Protos (``--xla_dump_hlo_as_proto``) are complete but
            need jaxlib; texts omit large constants.
        module: part of the file's name, if the folder has several programs.

    Raises:
        UserError: there is no such program, or more than one, or it cannot be read.
    """
    if path.is_dir():
        path = _chosen(path, module)
    if path.suffix == ".pb":
        return ProgramDump(text=text_of_proto(read_bytes(path, _EXPECTED, MOST_BYTES), path))
    return ProgramDump(text=read_text(path, _EXPECTED, MOST_BYTES))


def text_of_proto(content: bytes, path: Path) -> str:
    """The complete HLO text of a serialized ``HloProto`` or ``HloModuleProto``.

    Args:
        content: the message's bytes.
        path: their file, for errors.

    Raises:
        UserError: jaxlib is missing, or cannot read the message.
    """
    try:
        from mfu_jax.util.jax_internals import hlo_text_of_proto
    except ImportError:
        raise UserError(
            f"{str(path)!r} is an HLO proto, which jaxlib reads; expected jaxlib to be installed",
            hint="install jax, or pass the text that XLA writes without --xla_dump_hlo_as_proto",
        ) from None
    module = part(content, 1)  # of an HloProto; else the name
    try:
        return hlo_text_of_proto(module if module[:1] == b"\n" else content)
    except Exception as error:  # from XLA's parser
        raise unreadable(path, first_line(error), _EXPECTED) from None


def _chosen(folder: Path, module: str) -> Path:
    """The file of the only program, or of the one whose name contains `module`."""
    programs: dict[str, Path] = {}
    for file in sorted(folder.iterdir(), reverse=True):  # a proto replaces its text
        match = _OPTIMIZED.fullmatch(file.name)
        if match and module in match[1]:
            programs[match[1]] = file
    if len(programs) == 1:
        return next(iter(programs.values()))
    if not programs:
        named = f" with {module!r} in its name" * bool(module)
        raise unreadable(folder, f"it has no optimised program{named}", _EXPECTED)
    raise UserError(
        f"{str(folder)!r} has {len(programs)} programs; expected one; the largest are "
        f"{_listed(list(programs.values()))}",
        hint="choose with module=PART_OF_ITS_NAME",
    )


def _listed(files: Sequence[Path]) -> str:
    largest = sorted(files, key=lambda file: file.stat().st_size, reverse=True)[:_MOST_LISTED]
    return ", ".join(file.name for file in largest)
