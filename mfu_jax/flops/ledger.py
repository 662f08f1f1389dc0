"""The ledger: from model FLOPs to executed FLOPs to XLA's report, line by line.

Every line is measured on its own (the analytic count's conventions, the phases of the executed
count), so that the residual is a finding, not an arithmetic remainder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from mfu_jax.flops.count import COMPLEX_DTYPES, FlopCount
from mfu_jax.flops.executed.result import ExecutedCount
from mfu_jax.flops.missing import lacking, largest, missing_operations
from mfu_jax.flops.names import (
    EVALUATION,
    MASKED_PAIRS,
    OTHER,
    OVERHEAD_ATTENTION,
    RECOMPUTED_BY_XLA,
    REMATERIALISED,
)
from mfu_jax.util.formatting import columns

# Model work that the compiler removed.
REMOVED = "removed by XLA"
_EVALUATION_NOTE = "forward work that trains nothing: a loss or metrics on the side"
_WHY_REMOVED = (
    "merged with equal work, moved out of a loop, not needed for a result, or elementwise"
)
_ON_HOST = "moved to the host"
THREE_REAL = "complex products by three real ones"
_FFT = re.compile(r"\bfft\)*$")


@dataclass(frozen=True, kw_only=True)
class LedgerLine:
    """One line of the ledger: the FLOPs per step per device that it adds or subtracts."""

    label: str
    flops: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """FLOPs per step per device, from the model to the program to XLA's report.

    Attributes:
        model: model FLOPs by `convention`, the first line.
        convention: how `model` counts attention pairs.
        lines: from `model` to `executed`, including the model line.
        executed: matmul FLOPs that the program runs.
        of_which: parts of `executed` worth knowing; they do not sum to it.
        xla_reported: ``compiled.cost_analysis()["flops"]``, or None if XLA reports nothing.
        causes: from `executed` to `xla_reported`; empty if XLA reports nothing.
        notes: what the count could not see, and the choices that it made.
    """

    model: int
    convention: str
    lines: tuple[LedgerLine, ...]
    executed: int
    xla_reported: int | None
    causes: tuple[LedgerLine, ...]
    notes: tuple[str, ...] = ()
    of_which: tuple[LedgerLine, ...] = ()

    @property
    def residual(self) -> int:
        """Executed FLOPs that no line explains."""
        return self.executed - sum(line.flops for line in self.lines)

    @property
    def removed(self) -> int:
        """Model FLOPs that the compiled program avoids on the device; 0 or above."""
        labels = (REMOVED, THREE_REAL, _ON_HOST)
        return -sum(line.flops for line in self.lines if line.label in labels)

    @property
    def xla_factor(self) -> float | None:
        """XLA-reported / executed: 1 if XLA is right."""
        if self.xla_reported is None or not self.executed:
            return None
        return self.xla_reported / self.executed

    def __str__(self) -> str:
        return self.render()

    def __repr__(self) -> str:
        return (
            f"Ledger(model={self.model:_}, executed={self.executed:_}, residual={self.residual:_})"
        )

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values, `residual` and `xla_factor` included."""
        return {**asdict(self), "residual": self.residual, "xla_factor": self.xla_factor}

    def render(self) -> str:
        """The ledger as a table for the console."""
        return "\n".join(
            [*_table(self._rows(), self.executed), *(f"  note: {n}" for n in self.notes)]
        )

    def _repr_html_(self) -> str:
        from mfu_jax.pages.fragment import fragment

        head, *rows = _cells(self._rows(), self.executed)
        return fragment("FLOPs ledger", head, rows, words=(3,), notes=self.notes)

    def _doubt(self) -> str:
        """What to do about a residual."""
        if self.residual < 0:
            return "not explained; model=count_model_flops(…) says what XLA removed"
        return "not explained" if self.residual else ""

    def _rows(self) -> list[tuple[str, int | None, str]]:
        """Label, FLOPs and note of every line."""
        rows: list[tuple[str, int | None, str]] = []
        for i, line in enumerate(self.lines):
            rows.append((line.label if i == 0 else f"+ {line.label}", line.flops, line.note))
        rows.append(("+ residual", self.residual, self._doubt()))
        rows.append(("= executed", self.executed, "what the compiled program runs"))
        rows += [(f"  of which {line.label}", line.flops, line.note) for line in self.of_which]
        rows += [(f"+ {line.label}", line.flops, line.note) for line in self.causes]
        if self.xla_reported is None:
            rows.append(("XLA-reported", None, "cost_analysis() gives no number here"))
        else:
            factor = self.xla_factor
            off = "" if factor is None else f"{factor:.3g} × executed"
            rows.append(("= XLA-reported", self.xla_reported, off))
        return rows


