"""FLOPs of instructions other than matmuls."""

from mfu_jax.flops.executed.formulas import elementwise
from mfu_jax.flops.executed.hlo.opcodes import HAS_RULE


def test_the_parser_knows_which_opcodes_have_a_rule() -> None:
    assert {opcode.removesuffix("-start") for opcode in elementwise._RULES} == HAS_RULE
