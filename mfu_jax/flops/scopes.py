"""The phase and scope of an operation, from its name stack (jaxpr) or `op_name` (HLO metadata).

JAX writes both in the same grammar, for example
``jit(step)/transpose(jvp(decoder))/while/body/closed_call/layers/layers/checkpoint/mlp/wi/dot_general``:
transformations wrap a scope, control flow adds parts, and a rematerialised block repeats its
enclosing scope.
"""

from __future__ import annotations

import functools
import re
from typing import Literal, NamedTuple

# `read_scope` distinguishes three, `undifferentiated` two more; only the executed count has XLA's.
FlopPhase = Literal[
    "forward",
    "backward",
    "rematerialized",
    "evaluation",
    "optimizer",
    "xla_rematerialized",
    "other",
]

_WRAPPER = re.compile(r"^(\w+)\((.*)\)$")
_FUNCTION_WRAPPERS = {"jit", "pjit", "xla_call", "pmap", "core_call"}
# Parts that JAX itself adds to a path (einsum: its formula), and the markers of attention_mask.
_NOT_A_SCOPE = re.compile(
    r"^(while|body|cond|scan|closed_call|core_call|eval_jaxpr|custom_jvp_call"
    r"|custom_vjp_call|checkpoint|remat\d?|rematted_computation|shard_map|pjit|branch_\d+_fun|body_fun|cond_fun"
    r"|\S*->\S*|attention_mask\S*)$"
)


class Scope(NamedTuple):
    """An operation's phase, and its named scopes joined by ``/``."""

    phase: FlopPhase
    path: str


@functools.lru_cache(maxsize=65536)
def read_scope(op_name: str, *, drop_last: bool = True) -> Scope:
    """Splits a name stack into its phase and its path of named scopes.

    Args:
        op_name: an HLO instruction's `op_name`, or ``str(eqn.source_info.name_stack)``.
        drop_last: whether the last part is the primitive's name, as in an HLO `op_name`.

    >>> read_scope("jit(f)/transpose(jvp(decoder))/while/body/closed_call/layers/dot_general")
    Scope(phase='backward', path='decoder/layers')
    >>> read_scope("jit(f)/jvp(decoder)/mlp/checkpoint/rematted_computation/wi/dot_general").phase
    'rematerialized'
    """
    parts = _split(op_name)
    if drop_last and parts:
        parts = parts[:-1]
    path: list[str] = []
    transformations: set[str] = set()
    rematted = False
    for part in parts:
        rematted = rematted or part == "rematted_computation"
        while match := _WRAPPER.match(part):
            wrapper, part = match.groups()
            if wrapper in _FUNCTION_WRAPPERS:
                part = ""
                break
            transformations.add(wrapper)
        path.extend(p for p in part.split("/") if p and not _NOT_A_SCOPE.match(p))
    scope = "/".join(_collapse_repeats(path))
    if rematted:
        return Scope("rematerialized", scope)
    if "transpose" in transformations:
        return Scope("backward", scope)
    return Scope("forward", scope)


def _split(op_name: str) -> list[str]:
    """Splits at the slashes outside parentheses."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(op_name):
        if char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
        elif char == "/" and depth <= 0:
            parts.append(op_name[start:i])
            start = i + 1
    parts.append(op_name[start:])
    return [p for p in parts if p]


def _collapse_repeats(path: list[str]) -> list[str]:
    """``a b a b c`` → ``a b c``: a checkpointed block repeats its enclosing scope."""
    out: list[str] = []
    for part in path:
        out.append(part)
        for length in range(len(out) // 2, 0, -1):
            if out[-length:] == out[-2 * length : -length]:
                del out[-length:]
                break
    return out