def _table(rows: list[tuple[str, int | None, str]], whole: int) -> list[str]:
    cells = [(f"  {label}", *rest) for label, *rest in _cells(rows, whole)]
    return columns(cells, "<>><")


def _cells(rows: list[tuple[str, int | None, str]], whole: int) -> list[tuple[str, ...]]:
    """The head and the rows, as text."""
    cells: list[tuple[str, ...]] = [("FLOPs per step per device", "FLOPs", "of executed", "")]
    for label, flops, note in rows:
        number = "-" if flops is None else f"{flops:,}"
        share = f"{flops / whole:.2%}" if whole and flops is not None else ""
        cells.append((label, number, share, note))
    return cells


def compare_flops(
    *,
    model: int | Fraction | FlopCount,
    executed: ExecutedCount,
    convention: str = "maxtext",
    dense: int | Fraction | None = None,
    attention: int | Fraction | None = None,
    xla_reported: float | None = None,
    overheads: Mapping[str, int] | None = None,
    is_whole: bool = False,
    operations: Mapping[str, int | Fraction] | None = None,
    avoidable: Mapping[str, int | Fraction] | None = None,
    unaccounted: Sequence[str] = (),
    complex_products: int | Fraction = 0,
    checkpointed: int | Fraction = 0,
    devices: int = 1,
) -> Ledger:
    """Explains executed FLOPs in terms of model FLOPs, and XLA's number in terms of executed.

    Args:
        model: model FLOPs per step per device by `convention`; or a traced count of the
            compiled function, which includes all pairs (``dense``) and shows what XLA removed.
        executed: ``executed_flops(compiled)`` of the same step.
        convention: name of the convention of `model`.
        dense: model FLOPs with every attention pair, including masked ones; None if the program
            computes only the pairs of `model`.
        attention: attention FLOPs in `model`; if attention runs in kernels, the masked pairs are
            what the kernels' blocks compute beyond it, not those of `dense`.
        xla_reported: ``compiled.cost_analysis()["flops"]``, None or a negative number if unknown.
        overheads: other known program work beyond the model, by label, such as
            ``{"MoE one-hot and dispatch matmuls": …}``.
        is_whole: whether `model` was traced from the compiled function and both counts cover all
            its work.
        operations: model FLOPs of one device, keyed as `FlopCount.by_operation`: the compiler
            removed those that no instruction of the program is named after.
        avoidable: the part of `operations` that the compiler may avoid, as in
            `TracedCount.avoidable`.
        unaccounted: descriptions of work missing from `model` because it could not be counted.
        complex_products: the part of `model` in complex products, each counted as four real
            ones.
        checkpointed: FLOPs that `jax.checkpoint` adds to the traced step.
        devices: number of devices that share a traced `model`.

    Returns:
        The ledger; its `residual` is the unexplained rest.
    """
    if isinstance(model, FlopCount):
        convention, checkpointed = "dense", Fraction(model.rematerialized, devices)
        operations = {name: Fraction(n, devices) for name, n in model.by_operation.items()}
        named = getattr(model, "avoidable", {})
        avoidable = {name: Fraction(n, devices) for name, n in named.items()}
        unaccounted = [f"{i.name} {i.where} {i.shapes}: {i.reason}" for i in model.unaccounted]
        is_whole = not (model.unaccounted or executed.unaccounted)
        attention = Fraction(getattr(model, "activations", 0), devices)
        complex_products = Fraction(model.complex_products, devices)
        model = Fraction(model.forward + model.backward, devices)
    model = round(model)
    lines = [LedgerLine(label="model", flops=model, note=f"convention {convention}")]
    kernels = executed.attention_kernels
    if attention is not None and kernels:
        known = round(attention) + (overheads or {}).get(OVERHEAD_ATTENTION, 0)
        skipped = 0 if dense is None else round(dense) - model
        known -= _beside_kernels(round(attention) + skipped, operations or {}, executed)
        beyond = kernels - executed.repeated_attention - known
        # Kernels compute every pair that the mask keeps, and at most all.
        counts_all = convention == "dense" or (dense is not None and round(dense) == model)
        least = -(round(attention) if counts_all else (overheads or {}).get(OVERHEAD_ATTENTION, 0))
        most = 0 if counts_all else beyond if dense is None else skipped
        beyond = max(least, min(most, beyond))
        note = "attention pairs that the kernels' blocks compute beyond it"
        lines.append(LedgerLine(label=MASKED_PAIRS, flops=beyond, note=note))
    elif dense is not None:
        note = "attention pairs that the mask throws away but the program computes"
        lines.append(LedgerLine(label=MASKED_PAIRS, flops=round(dense) - model, note=note))
    note = "forward work done again by jax.checkpoint"
    lines.append(LedgerLine(label=REMATERIALISED, flops=executed.rematerialized, note=note))
    if executed.xla_rematerialized:
        note = "forward work that XLA does again where its results do not fit into memory"
        flops = executed.xla_rematerialized
        lines.append(LedgerLine(label=RECOMPUTED_BY_XLA, flops=flops, note=note))
    note = "matmuls that XLA runs again in another fusion instead of keeping their result"
    duplicated = executed.duplicated - _asked_for(operations or {}, executed)
    lines.append(LedgerLine(label="duplicated by XLA", flops=duplicated, note=note))
    if executed.padding:
        note = "matmuls on zeros that XLA pads them with, or whose results it cuts off"
        lines.append(LedgerLine(label="zero padding", flops=executed.padding, note=note))
    if executed.expansion:
        note = "ragged or depthwise products computed densely: the other groups are zeros"
        lines.append(LedgerLine(label="dense expansion", flops=executed.expansion, note=note))
    if operations and (above := _fft(executed.by_operation) - _fft(operations)) > 0:
        note = "matmuls with a table of sines, beyond the 5·N·log₂N of an FFT"
        lines.append(LedgerLine(label="FFT by matmuls", flops=round(above), note=note))
    for label, flops in executed.repeated.items():
        note = "these devices compute the same values; usually nothing is sharded over them"
        lines.append(LedgerLine(label=label, flops=flops, note=note))
    for label, flops in (overheads or {}).items():
        lines.append(LedgerLine(label=label, flops=flops))
    outside = executed.optimizer + executed.other
    lines.append(LedgerLine(label=OTHER, flops=outside, note="optimizer, or no phase"))
    missing = executed.total - sum(line.flops for line in lines)
    is_traced = is_whole or bool(operations)  # such a model includes the step's evaluations
    if not is_traced and 0 < executed.evaluation <= missing:
        lines.append(LedgerLine(label=EVALUATION, flops=executed.evaluation, note=_EVALUATION_NOTE))
    for label, flops in _beyond_whole_images(operations or {}, executed).items():
        note = "pieces of images multiply more than the whole: they overlap, or have zeros"
        lines.append(LedgerLine(label=label, flops=flops, note=note))
    lacks, surplus = _differences(operations or {}, avoidable or {}, executed)
    again = sum(round(n) for name, n in surplus.items() if name.startswith("backward "))
    unnamed = min(again, round(checkpointed) - executed.rematerialized)
    if is_whole and unnamed > 0:
        note = "backward work that jax.checkpoint does again; its names do not say so"
        lines.append(LedgerLine(label="rematerialised backward", flops=unnamed, note=note))
    if is_whole and (own := _own(-missing, operations or {}, executed)) > 0:
        note = "the model has it as often: a shard_map asks for it, or rows of constants are alike"
        lines.append(LedgerLine(label="repeated by the model as well", flops=-own, note=note))
    if is_whole and (on_host := _common(lacks, executed.host_operations)):
        note = "the host runs it instead (compute_on)"
        flops = -round(sum(on_host.values()))
        lines.append(LedgerLine(label=_ON_HOST, flops=flops, note=note))
        lacks = _less(lacks, on_host)
    is_split = bool(complex_products) and executed.by_dtype.keys().isdisjoint(COMPLEX_DTYPES)
    fewer, half = (
        _shares_of(Fraction(1, n), lacks, operations or {}) if is_split else {} for n in (4, 2)
    )
    if is_whole and fewer:
        note = "a TPU multiplies three times and adds more often, instead of four products"
        flops = -round(sum(fewer.values()))
        lines.append(LedgerLine(label=THREE_REAL, flops=flops, note=note))
        lacks = _less(lacks, fewer)
    removed = half | _removed(lacks, avoidable or {}, executed)
    if is_whole and removed:
        note = f"{_WHY_REMOVED}: {largest(removed)}"
        flops = -round(sum(removed.values()))
        lines.append(LedgerLine(label=REMOVED, flops=flops, note=note))
    reported = None if xla_reported is None or xla_reported < 0 else round(xla_reported)
    return Ledger(
        model=model,
        convention=convention,
        lines=tuple(lines),
        executed=executed.total,
        xla_reported=reported,
        causes=() if reported is None else _causes(executed, reported),
        notes=(
            *_notes(executed),
            *(f"not counted in the model: {item}" for item in unaccounted),
            *(_surplus(operations or {}, executed) if missing > 0 else ()),
        ),
        of_which=_of_which(executed, {line.label for line in lines}),
    )


