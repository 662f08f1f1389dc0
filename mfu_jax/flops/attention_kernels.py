"""Fused attention kernels: the facts that the traced and the executed count both need.

To add a kernel, add a row to attention_kernels.yml. The row says how a jaxpr and HLO name the
kernel and which matmuls it runs; both counts then know which of them the model needs and which ones
are recomputed. A kernel that is not attention needs no row: a Pallas kernel is counted by its body,
and the cost of a custom call without one is registered with `mfu_jax.kernels.register_kernel`.

Its program for the tests is recorded by tests/support/program_kernels.py.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from mfu_jax.util.yaml_files import read_mapping

# S = Q·Kᵀ and O = P·V forward; dP = dO·Vᵀ, dV = Pᵀ·dO, dQ = dS·K and dK = dSᵀ·Q backward.
Product = Literal["S", "O", "dP", "dV", "dQ", "dK"]
# Products that contract or produce V's head width; the others use that of Q and K.
OF_VALUE_WIDTH = frozenset({"O", "dP", "dV"})


@dataclass(frozen=True, kw_only=True)
class AttentionKernel:
    """One attention kernel, forward or backward. Its operands begin with Q, K and V.

    Attributes:
        name: pattern to search for in its name as a Pallas kernel, in a jaxpr or in HLO. Two rows
            may share names if only one of them runs dQ.
        scope: pattern to search for in the names around a kernel that has no name of its own. Of
            several rows, the one with dK and dV has two results [keys, heads, width].
        operands: how many operands it has if its scope is a common word; then its first ones are
            [batch, positions, heads, width], and after Q, K and V come dO and two numbers per row.
        primitives: JAX primitives that call it.
        targets: its custom-call targets in HLO.
        products: the matmuls that it runs over all pairs of query and key.
        recomputed: those that another kernel, or the same one earlier, has already run.
        sequence_dim: dimension of Q and K that holds positions; None if a parameter names it.
        mask_type: parameter of the primitive, and key of the backend_config, that names the mask.
        window: the same for the number of keys that a query sees, itself included.
    """

    name: str = r"(?!)"  # matches nothing
    scope: str = r"(?!)"
    operands: int | None = None
    primitives: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    products: tuple[Product, ...]
    recomputed: tuple[Product, ...] = ()
    sequence_dim: int | None = -2
    mask_type: str = ""
    window: str = ""

    @property
    def needed(self) -> tuple[Product, ...]:
        """The products that the model needs: all but the recomputed ones."""
        return tuple((Counter(self.products) - Counter(self.recomputed)).elements())

    @property
    def share_recomputed(self) -> Fraction:
        """The recomputed share of its FLOPs."""
        return Fraction(len(self.recomputed), len(self.products))


def _kernel(row: Mapping[str, Any]) -> AttentionKernel:
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
    return AttentionKernel(**fields)


_TABLE = read_mapping(Path(__file__).with_name("attention_kernels.yml"))
KERNELS = tuple(_kernel(row) for row in _TABLE["kernels"])
BY_PRIMITIVE = {primitive: kernel for kernel in KERNELS for primitive in kernel.primitives}
BY_TARGET = {target: kernel for kernel in KERNELS for target in kernel.targets}


@functools.lru_cache(maxsize=1024)
def kernels_named(name: str) -> tuple[AttentionKernel, ...]:
    """The rows matching a Pallas kernel's name: several if only the body distinguishes them."""
    return tuple(kernel for kernel in KERNELS if re.search(kernel.name, name))


Dimensions = tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def kernel_in_scope(
    scope: str, operands: tuple[Dimensions, ...], results: tuple[Dimensions, ...]
) -> AttentionKernel | None:
    """The row of a kernel without a name; None if it is not an attention kernel.

    Args:
        scope: the names around it.
        operands: dimensions of its operands.
        results: dimensions of its results.
    """
    fitting = [
        kernel
        for kernel in KERNELS
        if re.search(kernel.scope, scope)
        and kernel.operands in (None, len(operands))
        and (kernel.operands is None or _has_shapes_of_attention(operands, results))
    ]
    has_dk = len(results) == 2 and results[0][:-1] == results[1][:-1]
    chosen = [kernel for kernel in fitting if ("dK" in kernel.products) == has_dk]
    return (*chosen, *fitting, None)[0]


def _has_shapes_of_attention(
    operands: tuple[Dimensions, ...], results: tuple[Dimensions, ...]
) -> bool:
    """Whether operands are Q, K, V and, backward, dO and two numbers per head and query."""
    q, k, v, *rest = operands
    if not results or k != v or [len(q), len(k), len(results[0])] != [4, 4, 4]:
        return False
    batch, queries, heads, width = q
    shared = (k[0], heads % max(1, k[2]), k[3]) == (batch, 0, width)
    return shared and (not rest or rest == [q, *[(batch, heads, queries)] * 2])


# Splash attention's backward pass sums o · do with an einsum outside its kernels.
BESIDE_KERNELS = "jit(_splash_attention)/"
_ATTENTION = re.compile(r"attention|fmha|flash|splash|(?<![a-z])m[hq]a(?![a-z])", re.IGNORECASE)


def is_attention(name: str) -> bool:
    """Whether a kernel's name or target marks it as attention; it may have no row.

    >>> [is_attention(name) for name in ("my_flash_fwd", "mqa", "quantized_matmul")]
    [True, True, False]
    """
    return _ATTENTION.search(name) is not None
