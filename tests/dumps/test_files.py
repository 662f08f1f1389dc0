"""The file of a dump: what is written is read, and anything else is one clear line."""

from __future__ import annotations

import dataclasses
import itertools
import json
import lzma
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from mfu_jax.dumps import ModelFlops, ProgramDump, Topology, files, load, write
from mfu_jax.errors import UserError
from mfu_jax.flops.lengths import Lengths

TEXT = """HloModule jit_f, is_scheduled=true

ENTRY %main (a: f32[4,8], b: f32[8,16]) -> f32[4,16] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,16]{1,0} parameter(1)
  ROOT %dot = f32[4,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
DUMP = ProgramDump(
    text=TEXT,
    cost={"flops": 1024.0, "bytes accessed0{}": 3.0},
    memory={"temp_size_in_bytes": 7, "peak_memory_in_bytes": 9},
    topology=Topology(
        platform="tpu",
        device_kind="TPU v5 lite",
        devices=8,
        processes=2,
        mesh={"fsdp": 8},
        memory_bytes=16 * 2**30,
    ),
    versions={"jax": "0.10.2", "platform": "PJRT é"},
    parameter_shardings=("{replicated}", "{devices=[8]<=[8]}"),
    model=ModelFlops(
        per_device=Fraction(1, 3),
        convention="exact",
        dense=2**70,
        is_whole=True,
        operations={"forward mlp/dot_general": Fraction(1, 7), "backward dot_general": 5},
        overheads={"pipeline bubble": 7},
    ),
    kernel_flops={"flash": 5},
    trip_counts={"while.1": 3},
    lengths=Lengths(group_sizes=(3, 0), sequence_lengths=(64,)),
)


@pytest.mark.parametrize("dump", [DUMP, ProgramDump(text=TEXT)])
def test_what_is_written_is_read(dump: ProgramDump, tmp_path: Path) -> None:
    path = tmp_path / "new" / "step.mfu"
    write(dump, path)
    assert load(path) == dump
    assert [file.name for file in path.parent.iterdir()] == ["step.mfu"]


def test_equal_dumps_are_equal_bytes() -> None:
    reordered = {"bytes accessed0{}": 3.0, "flops": 1024.0}
    assert files.encode(dataclasses.replace(DUMP, cost=reordered)) == files.encode(DUMP)


def test_a_dump_is_read_as_the_program_is() -> None:
    assert DUMP.as_text() == TEXT
    assert DUMP.cost_analysis() == {"flops": 1024.0, "bytes accessed0{}": 3.0}
    assert DUMP.memory_analysis().peak_memory_in_bytes == 9
    unknown = ProgramDump(text=TEXT)
    assert (unknown.cost_analysis(), unknown.memory_analysis()) == (None, None)


def test_the_text_is_there_for_other_tools(tmp_path: Path) -> None:
    path = tmp_path / "step.mfu"
    write(DUMP, path)
    magic, header, text = lzma.decompress(path.read_bytes()).decode().split("\n", 2)
    assert (magic, text) == ("mfu_jax program dump 1", TEXT)
    assert json.loads(header)["topology"]["devices"] == 8


def test_addresses_of_object_stores() -> None:
    pytest.importorskip("fsspec")
    write(ProgramDump(text="old"), "memory://dumps/step.mfu")
    write(DUMP, "memory://dumps/step.mfu")
    assert load("memory://dumps/step.mfu") == DUMP
    with pytest.raises(UserError, match=r"dumps/none\.mfu' cannot be read"):
        load("memory://dumps/none.mfu")


def changed(**values: object) -> bytes:
    lines = lzma.decompress(files.encode(DUMP)).decode().split("\n", 2)
    header = json.dumps({**json.loads(lines[1]), **values})
    return lzma.compress("\n".join((lines[0], header, lines[2])).encode())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "ends too early"),
        (TEXT.encode(), "Input format not supported"),
        (files.encode(DUMP)[:-9], "ends too early"),
        (files.encode(DUMP) + b"x", "something follows"),
        (files.encode(DUMP) * 2, "something follows"),
        (lzma.compress(TEXT.encode()), "no dump of a program"),
        (lzma.compress(b"mfu_jax program dump 2\n{}\n"), "version 2 of the format"),
        (lzma.compress(b"mfu_jax program dump 1\n{}\n"), "header is damaged: KeyError"),
        (lzma.compress(b"mfu_jax program dump 1\n" + b"[" * 10**5), "header is damaged"),
        (lzma.compress(b"mfu_jax program dump 1\nnull\n"), "header is damaged"),
        (lzma.compress(b"mfu_jax program dump 1\n{}\n\xff"), "header is damaged"),
        (lzma.compress(bytes(2**22)), "4 MiB, more than 3"),
        (lzma.compress(TEXT.encode(), preset=9), "no dump of a program"),
        (changed(cost=3), "header is damaged"),
        (changed(memory={"peak": 0.5}), "0.5 is no integer"),
        (changed(topology={"mesh": {}, "devices": 1}), "header is damaged"),
        (changed(model={"per_device": "1/0", "convention": "x", "is_whole": True}), "ZeroDivision"),
        (changed(cost={"flops": 10**400}), "OverflowError"),
    ],
    ids=itertools.count(),
)
def test_other_files_are_one_line(
    content: bytes, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 3 * 2**20)
    path = tmp_path / "x.mfu"
    path.write_bytes(content)
    with pytest.raises(UserError, match=says):
        load(path)


def test_a_decoder_that_takes_much_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.mfu"
    write(DUMP, path)
    monkeypatch.setattr(files, "_MEMORY_LIMIT", 2**16)
    with pytest.raises(UserError, match="Memory usage limit"):
        load(path)


def test_every_changed_byte_is_found(tmp_path: Path) -> None:
    """xz has a checksum of the content."""
    sound, path = files.encode(DUMP), tmp_path / "x.mfu"
    for at in range(len(sound)):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 0x10]) + sound[at + 1 :])
        with pytest.raises(UserError, match="cannot be read"):
            load(path)


@pytest.mark.parametrize("name", ["step.hlo", "step", "a\0.mfu", "gs:/b/x.mfu"])
def test_names_that_nothing_would_recognise_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        write(DUMP, name)


def test_a_program_too_large_to_be_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 100)
    with pytest.raises(UserError, match="a large array is a constant of the program"):
        write(DUMP, tmp_path / "x.mfu")
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_reading_needs_no_jax(tmp_path: Path) -> None:
    path = tmp_path / "step.mfu"
    write(DUMP, path)
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "import mfu_jax\n"
        f"print(mfu_jax.executed_flops(mfu_jax.dumps.load({str(path)!r})).total)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(2 * 4 * 8 * 16)
