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
            its work: anything missing from the program was then removed by the compiler.
        operations: model FLOPs of one device, keyed as `FlopCount.by_operation`, to name what the
            compiler removed.
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
    if not is_traced and (beside := min(missing, executed.evaluation)) > 0:
        lines.append(LedgerLine(label=EVALUATION, flops=beside, note=_EVALUATION_NOTE))
        missing -= beside
    for label, flops in _beyond_whole_images(operations or {}, executed).items():
        note = "pieces of images multiply more than the whole: they overlap, or have zeros"
        lines.append(LedgerLine(label=label, flops=max(0, min(missing, flops)), note=note))
        missing -= lines[-1].flops
    unnamed = min(missing, round(checkpointed) - executed.rematerialized)
    if is_whole and unnamed > 0:
        note = "backward work that jax.checkpoint does again; its names do not say so"
        lines.append(LedgerLine(label="rematerialised backward", flops=unnamed, note=note))
        missing -= unnamed
    if is_whole and missing < 0 and (own := _own(-missing, operations or {}, executed)) > 0:
        note = "the model has it as often: a shard_map asks for it, or rows of constants are alike"
        lines.append(LedgerLine(label="repeated by the model as well", flops=-own, note=note))
        missing += own
    if is_whole and missing < 0 and executed.host:
        on_host = min(executed.host, -missing)
        note = "the host runs it instead (compute_on)"
        lines.append(LedgerLine(label=_ON_HOST, flops=-on_host, note=note))
        missing += on_host
    if is_whole and missing < 0 and (fewer := _by_three(complex_products, -missing, executed)):
        note = "a TPU multiplies three times and adds more often, instead of four products"
        lines.append(LedgerLine(label=THREE_REAL, flops=max(missing, -fewer), note=note))
        missing -= lines[-1].flops
    if is_whole and missing < 0:
        note = _removed(operations or {}, executed)
        lines.append(LedgerLine(label=REMOVED, flops=missing, note=note))
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


def _own(missing: int, operations: Mapping[str, int | Fraction], executed: ExecutedCount) -> int:
    """FLOPs repeated across devices that the model repeats as well, as far as names tell."""
    repeated = sum(executed.repeated.values())
    alike = min(missing - round(lacking(operations, executed.by_operation)), repeated)
    return max(min(missing, executed.repeated_by_user), alike if operations else 0)


def _by_three(complex_products: int | Fraction, missing: int, executed: ExecutedCount) -> int:
    """FLOPs that a program without complex dtypes saves by three real products instead of four.

    If two of four are missing, only the real or the imaginary part of the result is used.
    """
    is_complex = any(dtype in COMPLEX_DTYPES for dtype in executed.by_dtype)
    return 0 if is_complex or 2 * missing == complex_products else round(complex_products) // 4


def _removed(operations: Mapping[str, int | Fraction], executed: ExecutedCount) -> str:
    """Why model operations may be missing from the program, and the largest of them, as a note."""
    why = "merged with equal work, moved out of a loop, not needed for a result, or elementwise"
    named = largest(missing_operations(operations, executed.by_operation))
    return f"{why}: {named}" if named else why


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
