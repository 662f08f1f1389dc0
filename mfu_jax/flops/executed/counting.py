"""Executed FLOPs: what a compiled program runs on one device, from its optimised HLO text.

Two passes over the call graph. Bottom-up: the FLOPs of one call of each computation, which decides
the branch of a conditional. Top-down: how often each computation runs, so that every instruction
is looked at once, however often it is executed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

# Imported for the costs that they register.
import mfu_jax.flops.executed.kernels.cudnn
import mfu_jax.flops.executed.kernels.mosaic  # noqa: F401
from mfu_jax.flops.count import FlopCount, Unaccounted
from mfu_jax.flops.executed.collectives import Collective
from mfu_jax.flops.executed.costs import Call, CostReader, KernelFlops, LocalCost, Matmul
from mfu_jax.flops.executed.duplicates import duplicates
from mfu_jax.flops.executed.gradients import gradient_users
from mfu_jax.flops.executed.hlo import HloModule, HloParseError, parse_hlo
from mfu_jax.flops.executed.names import inferred_op_name
from mfu_jax.flops.scopes import Scope, read_scope


class HasText(Protocol):
    """A compiled program: ``jax.jit(f).lower(…).compile()``."""

    def as_text(self) -> str | None:
        """The optimised HLO."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """Something that a reader of the count should know, and how often it happens in one step."""

    text: str
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class ExecutedCount(FlopCount):
    """Matmul FLOPs that one device executes in one call of the program.

    Attributes:
        duplicated: FLOPs of matmuls that XLA runs once more on the same operands, in another
            fusion. A part of `total`.
        kernels: FLOPs in custom kernels whose inside XLA does not see (or sees wrongly), by name.
            A part of `total`, as everything that is counted is in one of the phases.
        attention_kernels: FLOPs of attention kernels, forward and backward, without what they
            compute again.
        elementwise: FLOPs of everything that is no matmul, by XLA's own rule of one for each
            element of a result. Not a part of `total`.
        hbm_bytes: bytes that unfused instructions read from and write to HBM.
        collectives: every collective, with its bytes and how often it runs.
        loops_once: `total` with every loop body counted once, as XLA's own report does.
        kernels_once: FLOPs of `kernels` with every loop body counted once …
        kernels_xla: … and what XLA takes them for: their authors' `cost_estimate`, or 0.
        elementwise_once: `elementwise` with every loop body counted once.
        flags: choices that the count had to make, such as the branch of a conditional.
    """

    duplicated: int = 0
    kernels: Mapping[str, int] = field(default_factory=dict)
    attention_kernels: int = 0
    elementwise: int = 0
    hbm_bytes: int = 0
    collectives: tuple[Collective, ...] = ()
    loops_once: int = 0
    kernels_once: int = 0
    kernels_xla: int = 0
    elementwise_once: int = 0
    flags: tuple[Flag, ...] = ()


def executed_flops(
    program: HasText | str,
    *,
    kernel_flops: KernelFlops | None = None,
    trip_counts: Mapping[str, int] | None = None,
) -> ExecutedCount:
    """Counts the matmul FLOPs that one device executes in one call of a compiled program.

    Args:
        program: what ``jax.jit(f).lower(…).compile()`` returned, or its ``as_text()``.
        kernel_flops: FLOPs of one run of custom kernels, by kernel name or custom-call target; or
            a function of the `KernelCall` that returns them, or None where it does not know. Asked
            where the program does not tell; `register_kernel` replaces what it does tell.
        trip_counts: iterations of loops that depend on data, by the op_name or the name of the
            ``while``, as `unaccounted` shows it.

    Returns:
        The count. What could not be counted is in `unaccounted`.

    Raises:
        HloParseError: where the text is not optimised HLO.

    >>> executed_flops('''HloModule m
    ... ENTRY %main (x: f32[2,3], y: f32[3,4]) -> f32[2,4] {
    ...   %x = f32[2,3] parameter(0)
    ...   %y = f32[3,4] parameter(1)
    ...   ROOT %d = f32[2,4] dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ... }''').total
    48
    """
    text = program if isinstance(program, str) else program.as_text()
    if not text:
        raise HloParseError("the compiled program has no text")

    def count() -> ExecutedCount:
        module = parse_hlo(text)
        reader = CostReader(
            module,
            kernel_flops=kernel_flops,
            trip_counts=trip_counts or {},
            constants=_Constants(program).module,
        )
        return _Counter(module, reader).count()

    with _no_garbage_collection():
        return count()  # and what it made is freed before there is collection again


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Millions of small objects and no cycles among them: collections took a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Constants:
    """The program once more with its large constants written out; made only if one is needed."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self.made: HloModule | None = None
        self.tried = False

    def module(self) -> HloModule | None:
        if not self.tried and hasattr(self.program, "runtime_executable"):
            self.tried = True
            hlo = self.program.runtime_executable().hlo_modules()[0]
            options = sys.modules[type(hlo).__module__].HloPrintOptions()
            options.print_large_constants = True
            self.made = parse_hlo(hlo.to_string(options))
        return self.made


