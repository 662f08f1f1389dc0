"""The lines between model FLOPs and executed FLOPs: one rule each, in the order of the ledger.

A rule sees the two counts, not the other lines: each line has evidence of its own, and none is what
is left over. What no rule explains is the ledger's residual.

Adding a line: its label in `names`, a rule in `_RULES` here. Its test shows that the residual is 0
by hand, and that an undercount stays a residual.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from mfu_jax.flops import names
from mfu_jax.flops.count import COMPLEX_DTYPES
from mfu_jax.flops.executed.result import ExecutedCount
from mfu_jax.flops.operation_diff import (
    Operations,
    beyond,
    common,
    largest,
    missing_operations,
)

_FFT = re.compile(r"\bfft\)*$")


@dataclass(frozen=True, kw_only=True)
class LedgerLine:
    """One line of the ledger: the FLOPs per step per device that it adds or subtracts."""

    label: str
    flops: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """The model count and the executed count of one step, on one device.

    Attributes: see `mfu_jax.compare_flops`; `model` is an int, and its `operations` are empty if it
    was not traced.
    """

    model: int
    convention: str
    executed: ExecutedCount
    dense: int | Fraction | None = None
    attention: int | Fraction | None = None
    overheads: Mapping[str, int] = field(default_factory=dict)
    is_whole: bool = False
    operations: Operations = field(default_factory=dict)
    avoidable: Operations = field(default_factory=dict)
    complex_products: int | Fraction = 0
    checkpointed: int | Fraction = 0

    @cached_property
    def lacking(self) -> Mapping[str, Fraction]:
        """What the program lacks of the model's operations, without those that have a line.

        An operation of whose name the program has nothing runs under another one, before one that
        it has; what it may avoid, it runs last.
        """
        ran = self._without_a_line(self.executed.by_operation)
        return missing_operations(self._without_a_line(self.operations), ran, self._order)

    @cached_property
    def surplus(self) -> Mapping[str, Fraction]:
        """What the program has beyond the model's operations, without those that have a line."""
        ran = self._without_a_line(self.executed.by_operation)
        model = self._without_a_line(self.operations)
        return missing_operations(ran, model) if self.operations else {}

    def _without_a_line(self, operations: Operations) -> Operations:
        """Neither what attention kernels run, nor FFTs if the program has more of them."""
        kernels, has_line = self.executed.attention_operations, _more_ffts(self) > 0
        return {
            name: n
            for name, n in operations.items()
            if not (name in kernels or (has_line and _FFT.search(name)))
        }

    def _order(self, operation: str) -> int:
        return 2 if operation in self.avoidable else self.is_named(operation)

    def is_named(self, operation: str) -> bool:
        """Whether an instruction is named after an operation; data flow tells an evaluation."""
        return operation.replace("evaluation ", "forward ", 1) in self.executed.named

    @cached_property
    def on_host(self) -> Mapping[str, Fraction]:
        """Operations that the device lacks and the host runs."""
        return common(self.lacking, self.executed.host_operations)

    @cached_property
    def in_three(self) -> Mapping[str, Fraction]:
        """Operations that lack a quarter of complex products: three real ones run, not four."""
        return self._missing_share(Fraction(1, 4))

    @cached_property
    def _unexplained(self) -> Mapping[str, Fraction]:
        return beyond(beyond(self.lacking, self.on_host), self.in_three)

    @cached_property
    def asked_for(self) -> Mapping[str, Fraction]:
        """Duplicates that the model has, too: an `optimization_barrier` may keep them apart."""
        return common(self._unexplained, self.executed.duplicated_operations)

    @cached_property
    def removed(self) -> Mapping[str, Fraction]:
        """Operations that are missing for a reason.

        No instruction is named after them; a compiler may avoid them; or half of a complex product
        is missing, of which only the real or the imaginary part is used.
        """
        lacking = beyond(self._unexplained, self.asked_for)
        unnamed = {name: flops for name, flops in lacking.items() if not self.is_named(name)}
        half = self._missing_share(Fraction(1, 2))
        return {**half, **common(lacking, self.avoidable), **unnamed}

    def _missing_share(self, share: Fraction) -> Mapping[str, Fraction]:
        """Complex products of which this share is missing in a program without complex dtypes.

        It is that of all together, or of each operation without other products.
        """
        is_real = self.executed.by_dtype.keys().isdisjoint(COMPLEX_DTYPES)
        lacking = beyond(self.lacking, self.on_host) if self.complex_products and is_real else {}
        if sum(lacking.values()) == share * self.complex_products:
            return lacking
        return {name: n for name, n in lacking.items() if n == share * self.operations[name]}


def explained_lines(evidence: StepCounts) -> list[LedgerLine]:
    """The ledger's lines, the model's first."""
    return [line for rule in _RULES for line in rule(evidence)]


