"""Matmul FLOPs of Pallas TPU kernels, from the kernel's own body.

A ``tpu_custom_call`` carries its kernel as MLIR (Mosaic), which `mosaic.body` parses and
`mosaic.walk` runs. Branches that depend on tables in scalar memory (splash attention's block mask)
are decided from the tables if these are constants of the program.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from mfu_jax.flops.attention_kernels import kernels_named
from mfu_jax.flops.executed.kernels.mosaic.body import (
    KernelBody,
    Table,
    UnknownBodyError,
    kernel_body,
)
from mfu_jax.flops.executed.kernels.mosaic.walk import grid_flops
from mfu_jax.flops.executed.kernels.registry import (
    KernelCall,
    KernelCost,
    UnknownCost,
    register_kernel,
)


@register_kernel("tpu_custom_call")
def _pallas_tpu(call: KernelCall) -> KernelCost | UnknownCost:
    """From the kernel's body, or its author's `cost_estimate` if the body depends on data."""
    config = call.config.get("custom_call_config")
    if not isinstance(config, dict):
        return UnknownCost(reason="tpu_custom_call without custom_call_config")
    estimate = _estimate(config)
    body = None
    try:
        body = kernel_body(str(config.get("body", "")))
        flops = grid_flops(body, functools.partial(_scalar_table, call))
    except UnknownBodyError as error:
        return UnknownCost(
            reason=str(error),
            dtype=body.dtype if body else "",
            share_rematerialized=_share_recomputed(body, call.name) if body else Fraction(0),
            estimate=estimate,
        )
    return KernelCost(
        flops=flops,
        rematerialized=int(flops * _share_recomputed(body, call.name)),
        dtype=body.dtype,
        seen_by_xla=estimate or 0,
    )


def _share_recomputed(body: KernelBody, name: str) -> Fraction:
    """The share of the body's matmuls that an attention kernel recomputes.

    Of several kernels with one name, the first whose matmul count divides the body's.
    """
    kernels = kernels_named(name)
    fitting = [kernel for kernel in kernels if body.matmuls % len(kernel.products) == 0]
    return (*fitting, *kernels)[0].share_recomputed if kernels else Fraction(0)


def _estimate(config: Mapping[str, Any]) -> int | None:
    estimate = config.get("cost_estimate")
    flops = str(estimate.get("flops")) if isinstance(estimate, dict) else ""
    return int(flops) if flops.isdecimal() else None


def _scalar_table(call: KernelCall, index: int) -> Table:
    """Dimensions and values, in row-major order, of an operand that is a constant."""
    text = call.literal(index)
    if text is None:
        raise UnknownBodyError("it skips blocks by a table that is not a constant of the program")
    values = tuple(int(v) for v in re.findall(r"-?\d+", text.replace("true", "1")))
    dims = call.operand(index).dims
    if len(values) != math.prod(dims):
        raise UnknownBodyError("it skips blocks by a table that the text leaves out")
    return dims, values
