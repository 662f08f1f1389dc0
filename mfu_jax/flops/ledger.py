"""The ledger: from model FLOPs to executed FLOPs to XLA's report, line by line.

Every line is measured on its own (`ledger_lines`), so that the residual is a finding, not an
arithmetic remainder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Literal

from mfu_jax.flops import names
from mfu_jax.flops.count import FlopCount
from mfu_jax.flops.executed.result import ExecutedCount
from mfu_jax.flops.ledger_lines import LedgerLine, StepCounts, explained_lines
from mfu_jax.flops.ledger_table import LedgerRow, head, render_rows
from mfu_jax.flops.operation_diff import Operations, largest, missing_operations

_BEYOND = {
    names.TILES_STATED: "the rest of whole blocks of Triton and Pallas, whose sizes are stated",
    names.TILES_ASSUMED: "the rest of whole cuDNN tiles, assumed from an H100's counters: "
    "128 × 128 in attention, 1024 rows or 256 columns in gradients of strided convolutions",
    names.ON_PADDING: "cuDNN's convolutions multiply outputs × window × channels",
}
_EVALUATION = "forward work that trains nothing: a loss or metrics on the side"
_MORE = "more FLOPs than the model has of: "
_FEWER = "fewer FLOPs than the model has of: "


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """FLOPs per step per device, from the model to the program to XLA's report.

    Attributes:
        model: model FLOPs by `convention`, the first line.
        convention: how `model` counts attention pairs.
        lines: from `model` to `executed`, including the model line.
        executed: matmul FLOPs that the program runs.
        of_which: parts of `executed` worth knowing; they do not sum to it.
        beyond: what the hardware runs in addition to `executed`, the program's mathematics.
        unit: what the FLOPs are of; a call, if it makes several steps or a part of one.
        xla_reported: ``compiled.cost_analysis()["flops"]``; None if it was not given, or XLA
            reports nothing.
        causes: from `executed` to `xla_reported`; empty without it.
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
    beyond: tuple[LedgerLine, ...] = ()
    unit: Literal["step", "call"] = "step"

    @property
    def residual(self) -> int:
        """Executed FLOPs that no line explains."""
        return self.executed - sum(line.flops for line in self.lines)

    @property
    def removed(self) -> int:
        """Model FLOPs that the compiled program avoids on the device; 0 or above."""
        labels = (names.REMOVED, names.THREE_REAL, names.ON_HOST)
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
        notes = (f"  note: {note}" for note in self.notes)
        return "\n".join([*render_rows(self._shown_rows(), self.executed, self.unit), *notes])

    def _repr_html_(self) -> str:
        from mfu_jax.pages.fragment import fragment

        rows = (row.cells(self.executed) for row in self._shown_rows())
        return fragment("FLOPs ledger", head(self.unit), rows, words=(3,), notes=self.notes)

    def _shown_rows(self) -> list[LedgerRow]:
        """All rows but those of zero, of which only the residual is shown."""
        model, *rows = [*self.rows(), *self._reported_rows()]
        return [model, *(row for row in rows if row.flops != 0 or row.label == names.RESIDUAL)]

    def rows(self) -> list[LedgerRow]:
        """The rows from model FLOPs to executed FLOPs, their parts, and what runs beyond them."""
        model, *lines = self.lines
        rows = [LedgerRow(model.label, model.flops, model.note)]
        rows += [LedgerRow(f"+ {line.label}", line.flops, line.note) for line in lines]
        rows.append(LedgerRow(names.RESIDUAL, self.residual, self._doubt()))
        rows.append(LedgerRow(names.EXECUTED, self.executed, "what the compiled program runs"))
        rows += [LedgerRow(f"  of which {p.label}", p.flops, p.note) for p in self.of_which]
        rows += [
            LedgerRow(f"  beyond it: {b.label}", b.flops, b.note) for b in self.beyond if b.flops
        ]
        return rows

    def _reported_rows(self) -> list[LedgerRow]:
        """The rows from executed FLOPs to XLA's report."""
        rows = [LedgerRow(f"+ {cause.label}", cause.flops, cause.note) for cause in self.causes]
        if self.xla_reported is None:
            note = "not given, or cost_analysis() has none"
            return [*rows, LedgerRow("XLA-reported", None, note)]
        off = "" if self.xla_factor is None else f"{self.xla_factor:.3g} × executed"
        return [*rows, LedgerRow("= XLA-reported", self.xla_reported, off)]

    def _doubt(self) -> str:
        """What to do about a residual."""
        if self.residual < 0 and not any(note.startswith(_FEWER) for note in self.notes):
            return "not explained; model=count_model_flops(…) says what XLA removed"
        return "not explained" if self.residual else ""


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
    operations: Operations | None = None,
    avoidable: Operations | None = None,
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
        beyond = getattr(model, "overheads", {})
        ours = {label: round(Fraction(flops, devices)) for label, flops in beyond.items()}
        overheads = {**ours, **(overheads or {})}
        model = Fraction(model.forward + model.backward, devices)
    overheads = dict(overheads or {})
    for label in overheads.keys() & executed.overhang.keys():  # the rest is in `executed`
        overheads[label] = max(0, overheads[label] - executed.overhang[label])
    evidence = StepCounts(
        model=round(model),
        convention=convention,
        executed=executed,
        dense=dense,
        attention=attention,
        overheads=overheads,
        is_whole=is_whole,
        operations=operations or {},
        avoidable=avoidable or {},
        complex_products=complex_products,
        checkpointed=checkpointed,
    )
    lines = explained_lines(evidence)
    residual = executed.total - sum(line.flops for line in lines)
    is_traced = is_whole or bool(operations)  # such a model includes the step's evaluations
    if not is_traced and 0 < executed.evaluation <= residual:
        line = LedgerLine(label=names.EVALUATION, flops=executed.evaluation, note=_EVALUATION)
        lines.append(line)
        residual -= line.flops
    reported = None if xla_reported is None or xla_reported < 0 else round(xla_reported)
    return Ledger(
        model=evidence.model,
        convention=convention,
        lines=tuple(lines),
        executed=executed.total,
        xla_reported=reported,
        causes=() if reported is None else _causes(executed, reported),
        notes=(
            *_notes(executed),
            *(f"not counted exactly in the model: {item}" for item in unaccounted),
            *_differences(operations or {}, executed, residual),
        ),
        of_which=_of_which(executed, {line.label for line in lines}),
        beyond=tuple(
            LedgerLine(label=label, flops=executed.beyond.get(label, 0), note=note)
            for label, note in _BEYOND.items()
        ),
    )


def _differences(operations: Operations, executed: ExecutedCount, residual: int) -> tuple[str, ...]:
    """Operations that run more, or fewer, FLOPs than a traced model has of them, as a note."""
    if not operations or not residual:
        return ()
    program = executed.by_operation
    pair = (program, operations) if residual > 0 else (operations, program)
    found = missing_operations(*pair)
    return (f"{_MORE if residual > 0 else _FEWER}{largest(found)}",) if found else ()


def _of_which(executed: ExecutedCount, labels: Set[str]) -> tuple[LedgerLine, ...]:
    """The nonzero parts of `executed` to show as explanation; they are not added.

    Args:
        executed: the count.
        labels: labels of the lines that are added.
    """
    evaluation = 0 if names.EVALUATION in labels else executed.evaluation
    note = "matrix-vector and outer products, written as a multiplication and a sum"
    parts = (
        LedgerLine(label=names.EVALUATION, flops=evaluation, note=_EVALUATION),
        LedgerLine(label=names.VECTOR_UNITS, flops=executed.vector_matmuls, note=note),
    )
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
        notes.append(f"not counted exactly: {item.name} {item.where} {item.shapes}: {item.reason}")
    return tuple(notes)
