"""Functions from `jax.export`: the matrix products in their StableHLO."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

from mfu_jax.flops.count import dtype_bits
from mfu_jax.util.jax_internals import parse_stablehlo

# Work that is not counted here; what a custom call does is unknown, too.
_UNCOUNTED = {
    f"stablehlo.{name}" for name in ("cholesky", "convolution", "fft", "triangular_solve")
}
_ANNOTATIONS = {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"}


def exported_work(exported: Any) -> tuple[Counter[str], set[str]]:
    """FLOPs of one call of a `jax.export.Exported`, by dtype, and what could not be determined."""
    module, dialect = parse_stablehlo(exported.mlir_module())
    functions = {op.attributes["sym_name"].value: op for op in module.body.operations}
    unknown: set[str] = set()

    def of_region(parent: Any, number: int = 0) -> Counter[str]:
        total: Counter[str] = Counter()
        for op in parent.regions[number].blocks[0].operations:
            name = op.operation.name
            if name == "stablehlo.dot_general":
                total.update(_product(op, dialect))
            elif name == "func.call":
                total.update(of_region(functions[op.attributes["callee"].value]))
            elif name == "stablehlo.while":
                total.update(of_loop(op))
            elif name in ("stablehlo.case", "stablehlo.if"):
                branches = [of_region(op, index) for index in range(len(op.regions))]
                if any(branch != branches[0] for branch in branches):
                    unknown.add("which branch runs: the most expensive one was counted")
                most = max(branches, key=Counter.total)
                total.update(most)
            elif name == "stablehlo.custom_call":
                target = op.attributes["call_target_name"].value
                unknown.update({f"the FLOPs of {target}"} if target not in _ANNOTATIONS else ())
            elif name in _UNCOUNTED:
                unknown.add(f"the FLOPs of {name}")
        return total

    def of_loop(op: Any) -> Counter[str]:
        body, trips = of_region(op, 1), _trips(op)
        if trips is None and body:
            unknown.add("how often a loop runs: its body was counted once")
        return Counter({k: n * (1 if trips is None else trips) for k, n in body.items()})

    return of_region(functions["main"]), unknown


def _product(op: Any, dialect: Any) -> dict[str, int]:
    numbers = dialect.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    (lhs, *_), (result,) = op.operands, op.results
    contracted = math.prod(lhs.type.shape[d] for d in numbers.lhs_contracting_dimensions)
    dtype = max(map(_dtype, op.operands), key=dtype_bits)
    per_pair = 8 if dtype.startswith("c") else 2
    return {dtype: per_pair * math.prod(result.type.shape) * contracted}


def _dtype(value: Any) -> str:
    """HLO's name of an operand's dtype."""
    name = str(value.type.element_type).lower()
    if match := re.fullmatch(r"complex<f(\d+)>", name):
        return f"c{2 * int(match[1])}"
    return re.sub(r"^i", "s", name).replace("ui", "u")


def _trips(op: Any) -> int | None:
    """How often a loop runs whose counter grows by 1 up to a constant; None for other loops."""
    condition, body = (list(region.blocks[0].operations) for region in op.regions)
    compare = condition[-1].operands[0].owner
    if getattr(compare, "name", "") != "stablehlo.compare":
        return None
    counter, end = compare.operands
    is_less = "LT" in str(compare.attributes["comparison_direction"])
    if not is_less or not hasattr(counter, "arg_number"):
        return None
    number = counter.arg_number
    step = body[-1].operands[number].owner
    if getattr(step, "name", "") != "stablehlo.add":
        return None
    before, by = step.operands
    bounds = [_constant(value) for value in (op.operands[number], end, by)]
    if getattr(before, "arg_number", None) != number or None in bounds or bounds[2] != 1:
        return None
    return max(0, bounds[1] - bounds[0])


def _constant(value: Any) -> Any:
    """The integer that a value is; None if it is not a constant."""
    owner = value.owner
    if getattr(owner, "name", "") != "stablehlo.constant":
        return None
    return next(iter(owner.attributes["value"]))
