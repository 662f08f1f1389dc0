"""A compiled program detached from its compiler: its text, and what JAX reports about it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, Self

from mfu_jax.flops.count import KernelRuns
from mfu_jax.flops.exact import integral
from mfu_jax.flops.lengths import NO_LENGTHS, Lengths

_ELIDED = re.compile(r"\bconstant\(\{\.\.\.\}\)")
_NAME = re.compile(r"HloModule ([^\s,]+)")


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """Model FLOPs of one call of the program on one device.

    Attributes:
        per_device: by `convention`; a fraction where devices share them unequally.
        convention: how attention pairs are counted.
        dense: the same with all attention pairs; None if unknown.
        attention: the part of `per_device` that attention kernels may compute; None if unknown.
        is_whole: whether `per_device` was traced from the compiled function, without gaps.
        operations: as in `FlopCount.by_operation`, per device, attention dense; empty if unknown.
        avoidable: the part of `operations` that a compiler may avoid, as in `TracedCount`.
        overheads: other known work of the program, by its line in the ledger.
    """

    per_device: int | Fraction
    convention: str
    dense: int | Fraction | None = None
    attention: int | Fraction | None = None
    is_whole: bool = False
    operations: Mapping[str, int | Fraction] = field(default_factory=dict)
    avoidable: Mapping[str, int | Fraction] = field(default_factory=dict)
    overheads: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def traced(cls, count: Any, devices: int, convention: str = "maxtext", **more: Any) -> Self:
        """One device's share of the `TracedCount` of a whole job; `more` are other fields."""
        total, share = count.total_in(convention), Fraction(1, devices)
        return cls(
            per_device=integral(total * share),
            convention=convention,
            dense=integral(count.total * share),
            attention=integral((count.activations - (count.total - total)) * share),
            is_whole=not count.unaccounted,
            operations={name: integral(n * share) for name, n in count.by_operation.items()},
            avoidable={name: integral(n * share) for name, n in count.avoidable.items()},
            overheads={label: round(n * share) for label, n in count.overheads.items()},
            **more,
        )

    @property
    def values(self) -> dict[str, Any]:
        """The fields that a dump holds."""
        return {found.name: getattr(self, found.name) for found in fields(ModelFlops)}

    @property
    def ledger_arguments(self) -> dict[str, Any]:
        """The fields as `compare_flops` takes them."""
        values = self.values
        return {"model": values.pop("per_device"), **values}


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The devices that a program is compiled for.

    Attributes:
        platform: ``cpu``, ``gpu`` or ``tpu``; empty if unknown, like the others.
        device_kind: JAX's name of the chip.
        devices: number in the whole job; 0 if unknown.
        processes: number in the whole job; 0 if unknown.
        mesh: axis → size, from the first array that has a mesh.
        memory_bytes: what a program may use on one device.
    """

    platform: str = ""
    device_kind: str = ""
    devices: int = 0
    processes: int = 0
    mesh: Mapping[str, int] = field(default_factory=dict)
    memory_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ProgramDump:
    """A dump's content. It can be used like a compiled program: ``executed_flops(load(path))``.

    Attributes:
        text: the optimised HLO, with its large constants unless `elided` says otherwise.
        cost: ``compiled.cost_analysis()``; None if XLA gave none.
        memory: bytes by field of ``compiled.memory_analysis()``; None if XLA gave none.
        topology: the devices.
        versions: package → version, and ``platform`` → the runtime's own description.
        parameter_shardings: shardings of the ENTRY computation's parameters, in HLO syntax.
        model: model FLOPs; None if not given.
        kernel_flops: FLOPs per run of custom kernels, by name, as for `executed_flops`.
        trip_counts: iterations of data-dependent loops, as for `executed_flops`.
        lengths: data-dependent group sizes and sequence lengths, as for `executed_flops`.
    """

    text: str
    cost: Mapping[str, float] | None = None
    memory: Mapping[str, int] | None = None
    topology: Topology = field(default_factory=Topology)
    versions: Mapping[str, str] = field(default_factory=dict)
    parameter_shardings: tuple[str, ...] = ()
    model: ModelFlops | None = None
    kernel_flops: KernelRuns = field(default_factory=dict)
    trip_counts: Mapping[str, int] = field(default_factory=dict)
    lengths: Lengths = NO_LENGTHS

    @property
    def name(self) -> str:
        """The module's name, such as ``jit_step``; empty if the text has none."""
        match = _NAME.search(self.text)
        return match[1] if match else ""

    @property
    def elided(self) -> int:
        """How many constants the text omits; 0 in a dump of a compiled program."""
        return len(_ELIDED.findall(self.text))

    @property
    def counting(self) -> dict[str, Any]:
        """What `counter_of` takes besides the program."""
        return {name: getattr(self, name) for name in ("kernel_flops", "trip_counts", "lengths")}

    def as_text(self) -> str:
        """The optimised HLO as from ``compiled.as_text()``, but complete."""
        return self.text

    def cost_analysis(self) -> dict[str, float] | None:
        """What ``compiled.cost_analysis()`` returned."""
        return None if self.cost is None else dict(self.cost)

    def memory_analysis(self) -> Any:
        """What ``compiled.memory_analysis()`` returned: the same attributes, in bytes; or None."""
        return None if self.memory is None else SimpleNamespace(**self.memory)

    def __repr__(self) -> str:
        return f"ProgramDump({self.name}, {len(self.text):_} characters, {self.topology})"