@dataclass(slots=True)
class _Sums:
    """What the top-down pass adds up."""

    phases: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    scopes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    dtypes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    kernels: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    attention_kernels: int = 0
    loops_once: int = 0
    kernels_once: int = 0
    kernels_xla: int = 0

    def add(self, matmul: Matmul, scope: Scope, runs: int, once: int) -> None:
        if matmul.attention and scope.phase != "rematerialized":
            self.attention_kernels += runs * (matmul.flops - matmul.rematerialized)
        self.phases[scope.phase] += runs * (matmul.flops - matmul.rematerialized)
        self.phases["rematerialized"] += runs * matmul.rematerialized
        self.scopes[scope.path] += runs * matmul.flops
        self.dtypes[matmul.dtype] += runs * matmul.flops
        self.loops_once += once * matmul.flops
        if matmul.kernel:
            self.kernels[matmul.kernel] += runs * matmul.flops
            self.kernels_once += once * matmul.flops
            self.kernels_xla += once * matmul.seen_by_xla


class _Counter:
    def __init__(self, module: HloModule, reader: CostReader) -> None:
        self.module = module
        self.reader = reader
        self.locals: dict[str, LocalCost] = {}
        self.totals: dict[str, int] = {}

    def count(self) -> ExecutedCount:
        order = self._bottom_up_order()
        for name in order:
            local = self.locals[name]
            self.totals[name] = sum(matmul.flops for matmul in local.matmuls) + sum(
                self.totals[callee] * times
                for call in local.calls
                for callee, times in self._taken(call)
            )
        times: dict[str, int] = defaultdict(int)
        once: dict[str, int] = defaultdict(int)
        context: dict[str, str] = defaultdict(str)  # op_name of a computation's caller
        entry = self.module.entry.name
        times[entry] = once[entry] = 1
        found: list[tuple[Matmul, str, int, int]] = []
        untaken: dict[str, int] = defaultdict(int)  # runs, at most, of branches not counted
        unaccounted: list[Unaccounted] = []
        collectives: list[Collective] = []
        flags: list[Flag] = []
        elementwise = elementwise_once = hbm_bytes = 0
        for name in reversed(order):
            runs, local = times[name], self.locals[name]
            most = runs + untaken[name]
            unaccounted += [dataclasses.replace(u, times=most * u.times) for u in local.unaccounted]
            for call in local.calls:
                for callee, factor in set(call.callees) - set(self._taken(call) if runs else ()):
                    untaken[callee] += most * factor
            if not once[name]:
                continue
            for matmul in local.matmuls:
                op_name = self._op_name(name, matmul, context[name])
                found.append((matmul, op_name, runs, once[name]))
            for call in local.calls:
                op_name = call.instruction.op_name or context[name]
                for callee, factor in self._taken(call):
                    times[callee] += runs * factor
                    once[callee] += once[name]
                    context[callee] = context[callee] or op_name
                if text := self._branches(call):
                    flags.append(Flag(text=text, times=runs))
            flags += [Flag(text=note, times=runs) for note in local.notes]
            collectives += [dataclasses.replace(c, times=runs * c.times) for c in local.collectives]
            elementwise += runs * local.elementwise
            elementwise_once += once[name] * local.elementwise
            hbm_bytes += runs * local.hbm_bytes
        sums = self._sums(found)
        return ExecutedCount(
            forward=sums.phases["forward"],
            backward=sums.phases["backward"],
            rematerialized=sums.phases["rematerialized"],
            optimizer=sums.phases["optimizer"],
            other=sums.phases["other"],
            by_scope=dict(sums.scopes),
            by_dtype=dict(sums.dtypes),
            unaccounted=tuple(unaccounted),
            duplicated=self._duplicated(times),
            kernels=dict(sums.kernels),
            attention_kernels=sums.attention_kernels,
            elementwise=elementwise,
            hbm_bytes=hbm_bytes,
            collectives=tuple(collectives),
            loops_once=sums.loops_once,
            kernels_once=sums.kernels_once,
            kernels_xla=sums.kernels_xla,
            elementwise_once=elementwise_once,
            flags=tuple(flags),
        )

    def _sums(self, found: list[tuple[Matmul, str, int, int]]) -> _Sums:
        """The matmuls (each with its op_name, runs, and runs with loops counted once), by sort."""
        scopes = [read_scope(op_name) for _, op_name, _, _ in found]
        backward = {
            id(matmul.instruction)
            for (matmul, *_), scope in zip(found, scopes, strict=True)
            if scope.phase in ("backward", "rematerialized")
        }
        undifferentiated = [
            scope.phase == "forward" and "jvp(" not in op_name
            for (_, op_name, _, _), scope in zip(found, scopes, strict=True)
        ]
        users = gradient_users(self.module, backward) if backward and any(undifferentiated) else ()
        sums = _Sums()
        for (matmul, _, runs, once), scope, is_plain in zip(
            found, scopes, undifferentiated, strict=True
        ):
            if is_plain and id(matmul.instruction) in users:
                scope = scope._replace(phase="optimizer")
            sums.add(matmul, scope, runs, once)
        return sums

    def _bottom_up_order(self) -> list[str]:
        """Names of the reachable computations, callees before callers."""
        order: list[str] = []
        open_names: set[str] = set()
        stack = [(self.module.entry.name, False, False)]
        while stack:
            name, fused, done = stack.pop()
            if done:
                open_names.discard(name)
                order.append(name)
                continue
            if name in open_names:
                raise HloParseError(f"computation %{name} calls itself")
            if name in self.locals:
                continue
            open_names.add(name)
            local = self.locals[name] = self.reader.read(self.module[name], fused=fused)
            stack.append((name, fused, True))
            for call in local.calls:
                inside = fused or call.instruction.opcode == "fusion"
                stack += [(callee, inside, False) for callee, _ in call.callees]
        return order

    def _duplicated(self, times: Mapping[str, int]) -> int:
        matmuls = {
            id(m.instruction): (self.module[name], m, times[name])
            for name, local in self.locals.items()
            for m in local.matmuls
            if times[name]
        }
        places = ((computation, m.instruction) for computation, m, _ in matmuls.values())
        repeated = (matmuls[id(instruction)] for instruction in duplicates(self.module, places))
        return sum(matmul.flops * runs for _, matmul, runs in repeated)

    def _op_name(self, name: str, matmul: Matmul, context: str) -> str:
        """The matmul's op_name, else that of the fusion that it is in, else a guess."""
        computation = self.module[name]
        caller = self.module.caller(name) if not matmul.instruction.op_name else None
        of_fusion = caller[1].op_name if caller and caller[1].opcode == "fusion" else ""
        for op_name in (matmul.instruction.op_name, of_fusion):
            if "/" in op_name:
                return op_name
        return inferred_op_name(self.module, computation, matmul.instruction) or context

    def _taken(self, call: Call) -> tuple[tuple[str, int], ...]:
        if not call.alternatives or not call.callees:
            return call.callees
        return (max(call.callees, key=lambda callee: self.totals[callee[0]]),)

    def _branches(self, call: Call) -> str:
        if not call.alternatives:
            return ""
        flops = [self.totals[callee] for callee, _ in call.callees]
        if len(set(flops)) < 2:
            return ""
        shown = ", ".join(f"{n:,}" for n in flops)
        where = call.instruction.op_name or call.instruction.name
        return f"conditional {where}: branches of {shown} FLOPs; the most expensive one is counted"