def _model(of: StepCounts) -> Iterator[LedgerLine]:
    note = f"convention {of.convention}"
    yield LedgerLine(label=names.MODEL, flops=of.model, note=note)


def _masked_pairs(of: StepCounts) -> Iterator[LedgerLine]:
    """Without kernels, the model's own masked pairs; with kernels, what they compute beyond it.

    Kernels compute every pair that the mask keeps, and at most all.
    """
    masked = None if of.dense is None else round(of.dense) - of.model
    if of.attention is None or not of.executed.attention_kernels:
        if masked is not None:
            note = "attention pairs that the mask throws away but the program computes"
            yield LedgerLine(label=names.MASKED_PAIRS, flops=masked, note=note)
        return
    attention, bubble = round(of.attention), of.overheads.get(names.OVERHEAD_ATTENTION, 0)
    overhang = of.overheads.get(names.OVERHANG_ATTENTION, 0)
    known = attention + bubble + overhang - _beside_kernels(of, attention + (masked or 0))
    flops = of.executed.attention_kernels - of.executed.repeated_attention - known
    if of.convention == "dense" or masked == 0:
        flops = max(-attention, min(0, flops))
    else:
        flops = max(-bubble, flops if masked is None else min(masked, flops))
    note = "attention pairs that the kernels' blocks compute beyond it"
    yield LedgerLine(label=names.MASKED_PAIRS, flops=flops, note=note)


def _beside_kernels(of: StepCounts, attention: int) -> int:
    """FLOPs of activation products outside attention kernels, such as linear attention's.

    Plain matmuls exclude those that kernels run; `attention` includes all, with all pairs. If the
    model does not know the kernels by name, what plain matmuls lack is theirs.
    """
    if not of.operations:
        return 0
    kernels = of.executed.attention_operations
    if kernels.keys() <= of.operations.keys():
        return max(0, attention - round(sum(of.operations[name] for name in kernels)))
    plain = beyond(of.executed.by_operation, kernels)
    return max(0, attention - round(sum(beyond(of.operations, plain).values())))


def _rematerialised(of: StepCounts) -> Iterator[LedgerLine]:
    """Matmuls named so, and what attention kernels recompute in their backward pass."""
    in_kernels = of.executed.recomputed_in_kernels
    note = "forward work done again by jax.checkpoint"
    if in_kernels and in_kernels == of.executed.rematerialized:
        note = "forward work that attention kernels do again in their backward pass"
    elif in_kernels:
        note += f"; by kernels {in_kernels:,}"
    yield LedgerLine(label=names.REMATERIALISED, flops=of.executed.rematerialized, note=note)


def _recomputed_by_xla(of: StepCounts) -> Iterator[LedgerLine]:
    """Matmuls that XLA names so."""
    if flops := of.executed.xla_rematerialized:
        note = "forward work that XLA does again where its results do not fit into memory"
        yield LedgerLine(label=names.RECOMPUTED_BY_XLA, flops=flops, note=note)


def _duplicated(of: StepCounts) -> Iterator[LedgerLine]:
    """Matmuls on equal operands, unless the model has them as often."""
    flops = of.executed.duplicated - sum(map(round, of.asked_for.values()))
    note = "matmuls that XLA runs again in another fusion instead of keeping their result"
    yield LedgerLine(label=names.DUPLICATED, flops=flops, note=note)


def _zero_padding(of: StepCounts) -> Iterator[LedgerLine]:
    """Zeros and cut results that the program's text shows."""
    if flops := of.executed.padding:
        note = "matmuls on zeros that XLA pads them with, or whose results it cuts off"
        yield LedgerLine(label=names.ZERO_PADDING, flops=flops, note=note)


def _dense_expansion(of: StepCounts) -> Iterator[LedgerLine]:
    """Zeros of other groups that the program's text shows."""
    if flops := of.executed.expansion:
        note = "ragged or depthwise products computed densely: the other groups are zeros"
        yield LedgerLine(label=names.DENSE_EXPANSION, flops=flops, note=note)


def _ffts(of: StepCounts) -> Iterator[LedgerLine]:
    """Operations named after an FFT: on TPUs, matmuls have its function's name."""
    if not of.operations or (flops := _more_ffts(of)) <= 0:
        return
    ran = _of_ffts(of.executed.by_operation)
    if of.executed.kernels.get("fft", 0) >= ran:  # none of it in matmuls
        note = "an inverse real transform of n points has n/2 + 1 columns along its other axes"
        yield LedgerLine(label=names.FFT_BY_AXES, flops=round(flops), note=note)
    else:
        note = "matmuls with a table of sines, beyond the 5·N·log₂N of an FFT"
        yield LedgerLine(label=names.FFT_BY_MATMULS, flops=round(flops), note=note)


