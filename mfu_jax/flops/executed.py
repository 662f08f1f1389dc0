"""Executed FLOPs: what a compiled program runs on one device, from its optimised HLO text.

Two passes over the call graph. Bottom-up: the FLOPs of one call of each computation, which decides
the branch of a conditional. Top-down: how often each computation runs, so that every instruction
is looked at once, however often it is executed.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from mfu_jax.flops.count import FlopCount, Unaccounted
from mfu_jax.flops.hlo_loops import trip_count
from mfu_jax.flops.hlo_matmuls import convolution_flops, dot_flops
from mfu_jax.flops.hlo_text import (
    HloComputation,
    HloInstruction,
    HloModule,
    HloParseError,
    parse_hlo,
)
from mfu_jax.flops.scopes import read_scope


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
        loops_once: the same FLOPs with every loop body counted once, as XLA's own report does.
        kernels: the part of it in custom kernels, whose inside XLA does not see, by kernel name.
        kernels_once: the FLOPs of these kernels with every loop body counted once.
        elementwise: FLOPs of everything that is no matmul, by XLA's own rule of one for each
            element of a result. Not a part of `total`.
        elementwise_once: `elementwise` with every loop body counted once.
        flags: choices that the count had to make, such as the branch of a conditional.
    """

    loops_once: int = 0
    kernels: Mapping[str, int] = field(default_factory=dict)
    kernels_once: int = 0
    elementwise: int = 0
    elementwise_once: int = 0
    flags: tuple[Flag, ...] = ()


@dataclass(slots=True)
class _Call:
    """An instruction that runs other computations: all of them, or (alternatives) one of them."""

    instruction: HloInstruction
    callees: tuple[tuple[str, int], ...]  # name, times for each run of the caller
    alternatives: bool = False


@dataclass(slots=True)
class _Local:
    """What one computation does itself, and what it calls."""

    matmuls: list[tuple[HloInstruction, int, str]] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)
    unaccounted: list[Unaccounted] = field(default_factory=list)


_MATMULS: dict[str, Callable[[HloComputation, HloInstruction], int]] = {
    "dot": dot_flops,
    "convolution": convolution_flops,
}
_CALLS = {"fusion": "calls", "call": "to_apply", "async-start": "calls"}


def executed_flops(program: HasText | str) -> ExecutedCount:
    """Counts the matmul FLOPs that one device executes in one call of a compiled program.

    Args:
        program: what ``jax.jit(f).lower(…).compile()`` returned, or its ``as_text()``.

    Returns:
        The count. What could not be counted is in `unaccounted`.

    Raises:
        HloParseError: where the text is not optimised HLO.
    """
    text = program if isinstance(program, str) else program.as_text()
    if not text:
        raise HloParseError("the compiled program has no text")
    return _Counter(parse_hlo(text)).count()


