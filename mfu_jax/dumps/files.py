"""The file of a dump: xz around a magic line, one line of JSON, and the HLO text.

``xz -dc step.mfu | tail -n +3`` is the program's text. Equal dumps are equal bytes.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
import os
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, BinaryIO

from mfu_jax.dumps.program import ModelFlops, ProgramDump, Topology
from mfu_jax.errors import UserError
from mfu_jax.flops.count import KernelRun, KernelRuns
from mfu_jax.flops.lengths import Lengths
from mfu_jax.storage.addresses import check_path, open_place
from mfu_jax.storage.targets import write_whole
from mfu_jax.storage.trace_folders import check_name
from mfu_jax.util.user_files import too_large, unreadable

MOST_BYTES = 2**30  # uncompressed; a program for 512 devices takes under 1 MB, a large one 10 MB

_MAGIC = b"mfu_jax program dump "
_VERSION = 1
_PIECE_BYTES = 2**20
_MEMORY_LIMIT = 2**27  # for the decoder; our own files need a tenth of it
_PRESET = 4  # half the default's time, for 5% more bytes
_EXPECTED = (
    "a dump that mfu_jax.dump or mfu-jax dump wrote; usually a wrong path or a truncated copy; "
    "copy it again, or write a new one"
)


def write(dump: ProgramDump, path: str | os.PathLike[str]) -> None:
    """Writes a dump atomically: at any moment `path` is the old file or the whole new one.

    Args:
        dump: what to write.
        path: a local path or an address, such as ``gs://bucket/step.mfu``.

    Raises:
        UserError: the path cannot be written, or has another suffix; the program is too large.
    """
    check_name(path, "dump")
    write_whole(path, "dump", encode(dump))


def load(path: str | os.PathLike[str]) -> ProgramDump:
    """Reads a dump.

    Args:
        path: a local path or an address.

    Raises:
        UserError: the file is not a dump, damaged, too large, or of a later version.
    """
    name = os.fspath(path)
    with open_place(check_path(path, "dump"), _EXPECTED, MOST_BYTES) as file:
        content = _unpacked(file, name)
    magic, _, rest = content.partition(b"\n")
    header, _, text = rest.partition(b"\n")
    if not magic.startswith(_MAGIC):
        raise unreadable(name, "no dump of a program", _EXPECTED)
    if magic != _MAGIC + str(_VERSION).encode():
        version = magic.removeprefix(_MAGIC)[:20].decode(errors="replace")
        raise unreadable(
            name, f"version {version} of the format; this mfu_jax reads {_VERSION}; upgrade it",
            _EXPECTED,
        )  # fmt: skip
    try:
        return _from_header(json.loads(header), text.decode())
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        reason = f"its header is damaged: {type(error).__name__} {error}"
        raise unreadable(name, reason, _EXPECTED) from None


def encode(dump: ProgramDump) -> bytes:
    """The bytes of a dump's file.

    Raises:
        UserError: the program is too large to be read back.
    """
    lines = (_MAGIC.decode() + str(_VERSION), json.dumps(_header(dump), sort_keys=True), dump.text)
    content = "\n".join(lines).encode()
    if len(content) > MOST_BYTES:
        raise UserError(
            f"the program {dump.name} has {len(content) / 2**20:,.0f} MiB of text; expected "
            f"at most {MOST_BYTES / 2**20:,.0f}",
            hint="usually a large array is a constant of the program; pass it to the function "
            "as an argument",
        )
    return lzma.compress(content, format=lzma.FORMAT_XZ, preset=_PRESET)


def to_json(dump: ProgramDump) -> dict[str, Any]:
    """Everything but the text, as plain JSON values."""
    return {"name": dump.name, "characters": len(dump.text), "elided": dump.elided} | _header(dump)


def _header(dump: ProgramDump) -> dict[str, Any]:
    # Not asdict, which deep-copies; the text is written on its own.
    fields = {f.name: getattr(dump, f.name) for f in dataclasses.fields(dump) if f.name != "text"}
    plain = {key: dict(v) if isinstance(v, Mapping) else v for key, v in fields.items()}
    plain["lengths"] = dump.lengths.named
    plain["topology"] = dataclasses.asdict(dump.topology)
    plain["model"] = None if dump.model is None else _plain_model(dump.model)
    return plain


def _plain_model(model: ModelFlops) -> dict[str, Any]:
    values = model.values
    values |= {key: _plain(values[key]) for key in ("operations", "avoidable")}
    return _plain(values)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, Fraction) else v for k, v in values.items()}


def _from_header(header: Any, text: str) -> ProgramDump:
    """The dump; any error means that the header is not what `encode` writes."""
    cost, memory, model = header["cost"], header["memory"], header["model"]
    return ProgramDump(
        text=text,
        cost=None if cost is None else {str(k): float(v) for k, v in cost.items()},
        memory=None if memory is None else _integers(memory),
        topology=_topology(**header["topology"]),
        versions={str(k): str(v) for k, v in header["versions"].items()},
        parameter_shardings=tuple(str(s) for s in header["parameter_shardings"]),
        model=None if model is None else _model(**model),
        kernel_flops=_kernel_runs(header["kernel_flops"]),
        trip_counts=_integers(header["trip_counts"]),
        lengths=Lengths.of(**header["lengths"]),
    )


def _topology(
    mesh: Mapping[str, int], devices: int, processes: int, memory_bytes: int = 0, **names: str
) -> Topology:
    texts = {key: str(text) for key, text in names.items()}
    counts = _integers({"devices": devices, "processes": processes, "memory_bytes": memory_bytes})
    return Topology(mesh=_integers(mesh), **counts, **texts)  # type: ignore[arg-type]


def _model(convention: str, is_whole: bool, **flops: Any) -> ModelFlops:
    numbers = {key: _flops(value) for key, value in flops.items()}
    return ModelFlops(convention=str(convention), is_whole=is_whole is True, **numbers)


def _flops(value: Any) -> Any:
    """A number, None where it is unknown, or a mapping of names to numbers."""
    if isinstance(value, Mapping):
        return {str(key): _exact(number) for key, number in value.items()}
    return None if value is None else _exact(value)


def _exact(value: Any) -> int | Fraction:
    return Fraction(value) if isinstance(value, str) else _integer(value)


def _integers(values: Mapping[str, Any]) -> dict[str, int]:
    return {str(key): _integer(value) for key, value in values.items()}


def _kernel_runs(values: Mapping[str, Any]) -> KernelRuns:
    return {
        str(key): tuple(KernelRun(*map(_integer, run)) for run in value)
        if isinstance(value, list)
        else _integer(value)
        for key, value in values.items()
    }


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is no integer")
    return value


def _unpacked(file: BinaryIO, name: str) -> bytes:
    """The whole content; a decompression bomb is refused before it is unpacked."""
    decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MEMORY_LIMIT)
    pieces, size = [], 0
    try:
        while not decoder.eof:
            packed = file.read(_PIECE_BYTES) if decoder.needs_input else b""
            if decoder.needs_input and not packed:
                raise unreadable(name, "it ends too early", _EXPECTED)
            pieces.append(decoder.decompress(packed, _PIECE_BYTES))
            size += len(pieces[-1])
            if size > MOST_BYTES:
                raise too_large(name, size, MOST_BYTES, _EXPECTED)
    except lzma.LZMAError as error:
        raise unreadable(name, str(error), _EXPECTED) from None
    if decoder.unused_data or file.read(1):
        raise unreadable(name, "something follows the dump in it", _EXPECTED)
    return b"".join(pieces)