def _more_ffts(of: StepCounts) -> Fraction:
    """What the program runs in FFTs beyond the model's."""
    return _of_ffts(of.executed.by_operation) - _of_ffts(of.operations)


def _of_ffts(operations: Operations) -> Fraction:
    return sum((Fraction(n) for name, n in operations.items() if _FFT.search(name)), Fraction(0))


def _repeated(of: StepCounts) -> Iterator[LedgerLine]:
    """Matmuls whose operands are equal on several devices."""
    note = "these devices compute the same values; usually nothing is sharded over them"
    for label, flops in of.executed.repeated.items():
        yield LedgerLine(label=label, flops=flops, note=note)


def _overheads(of: StepCounts) -> Iterator[LedgerLine]:
    """What the caller knows of the program."""
    for label, flops in of.overheads.items():
        yield LedgerLine(label=label, flops=flops)


def _other(of: StepCounts) -> Iterator[LedgerLine]:
    """Matmuls on gradients, or in no phase."""
    flops = of.executed.optimizer + of.executed.other
    yield LedgerLine(label=names.OTHER, flops=flops, note="optimizer, or no phase")


def _pieces_of_images(of: StepCounts) -> Iterator[LedgerLine]:
    """Convolutions on pieces, by kind of piece: what their operations have beyond the model's."""
    above = beyond(of.executed.by_operation, of.operations) if of.operations else {}
    note = "pieces of images multiply more than the whole: they overlap, or have zeros"
    for label, operations in of.executed.in_pieces.items():
        if flops := sum(map(round, common(operations, above).values())):
            yield LedgerLine(label=label, flops=flops, note=note)


def _rematerialised_backward(of: StepCounts) -> Iterator[LedgerLine]:
    """Backward operations that run more often than the model has them.

    At most what the traced checkpoints add and no name tells.
    """
    again = sum(round(n) for name, n in of.surplus.items() if name.startswith("backward "))
    flops = min(again, round(of.checkpointed) - of.executed.rematerialized)
    if of.is_whole and flops > 0:
        note = "backward work that jax.checkpoint does again; its names do not say so"
        yield LedgerLine(label=names.REMATERIALISED_BACKWARD, flops=flops, note=note)


def _repeated_by_the_model(of: StepCounts) -> Iterator[LedgerLine]:
    """Repeated matmuls inside a `shard_map`; or all that is no surplus over the model by name.

    FFTs and pieces of images have lines for theirs.
    """
    above = beyond(of.executed.by_operation, of.operations)
    lined = {name for operations in of.executed.in_pieces.values() for name in operations}
    new = sum(n for name, n in above.items() if not (name in lined or _FFT.search(name)))
    alike = sum(of.executed.repeated.values()) - round(new)
    flops = max(of.executed.repeated_by_user, alike if of.operations else 0)
    if of.is_whole and flops:
        note = "the model has it as often: a shard_map asks for it, or rows of constants are alike"
        yield LedgerLine(label=names.REPEATED_BY_THE_MODEL, flops=-flops, note=note)


def _moved_to_the_host(of: StepCounts) -> Iterator[LedgerLine]:
    """Operations that the program hands to the host."""
    note = "the host runs it instead (compute_on)"
    yield from _less(of, names.ON_HOST, of.on_host, note)


def _three_real_products(of: StepCounts) -> Iterator[LedgerLine]:
    """Operations of complex numbers of which a quarter is missing."""
    note = "a TPU multiplies three times and adds more often, instead of four products"
    yield from _less(of, names.THREE_REAL, of.in_three, note)


def _removed(of: StepCounts) -> Iterator[LedgerLine]:
    """Operations that no instruction is named after, or that the trace shows to be avoidable."""
    why = "merged with equal work, moved out of a loop, not needed for a result, or elementwise"
    yield from _less(of, names.REMOVED, of.removed, f"{why}: {largest(of.removed)}")


def _less(
    of: StepCounts, label: str, operations: Mapping[str, Fraction], note: str
) -> Iterator[LedgerLine]:
    """A line of operations that a traced model has and its program lacks."""
    if of.is_whole and operations:
        yield LedgerLine(label=label, flops=-round(sum(operations.values())), note=note)


_RULES: tuple[Callable[[StepCounts], Iterator[LedgerLine]], ...] = (
    _model,
    _masked_pairs,
    _rematerialised,
    _recomputed_by_xla,
    _duplicated,
    _zero_padding,
    _dense_expansion,
    _ffts,
    _repeated,
    _overheads,
    _other,
    _pieces_of_images,
    _rematerialised_backward,
    _repeated_by_the_model,
    _moved_to_the_host,
    _three_real_products,
    _removed,
)