class _Counter:
    def __init__(self, module: HloModule) -> None:
        self.module = module
        self.locals: dict[str, _Local] = {}
        self.totals: dict[str, int] = {}

    def count(self) -> ExecutedCount:
        order = self._bottom_up_order()
        for name in order:
            local = self.locals[name]
            self.totals[name] = sum(flops for _, flops, _ in local.matmuls) + sum(
                self.totals[callee] * times
                for call in local.calls
                for callee, times in self._taken(call)
            )
        times: dict[str, int] = defaultdict(int)
        once: dict[str, int] = defaultdict(int)
        context: dict[str, str] = {}  # op_name of the caller, for instructions that have none
        entry = self.module.entry.name
        times[entry] = once[entry] = 1
        phases: dict[str, int] = defaultdict(int)
        scopes: dict[str, int] = defaultdict(int)
        dtypes: dict[str, int] = defaultdict(int)
        unaccounted: list[Unaccounted] = []
        flags: list[Flag] = []
        loops_once = 0
        for name in reversed(order):
            runs, local = times[name], self.locals[name]
            if not once[name]:
                continue  # only in branches that are not taken
            for instruction, flops, dtype in local.matmuls:
                scope = read_scope(instruction.op_name or context.get(name, ""))
                phases[scope.phase] += runs * flops
                scopes[scope.path] += runs * flops
                dtypes[dtype] += runs * flops
                loops_once += once[name] * flops
            for call in local.calls:
                op_name = call.instruction.op_name or context.get(name, "")
                for callee, factor in self._taken(call):
                    times[callee] += runs * factor
                    once[callee] += once[name]
                    context.setdefault(callee, op_name)
                if text := self._branches(call):
                    flags.append(Flag(text=text, times=runs))
            unaccounted += [dataclasses.replace(u, times=runs * u.times) for u in local.unaccounted]
        return ExecutedCount(
            forward=phases["forward"],
            backward=phases["backward"],
            rematerialized=phases["rematerialized"],
            optimizer=phases["optimizer"],
            other=phases["other"],
            by_scope=dict(scopes),
            by_dtype=dict(dtypes),
            unaccounted=tuple(unaccounted),
            loops_once=loops_once,
            flags=tuple(flags),
        )

    def _bottom_up_order(self) -> list[str]:
        """Names of the reachable computations, callees before callers."""
        order: list[str] = []
        open_names: set[str] = set()
        stack: list[tuple[str, bool]] = [(self.module.entry.name, False)]
        while stack:
            name, done = stack.pop()
            if done:
                open_names.discard(name)
                order.append(name)
                continue
            if name in open_names:
                raise HloParseError(f"computation %{name} calls itself")
            if name in self.locals:
                continue
            open_names.add(name)
            local = self.locals[name] = self._local(self.module[name])
            stack.append((name, True))
            stack += [(callee, False) for call in local.calls for callee, _ in call.callees]
        return order

    def _local(self, computation: HloComputation) -> _Local:
        local = _Local()
        for instruction in computation.instructions.values():
            opcode = instruction.opcode
            if opcode in _MATMULS:
                flops = _MATMULS[opcode](computation, instruction)
                dtype = computation.operand(instruction, 0).shape.dtype
                local.matmuls.append((instruction, flops, dtype))
            elif opcode in _CALLS:
                names = instruction.computations(_CALLS[opcode])
                local.calls.append(_Call(instruction, tuple((n, 1) for n in names)))
            elif opcode == "while":
                local.calls.append(self._while(computation, instruction, local))
            elif opcode == "conditional":
                names = instruction.computations("branch_computations") or (
                    *instruction.computations("true_computation"),
                    *instruction.computations("false_computation"),
                )
                local.calls.append(_Call(instruction, tuple((n, 1) for n in names), True))
        return local

    def _while(
        self, computation: HloComputation, instruction: HloInstruction, local: _Local
    ) -> _Call:
        times = trip_count(self.module, computation, instruction)
        if times is None:
            local.unaccounted.append(
                Unaccounted(
                    name="while",
                    where=instruction.op_name,
                    shapes=str(instruction.shape),
                    reason="trip count not known before it runs; its body is counted once",
                )
            )
            times = 1
        bodies = instruction.computations("body")
        conditions = instruction.computations("condition")
        if len(bodies) != 1 or len(conditions) != 1:
            raise instruction.error("while without body or condition")
        return _Call(instruction, ((bodies[0], times), (conditions[0], times + 1)))

    def _taken(self, call: _Call) -> tuple[tuple[str, int], ...]:
        if not call.alternatives or not call.callees:
            return call.callees
        return (max(call.callees, key=lambda callee: self.totals[callee[0]]),)

    def _branches(self, call: _Call) -> str:
        if not call.alternatives:
            return ""
        flops = [self.totals[callee] for callee, _ in call.callees]
        if len(set(flops)) < 2:
            return ""
        shown = ", ".join(f"{n:,}" for n in flops)
        where = call.instruction.op_name or call.instruction.name
        return f"conditional {where}: branches of {shown} FLOPs; the most expensive one is counted"