def _fft(operations: Mapping[str, int | Fraction]) -> Fraction:
    """FLOPs of FFTs; on TPUs, the instructions that implement one carry its function's name."""
    return sum((Fraction(n) for name, n in operations.items() if _FFT.search(name)), Fraction(0))


def _beyond_whole_images(
    operations: Mapping[str, int | Fraction], executed: ExecutedCount
) -> dict[str, int]:
    """FLOPs beyond the model's in convolutions on pieces of images, by kind of piece."""
    above = {
        label: sum(
            min(flops, round(executed.by_operation.get(name, 0) - operations.get(name, 0)))
            for name, flops in by_operation.items()
        )
        for label, by_operation in executed.in_pieces.items()
    }
    return {label: flops for label, flops in above.items() if operations and flops > 0}


def _beside_kernels(
    attention: int, operations: Mapping[str, int | Fraction], executed: ExecutedCount
) -> int:
    """FLOPs of activation products outside attention kernels, such as linear attention's.

    Plain matmuls exclude those that kernels run; `attention` includes all, with all pairs.
    """
    kernels = executed.attention_operations
    plain = {name: n - kernels.get(name, 0) for name, n in executed.by_operation.items()}
    return max(0, attention - round(lacking(operations, plain))) if operations else 0


def _asked_for(operations: Mapping[str, int | Fraction], executed: ExecutedCount) -> int:
    """Repeated matmuls that the model repeats too: an `optimization_barrier` keeps them apart."""
    return sum(
        max(0, min(flops, round(operations.get(name, 0) - executed.by_operation.get(name, 0))))
        for name, flops in executed.duplicated_operations.items()
    )


