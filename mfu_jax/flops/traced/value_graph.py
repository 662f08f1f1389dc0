"""A jaxpr as `ProgramValue`s, from which the purpose of its undifferentiated matmuls is derived.

Calls are inlined, and a loop's body once: weights updated in one iteration are weights, not
gradients, in the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mfu_jax.flops.scopes import read_scope
from mfu_jax.flops.traced.jaxprs import bodies, inner_jaxprs, interpret, stack_below
from mfu_jax.flops.undifferentiated import ProgramValue
from mfu_jax.util.jax_internals import open_jaxpr, scan_groups

# Primitives whose result has their operands' elements: moved, cast, or scaled.
_MOVES = {
    "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "copy_p", "device_put",
    "dynamic_slice", "mul", "neg", "optimization_barrier", "pbroadcast", "pvary",
    "reduce_precision", "reshape", "reshard", "rev", "sharding_constraint", "slice", "split",
    "squeeze", "transpose",
}  # fmt: skip


def value_graph(jaxpr: Any, matmuls: frozenset[str]) -> list[ProgramValue]:
    """The values of a jaxpr; their sites are the ``id``s of equations.

    Args:
        jaxpr: the open jaxpr of a whole function.
        matmuls: names of the primitives that multiply matrices.
    """
    graph = _ValueGraphBuilder(matmuls)
    graph.inline(jaxpr, [graph.add((), v.aval, is_input=True) for v in jaxpr.invars], "")
    return graph.values


class _ValueGraphBuilder:
    """Adds values, equation by equation."""

    def __init__(self, matmuls: frozenset[str]) -> None:
        self.matmuls = matmuls
        self.values: list[ProgramValue] = []

    def add(self, operands: tuple[int, ...], aval: Any, **facts: Any) -> int:
        self.values.append(ProgramValue(operands, getattr(aval, "size", 1), **facts))
        return len(self.values) - 1

    def inline(self, jaxpr: Any, given: Sequence[int], stack: str) -> list[int]:
        """Adds a jaxpr's values, given those of its inputs; returns those of its results."""
        return interpret(
            jaxpr,
            dict(zip(jaxpr.invars, given, strict=True)),
            lambda atom: self.add((), atom.aval),
            lambda eqn, operands: self._equation(eqn, operands, stack_below(stack, eqn)),
        )

    def _equation(self, eqn: Any, given: list[int], stack: str) -> Sequence[int]:
        name = eqn.primitive.name
        inner = inner_jaxprs(eqn.params)
        if name in self.matmuls or not inner:
            return self._plain(eqn, given, stack)
        if name == "scan":
            return self._scan(eqn, inner["jaxpr"][0], given, stack)
        if name == "while":
            start = eqn.params["cond_nconsts"]
            return self.inline(inner["body_jaxpr"][0], given[start:], stack)
        if name == "cond":
            branches = [self.inline(branch, given[1:], stack) for branch in inner["branches"]]
            return [
                self.add(tuple(results), v.aval, is_moved=True)
                for v, *results in zip(eqn.outvars, *branches, strict=True)
            ]
        jaxprs = bodies(eqn)
        if name in ("linear_solve", "custom_linear_solve"):
            jaxprs = [open_jaxpr(eqn.params["jaxprs"].solve)]  # the other jaxprs are for gradients
        if len(jaxprs) == 1 and len(jaxprs[0].invars) == len(given):
            results = self.inline(jaxprs[0], given, stack)
            if len(results) == len(eqn.outvars):
                return results
        inside = [i for jaxpr in jaxprs for i in self._opaque(jaxpr, given, stack)]
        return self._plain(eqn, [*given, *inside], stack)

    def _opaque(self, jaxpr: Any, given: list[int], stack: str) -> list[int]:
        """Values of a jaxpr with unknown inputs: each is computed from all of `given`."""
        values = []
        for eqn in jaxpr.eqns:
            if (jaxprs := bodies(eqn)) and eqn.primitive.name not in self.matmuls:
                values += [i for inner in jaxprs for i in self._opaque(inner, given, stack)]
            else:
                values += self._plain(eqn, given, f"{stack}/{eqn.source_info.name_stack}")
        return values

    def _plain(self, eqn: Any, given: list[int], stack: str) -> list[int]:
        name = eqn.primitive.name
        is_backward = read_scope(stack, drop_last=False).phase != "forward"
        is_differentiated = is_backward or "jvp(" in stack
        is_matmul = name in self.matmuls
        facts = {
            "site": id(eqn) if is_matmul and not is_differentiated else 0,
            "is_moved": name in _MOVES,
            "is_differentiated": is_differentiated,
            "is_gradient": is_matmul and is_backward,
        }
        return [self.add(tuple(given), v.aval, **facts) for v in eqn.outvars]

    def _scan(self, eqn: Any, jaxpr: Any, given: list[int], stack: str) -> list[int]:
        consts, carries = scan_groups(eqn)
        start = consts + carries
        slices = [
            self.add((whole,), v.aval, is_moved=True)
            for whole, v in zip(given[start:], jaxpr.invars[start:], strict=True)
        ]
        results = self.inline(jaxpr, [*given[:start], *slices], stack)
        stacks = [
            self.add((one,), v.aval, is_moved=True)
            for one, v in zip(results[carries:], eqn.outvars[carries:], strict=True)
        ]
        return [*results[:carries], *stacks]
