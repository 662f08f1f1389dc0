"""Programs that XLA wrote itself become dumps."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from mfu_jax.dumps.xla_files import read_xla
from mfu_jax.errors import UserError
from mfu_jax.flops.executed.counting import executed_flops

ONE = 2 * 8**3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``--xla_dump_to --xla_dump_hlo_as_proto`` writes of two programs, and a text beside."""
    path = tmp_path_factory.mktemp("xla")
    for number, name in enumerate(("jit_step", "jit_loss")):
        step = lambda x: x @ x if name == "jit_step" else x + 1  # noqa: E731, B023
        compiled = jax.jit(step).lower(jnp.ones((8, 8))).compile()
        module = compiled.runtime_executable().hlo_modules()[0]
        stem = path / f"module_000{number}.{name}.cpu_after_optimizations"
        proto = module.as_serialized_hlo_module_proto()
        size = len(proto)  # HloProto: field 1 is the module
        length = bytes([size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14])
        Path(f"{stem}.hlo.pb").write_bytes(b"\n" + length + proto + b"\x1a\x00")
        Path(f"{stem}.txt").write_text("HloModule elided")
        Path(f"{stem}-buffer-assignment.txt").write_text("none of ours")
    (path / "bare.pb").write_bytes(proto)
    return path


def test_the_proto_of_the_named_program_is_read(folder: Path) -> None:
    assert executed_flops(read_xla(folder, "jit_step")).total == ONE
    assert executed_flops(read_xla(folder, "jit_loss")).total == 0
    assert read_xla(folder / "bare.pb").name == read_xla(folder, "jit_loss").name


def test_one_of_several_programs_is_not_guessed(folder: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)has 2 programs.*module_0000.jit_step.*module="):
        read_xla(folder)
    with pytest.raises(UserError, match="no optimised program with 'eval' in its name"):
        read_xla(folder, "eval")


def test_a_text_is_read_as_it_is(tmp_path: Path) -> None:
    text = "HloModule m\n  %c = s32[99] constant({...})\n"
    (tmp_path / "module_0000.m.gpu_after_optimizations.txt").write_text(text)
    assert read_xla(tmp_path).elided == 1


@pytest.mark.parametrize("content", [b"", b"\n", b"\n\xff", b"\n" + b"\xff" * 12, b"HloModule m"])
def test_a_damaged_proto_is_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.hlo.pb"
    path.write_bytes(content)
    with pytest.raises(UserError, match="cannot be read"):
        read_xla(path)