def _differences(
    operations: Mapping[str, int | Fraction],
    avoidable: Mapping[str, int | Fraction],
    executed: ExecutedCount,
) -> tuple[dict[str, Fraction], dict[str, Fraction]]:
    """What the program lacks of each operation of the model, and what it has beyond the model.

    Without those that attention kernels run: their pairs have a line. An operation of whose name
    the program has nothing runs under another one, before one that it has; what it may leave out,
    it runs last.
    """
    kernels = executed.attention_operations
    model = {name: n for name, n in operations.items() if name not in kernels}
    ran = {name: n for name, n in executed.by_operation.items() if name not in kernels}
    if not operations:
        return {}, {}

    def order(name: str) -> int:
        return 2 if name in avoidable else _as_named(name) in executed.named

    return missing_operations(model, ran, order), missing_operations(ran, model)


def _common(
    lacks: Mapping[str, Fraction], elsewhere: Mapping[str, int | Fraction]
) -> dict[str, Fraction]:
    """What the program lacks of operations which are `elsewhere`."""
    common = {name: min(flops, Fraction(elsewhere.get(name, 0))) for name, flops in lacks.items()}
    return {name: flops for name, flops in common.items() if flops}


def _less(lacks: Mapping[str, Fraction], known: Mapping[str, Fraction]) -> dict[str, Fraction]:
    """What the program lacks beyond what is known."""
    return {name: flops - known.get(name, 0) for name, flops in lacks.items()}


