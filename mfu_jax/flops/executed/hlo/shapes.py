"""Shapes of HLO values: dtypes, dimensions, bytes."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from mfu_jax.flops.count import dtype_bits

_FAST_MEMORY = re.compile(r"S\([1-9]\d*\)")


@dataclass(frozen=True)
class Shape:
    """An array's dtype and dimensions, or a tuple's elements (dtype ``tuple``).

    A program has few distinct ones, queried often: derived values are cached.
    """

    dtype: str
    dims: tuple[int, ...] = ()
    elements: tuple[Shape, ...] = ()
    layout: str = ""

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.dtype, self.dims, self.elements, self.layout))

    @functools.cached_property
    def size(self) -> int:
        """Number of elements; for a tuple, of all its arrays."""
        if self.dtype == "tuple":
            return sum(element.size for element in self.elements)
        return math.prod(self.dims)

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes of the array without layout padding, or of all arrays of the tuple."""
        if self.dtype == "tuple":
            return sum(element.bytes for element in self.elements)
        return (math.prod(self.dims) * dtype_bits(self.dtype) + 7) // 8

    @functools.cached_property
    def hbm_bytes(self) -> int:
        """The part of `bytes` that is in HBM; TPUs keep some arrays in faster memory."""
        if self.dtype == "tuple":
            return sum(element.hbm_bytes for element in self.elements)
        return 0 if self.is_in_fast_memory else self.bytes

    @functools.cached_property
    def is_in_fast_memory(self) -> bool:
        """Whether an array is in one of a TPU's memories other than HBM, such as ``S(1)``."""
        return _FAST_MEMORY.search(self.layout) is not None

    def leaves(self) -> Iterator[Shape]:
        """The arrays of nested tuples, in order."""
        if self.dtype != "tuple":
            yield self
        for element in self.elements:
            yield from element.leaves()

    def __str__(self) -> str:
        if self.dtype == "tuple":
            return f"({', '.join(map(str, self.elements))})"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"
