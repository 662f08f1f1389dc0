"""Both ways of reading a computation: all its lines at once, and line by line."""

from __future__ import annotations

import gc

import pytest

from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.executed.formulas.elementwise import elementwise_flops
from mfu_jax.flops.executed.hlo.module import HloInstruction, HloModule
from mfu_jax.flops.executed.hlo.parsing import _Parser, check_module, parse_hlo
from mfu_jax.flops.executed.hlo.text import HloParseError
from tests.support.recorded import text_of

NAMES = ["v5e_unrolled_full", "h100_resnet50", "cpu_loops_nested", "v5p_mesh_2x2x2", "h100_triton"]


def _content(module: HloModule) -> list[object]:
    """All that is read of a program."""
    computations = [
        (
            c.name,
            c.number,
            c.roots,
            c.root.name,
            [
                (i.name, i.number, i.shape_text, i.opcode, i.operand_text, i.attribute_text)
                for i in c.instructions.values()
            ],
        )
        for c in module.computations.values()
    ]
    indexed = {
        opcode: [(c.name, i.name) for c, i in module.with_opcode(opcode)]
        for opcode in module.indexed
    }
    return [module.name, module.header, module.entry.name, computations, indexed]


@pytest.mark.parametrize("name", NAMES)
def test_a_program_reads_the_same_at_once_and_line_by_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = parse_hlo(text_of(name))
    assert any(c.deferred for c in at_once.computations.values())
    monkeypatch.setattr(_Parser, "_read_at_once", lambda *_, **__: False)
    by_lines = parse_hlo(text_of(name))
    assert not any(c.deferred for c in by_lines.computations.values())
    assert _content(at_once) == _content(by_lines)


@pytest.mark.parametrize("name", NAMES)
def test_flops_from_the_text_are_those_of_the_instructions(name: str) -> None:
    module = parse_hlo(text_of(name))
    for computation in module.computations.values():
        if computation.elementwise is not None:
            instructions = computation.instructions.values()
            flops = sum(elementwise_flops(computation, i, lambda _: 0) for i in instructions)
            assert computation.elementwise == flops


@pytest.mark.parametrize("name", [*NAMES, "v5p_llama70b", "v5e_devices_pipeline"])
def test_an_attribute_read_alone_is_the_one_read_with_all_others(name: str) -> None:
    for computation in parse_hlo(text_of(name)).computations.values():
        for i in computation.instructions.values():
            for key, value in i.attributes.items():
                fresh = HloInstruction(i.name, i.shape_text, i.opcode, "", i.attribute_text, 0)
                assert fresh.attribute(key) == value


@pytest.mark.full
@pytest.mark.parametrize("name", ["v5p_llama70b", "cpu_loops_nested", "v5e_devices_branches"])
def test_a_counted_program_does_not_wait_for_the_garbage_collector(name: str) -> None:
    executed_flops(text_of(name))
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(kept, HloModule) for kept in gc.get_objects())
        executed_flops(text_of(name))
        assert sum(isinstance(kept, HloModule) for kept in gc.get_objects()) == before
    finally:
        gc.enable()


def _program(*lines: str) -> HloModule:
    header = "HloModule m\n\nENTRY %main (x: f32[2], y: f32[2]) -> f32[2] {\n"
    return parse_hlo(header + "".join(f"  {line}\n" for line in lines) + "}\n")


X, Y = "%x = f32[2] parameter(0)", "%y = f32[2] parameter(1)"


def test_operands_with_types_and_comments_are_found() -> None:
    for operands in ("%x, %y", "f32[2]{0} %x, f32[2]{0} %y", "%x, /*index=1*/%y"):
        check_module(_program(X, Y, f"ROOT %z = f32[2] add({operands})"))
    for operands in ("%x, %w", "f32[2]{0} %x, f32[2]{0} %w", "%x, /*index=1*/%w"):
        with pytest.raises(HloParseError, match="has no instruction %w"):
            check_module(_program(X, Y, f"ROOT %z = f32[2] add({operands})"))


def test_names_without_a_percent_sign_are_checked_one_by_one() -> None:
    text = "HloModule m\nENTRY main {\n  x = f32[2] parameter(0)\n  ROOT z = f32[2] add(x, %s)\n}\n"
    check_module(parse_hlo(text % "x"))
    with pytest.raises(HloParseError, match="has no instruction %w"):
        check_module(parse_hlo(text % "w"))