def _own(missing: int, operations: Mapping[str, int | Fraction], executed: ExecutedCount) -> int:
    """FLOPs repeated across devices that the model repeats as well, as far as names tell."""
    repeated = sum(executed.repeated.values())
    alike = min(missing - round(lacking(operations, executed.by_operation)), repeated)
    return max(executed.repeated_by_user, alike if operations else 0)


def _shares_of(
    share: Fraction, lacks: Mapping[str, Fraction], operations: Mapping[str, int | Fraction]
) -> dict[str, Fraction]:
    """The operations of which exactly this share is missing."""
    return {name: n for name, n in lacks.items() if 0 < n == share * operations[name]}


def _removed(
    lacks: Mapping[str, Fraction],
    avoidable: Mapping[str, int | Fraction],
    executed: ExecutedCount,
) -> dict[str, Fraction]:
    """Missing operations that no instruction is named after, or that a compiler may avoid."""
    unnamed = {name: n for name, n in lacks.items() if _as_named(name) not in executed.named}
    removed = _common(lacks, avoidable) | unnamed
    return {name: flops for name, flops in removed.items() if flops}


def _as_named(operation: str) -> str:
    """An operation as an op_name tells it: data flow alone tells an evaluation."""
    return operation.replace("evaluation ", "forward ", 1)


def _surplus(operations: Mapping[str, int | Fraction], executed: ExecutedCount) -> tuple[str, ...]:
    """Operations that run more FLOPs than the model has of them, as a note."""
    surplus = missing_operations(executed.by_operation, operations) if operations else {}
    return (f"more FLOPs than the model has of: {largest(surplus)}",) if surplus else ()


def _of_which(executed: ExecutedCount, labels: Set[str]) -> tuple[LedgerLine, ...]:
    """The nonzero parts of `executed` to show as explanation; they are not added.

    Args:
        executed: the count.
        labels: labels of the lines that are added.
    """
    flops = 0 if EVALUATION in labels else executed.evaluation
    parts = [LedgerLine(label=EVALUATION, flops=flops, note=_EVALUATION_NOTE)]
    note = "matrix-vector and outer products, written as a multiplication and a sum"
    label = "matmuls run on vector units"
    parts.append(LedgerLine(label=label, flops=executed.vector_matmuls, note=note))
    return tuple(line for line in parts if line.flops)


def _causes(executed: ExecutedCount, reported: int) -> tuple[LedgerLine, ...]:
    causes = [
        LedgerLine(
            label="loops counted once",
            flops=executed.loops_once - executed.total,
            note="XLA counts one iteration of every loop",
        ),
        LedgerLine(
            label="kernels not seen",
            flops=executed.kernels_xla - executed.kernels_once,
            note=", ".join(executed.kernels) or "no custom kernels",
        ),
        LedgerLine(
            label="elementwise",
            flops=executed.elementwise_once,
            note="additions, multiplications, reductions … that are no matmul",
        ),
    ]
    if executed.vector_once:
        fewer = executed.vector_xla - executed.vector_once
        note = "XLA counts n − 1 additions for a sum of n products"
        causes.append(LedgerLine(label="sums on vector units", flops=fewer, note=note))
    rest = reported - executed.total - sum(cause.flops for cause in causes)
    return (*causes, LedgerLine(label="XLA's other differences", flops=rest))


def _notes(executed: ExecutedCount) -> tuple[str, ...]:
    notes = [flag.text for flag in executed.flags]
    if executed.host:
        notes.append(f"the host runs {executed.host:,} FLOPs more than `executed` has")
    for item in executed.unaccounted:
        notes.append(f"not counted: {item.name} {item.where} {item.shapes}: {item.reason}")
    return tuple(notes)
