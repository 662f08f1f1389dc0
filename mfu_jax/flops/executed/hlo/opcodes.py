"""What HLO instructions cost by their opcode alone."""

from __future__ import annotations

import functools

from mfu_jax.flops.executed.hlo.module import CALLS

ELEMENTWISE = frozenset(
    "abs add and ceil clamp compare complex convert count-leading-zeros divide floor imag "
    "is-finite maximum minimum multiply negate not or popcnt real reduce-precision remainder "
    "round-nearest-afz round-nearest-even select shift-left shift-right-arithmetic "
    "shift-right-logical sign stochastic-convert subtract xor".split()
)
"""Opcodes that XLA counts as one FLOP per element of the result."""
TRANSCENDENTAL = frozenset(
    "acos acosh asin asinh atan2 atanh cbrt cosh cosine erf exponential exponential-minus-one log "
    "log-plus-one logistic power rsqrt sine sinh sqrt tan tanh".split()
)
"""Opcodes of one element for each element, which XLA does not count as FLOPs."""
HAS_RULE = frozenset("reduce reduce-window select-and-scatter map scatter sort all-reduce".split())
"""Opcodes that `formulas.elementwise` counts by a rule of their own."""

# Instructions that neither compute nor move anything: most of a program.
FREE = frozenset("parameter constant get-tuple-element tuple bitcast".split())
_FREE_IN_FUSIONS = FREE | frozenset("broadcast copy transpose reshape slice pad iota".split())
# Every other opcode without a rule: none multiplies matrices.
NO_MATMUL = (
    (_FREE_IN_FUSIONS | ELEMENTWISE | TRANSCENDENTAL | HAS_RULE) - {"all-reduce"}
) | frozenset(
    "add-dependency after-all batch-norm-grad batch-norm-inference batch-norm-training "
    "bitcast-convert concatenate domain dynamic-reshape dynamic-slice dynamic-update-slice gather "
    "get-dimension-size infeed opt-barrier optimization-barrier outfeed partition-id recv "
    "replica-id reverse rng rng-bit-generator rng-get-and-update-state send set-dimension-size "
    "topk".split()
)
# Opcodes whose cost in a fusion is one FLOP per element, or none.
ONLY_ELEMENTWISE = ELEMENTWISE | NO_MATMUL - HAS_RULE


@functools.lru_cache(maxsize=1024)
def is_free(opcode: str) -> bool:
    """Whether an instruction costs nothing; asynchronous work is counted at its start."""
    return opcode in FREE or opcode.endswith(("-done", "-update"))


# Opcodes that read or write part of an array.
PARTS = frozenset({"dynamic-slice", "slice", "gather", "dynamic-update-slice"})
# Opcodes that a count looks for in the whole program.
INDEXED = PARTS.union(
    CALLS,
    ("fusion-start", "pad", "select", "and", "maximum", "concatenate"),
    ("collective-permute", "collective-permute-start"),
)
# Opcodes whose results differ between devices, whatever their operands.
DIFFER_BY_DEVICE = frozenset(
    {"partition-id", "replica-id", "rng", "infeed", "recv", "ragged-all-to-all"}
)

MATMUL_NAME = "dot_general"
"""The end of the op_name that JAX gives to a matmul."""
