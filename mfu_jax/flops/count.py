"""The result that traced and executed counts share: matmul FLOPs as exact Python ints.

Their fields have the same names, so that they can be compared with ``==``.
Counts add and scale: ``layer + layer``, ``3 * count``.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

COMPLEX_DTYPES = ("c64", "c128")
# Bits per element. `pred` takes a whole byte; tokens and opaque handles have no size.
_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128}


@functools.lru_cache(maxsize=256)
def dtype_bits(dtype: str) -> int:
    """Bits of one element: ``bf16`` → 16, ``s4`` → 4, ``f8e4m3fn`` → 8."""
    if dtype in _BITS:
        return _BITS[dtype]
    match = re.match(r"[a-z]+(\d+)", dtype)
    return int(match[1]) if match else 0


class Beyond(NamedTuple):
    """FLOPs that the hardware runs beyond 2·m·n·k.

    Attributes:
        stated: in tiles whose sizes the program states.
        assumed: in tiles that a library is known to use.
        on_padding: at window positions that read padding.
    """

    stated: int = 0
    assumed: int = 0
    on_padding: int = 0


NOTHING_BEYOND = Beyond()


class KernelRun(NamedTuple):
    """FLOPs of one run of a Pallas kernel.

    Attributes:
        flops: on elements inside its arrays.
        overhang: in addition, where its blocks overhang them.
    """

    flops: int
    overhang: int


KernelRuns = Mapping[str, int | tuple[KernelRun, ...]]
"""FLOPs of one run of each kernel, by name; all different runs where blocks overhang arrays."""


@dataclass(frozen=True, kw_only=True)
class Unaccounted:
    """Work whose FLOPs are unknown.

    Attributes:
        name: the primitive, HLO opcode or custom-call target.
        where: its op_name or name stack, if known.
        shapes: operand and result shapes, as text.
        reason: what is missing, and what to do about it.
        times: how often it runs in one step.
    """

    name: str
    where: str = ""
    shapes: str = ""
    reason: str = ""
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class FlopCount:
    """Matmul FLOPs (2·m·n·k each) of one call of one program, split by purpose.

    All numbers are Python ints. `rematerialized` is forward work that the backward pass repeats
    because of `jax.checkpoint`, `optimizer` is work on gradients (Muon's matmuls), `other` is work
    in no known phase. `evaluation` is the part of `forward` that a training step computes without
    differentiating it or using it for its gradients. `by_scope` maps `jax.named_scope` paths to
    FLOPs, and `by_dtype` operand dtypes (``bf16``); each sums to everything counted.
    `by_operation` splits the model's part, `forward` and `backward`, by phase, scope and primitive
    (``backward mlp/up/dot_general``).
    """

    forward: int = 0
    backward: int = 0
    rematerialized: int = 0
    optimizer: int = 0
    other: int = 0
    evaluation: int = 0
    by_scope: Mapping[str, int] = field(default_factory=dict)
    by_dtype: Mapping[str, int] = field(default_factory=dict)
    by_operation: Mapping[str, int] = field(default_factory=dict)
    unaccounted: tuple[Unaccounted, ...] = ()

    @property
    def total(self) -> int:
        """Everything counted. (A traced count excludes rematerialised and optimizer work.)"""
        return self.forward + self.backward + self.rematerialized + self.optimizer + self.other

    @property
    def complex_products(self) -> int:
        """FLOPs of products of complex numbers."""
        return sum(self.by_dtype.get(dtype, 0) for dtype in COMPLEX_DTYPES)

    def __add__(self, other: Self) -> Self:
        if type(other) is not type(self):
            return NotImplemented
        values = {
            f.name: _add(getattr(self, f.name), getattr(other, f.name))
            for f in dataclasses.fields(self)
        }
        return dataclasses.replace(self, **values)

    def __mul__(self, times: int) -> Self:
        if not isinstance(times, int):
            return NotImplemented
        values = {f.name: _scale(getattr(self, f.name), times) for f in dataclasses.fields(self)}
        return dataclasses.replace(self, **values)

    __rmul__ = __mul__

    def to_json(self) -> dict[str, Any]:
        """The fields and the total as plain JSON values."""
        return {**dataclasses.asdict(self), "total": self.total}


def operation(phase: str, scope: str, primitive: str) -> str:
    """A key of `FlopCount.by_operation`."""
    return f"{phase} {scope}/{primitive}" if scope else f"{phase} {primitive}"


def _add(a: Any, b: Any) -> Any:
    if isinstance(a, Mapping):
        return {key: _add(a.get(key, 0), b.get(key, 0)) for key in {**a, **b}}
    return a + b


def _scale(value: Any, times: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _scale(v, times) for key, v in value.items()}
    if isinstance(value, tuple):
        return tuple(dataclasses.replace(item, times=item.times * times) for item in value)
    return value * times
