"""Model FLOPs of any JAX function, counted on its jaxpr. Nothing is run or compiled."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mfu_jax.errors import UserError
from mfu_jax.flops import names
from mfu_jax.flops.attention_kernels import is_attention
from mfu_jax.flops.count import COMPLEX_DTYPES, FlopCount, KernelRun, KernelRuns, operation
from mfu_jax.flops.lengths import NO_LENGTHS, Lengths
from mfu_jax.flops.traced import linalg, tracing  # noqa: F401  (registers its rules)
from mfu_jax.flops.traced.avoidable import avoidable_work
from mfu_jax.flops.traced.control_flow.branches import (
    MODEL_PHASES,
    MaskConvention,
    SettledWork,
    split,
)
from mfu_jax.flops.traced.interpreter import JaxprCounter
from mfu_jax.flops.traced.masks.declared import PACKED
from mfu_jax.flops.traced.work_totals import WorkTotals

_LENGTHS = tuple(f.name for f in dataclasses.fields(Lengths))


@dataclass(frozen=True, kw_only=True)
class TracedCount(FlopCount):
    """Matmul FLOPs (2·m·n·k each) of one call of a JAX function, over all devices.

    `total` is the model: `forward` + `backward` without any `jax.checkpoint` and without dead code,
    with every attention pair counted (convention ``dense``). The splits sum to it. It excludes
    `rematerialized`, the extra work of the function's checkpoints, and `optimizer`, matmuls on
    gradients (as in Muon).

    Attributes:
        weights: the part of `total` where an operand is a parameter, and the parameters' gradients.
        activations: the part where both operands are activations: attention scores and values.
        by_primitive: `total` by JAX primitive (``dot_general``).
        by_mask: the part of `total` whose query-key pairs are under a mask that the trace shows
            or `attention_mask` declares, by kind of mask (``causal``).
        complex_products: the part of `total` in products of complex numbers, without FFTs.
        unknown_masks: the part of `total` whose pairs are under a mask that depends on data, all of
            them counted.
        skipped: FLOPs of `total` saved by these masks, by convention (``exact``, ``maxtext``).
        avoidable: the part of `by_operation` that a compiler may avoid: it equals other work, or
            only scales an operand.
        overhang: what Pallas kernels run beyond `total` where blocks overhang their arrays, keyed
            as `by_operation`.
    """

    weights: int = 0
    activations: int = 0
    by_primitive: Mapping[str, int] = field(default_factory=dict)
    by_mask: Mapping[str, int] = field(default_factory=dict)
    skipped: Mapping[MaskConvention, int] = field(default_factory=dict)
    avoidable: Mapping[str, int] = field(default_factory=dict)
    overhang: Mapping[str, int] = field(default_factory=dict)
    complex_products: int = 0
    unknown_masks: int = 0

    def __repr__(self) -> str:
        """The numbers that are not 0, without the splits."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        parts = [
            f"{name}={value:_}"
            for name, value in own.items()
            if value and value is not True and isinstance(value, int)
        ]
        unknown = f", unaccounted={len(self.unaccounted)}" if self.unaccounted else ""
        return f"TracedCount(total={self.total:_}, {', '.join(parts)}{unknown})"

    @property
    def total(self) -> int:
        """Model FLOPs: forward + backward, all attention pairs."""
        return self.forward + self.backward

    @property
    def overheads(self) -> dict[str, int]:
        """The lines of a ledger for `overhang`."""
        lines: Counter[str] = Counter()
        for name, flops in self.overhang.items():
            lines[names.OVERHANG_ATTENTION if is_attention(name) else names.OVERHANG] += flops
        return dict(lines)

    def total_in(self, convention: Literal["dense", "exact", "maxtext"]) -> int:
        """Model FLOPs counting only the pairs that the known masks keep, by one convention.

        Args:
            convention: ``dense`` for all pairs, ``exact`` for the pairs kept, ``maxtext`` for S²/2
                under a causal mask and S·W − W²/2 in a window.
        """
        if convention == "dense":
            return self.total
        if convention not in ("exact", "maxtext"):
            raise UserError(
                f"a traced count got the convention {convention!r}; expected 'dense', 'exact' or "
                "'maxtext'",
                hint="the others need a config: see mfu_jax.calculate_tflops_per_device",
            )
        return self.total - self.skipped.get(convention, 0)

    def total_for_documents(self, pairs: int, of: int) -> int:
        """Model FLOPs of a batch of packed documents declared by `attention_mask`.

        Args:
            pairs: the batch's real pairs, from `mfu_jax.flops.traced.masks.pairs.read_pairs`.
            of: all pairs of the batch: B·S².
        """
        return self.total - self.packed * (of - pairs) // of

    @property
    def packed(self) -> int:
        """FLOPs of attention declared to stay within packed documents, all pairs counted."""
        return sum(self.by_mask.get(kind, 0) for kind in PACKED)


def count_model_flops(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> TracedCount:
    """Counts the matmul FLOPs of ``fn(*args, **kwargs)`` from its jaxpr.

    Args:
        fn: a plain or jitted function: a whole training step, a loss, its gradient.
        *args: its arguments; `jax.ShapeDtypeStruct`s (and trees of them) are enough.
        **kwargs: its keyword arguments. Two names are not passed on, unless `fn` takes
            them in this call:
            ``group_sizes``, rows of each group (expert) in grouped matmuls, as seen by one device,
            and ``sequence_lengths``, the number of keys of each sequence in paged attention.

    Returns:
        A `TracedCount` for one call, over all devices, in exact ints. Work with no known count is
        listed in its `unaccounted`.

    Raises:
        mfu_jax.errors.UserError: `fn` cannot be traced with these arguments, or the sizes or
            lengths are not whole numbers.

    >>> import jax, jax.numpy as jnp
    >>> def loss(w, x):
    ...     return jnp.sum(jax.checkpoint(jnp.tanh)(x @ w) ** 2)
    >>> w, x = jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((2, 8), "float32")
    >>> count = count_model_flops(jax.value_and_grad(loss), w, x)
    >>> count.forward, count.backward, count.total == 2 * (2 * 2 * 8 * 4)
    (128, 128, True)
    """
    lengths = take_lengths(fn, args, kwargs)
    return count_with_scopes(fn, args, kwargs, lengths)[0]


def take_lengths(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lengths:
    """Removes the lengths from a call's keywords and returns them, unless `fn` takes them itself.

    Raises:
        mfu_jax.errors.UserError: they are not whole numbers.
    """
    ours = [name for name in _LENGTHS if name in kwargs and not tracing.takes(fn, args, name)]
    return Lengths.of(**{name: kwargs.pop(name) for name in ours})


def count_with_scopes(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    lengths: Lengths = NO_LENGTHS,
) -> tuple[TracedCount, dict[tuple[str, str], int]]:
    """The count, and its model FLOPs by (phase, scope)."""
    counter, as_written = _counted(fn, args, kwargs, lengths)
    model, extra = as_written, 0
    if counter.saw_checkpoint:
        with tracing.without_checkpoints():
            counter, model = _counted(fn, args, kwargs, lengths)
        extra = as_written.total - model.total
    work = SettledWork(model, counter.scores.masks)
    count = _summary(counter, work)
    by_phase_and_scope: Counter[tuple[str, str]] = Counter()
    for matmul, flops in work.flops.items():
        by_phase_and_scope[matmul.phase, matmul.scope] += flops
    count = dataclasses.replace(count, rematerialized=count.rematerialized + extra)
    return count, dict(by_phase_and_scope)


def pallas_kernel_flops(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> KernelRuns:
    """FLOPs executed by one call of each Pallas kernel in ``fn(*args, **kwargs)``, by name.

    Grid × body, without skipped blocks. Where blocks overhang their arrays, all runs of the name,
    each as the FLOPs inside and beyond its arrays. Otherwise a name is left out if kernels of
    different cost share it, or if its kernel's skipped blocks are unknown.
    """
    _, totals = _counted(fn, args, kwargs)
    kernels: dict[str, set[KernelRun | None]] = {}
    for name, run in totals.kernels:
        kernels.setdefault(name, set()).add(run)
    flops: dict[str, int | tuple[KernelRun, ...]] = {}
    for name, runs in kernels.items():
        known = tuple(sorted(run for run in runs if run is not None))
        if any(run.overhang for run in known):
            flops[name] = known
        elif len(runs) == len(known) == 1:
            flops[name] = known[0].flops
    return flops


def _counted(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    lengths: Lengths = NO_LENGTHS,
) -> tuple[JaxprCounter, WorkTotals]:
    """The interpreter of one call, and the work it found."""
    counter = JaxprCounter(lengths)
    return counter, counter.count(*tracing.trace(fn, args, kwargs))


def _summary(counter: JaxprCounter, work: SettledWork) -> TracedCount:
    flops, totals = work.flops, work.totals
    phases = split(flops, lambda matmul: matmul.phase)
    model = {m: amount for m, amount in flops.items() if m.phase in MODEL_PHASES}
    by_operands = split(model, lambda matmul: work.operands[matmul])
    by_mask: Counter[str] = Counter()
    unknown_masks = 0
    for matmul, amount in model.items():
        if kept := work.kept_pairs(matmul):
            if kept.is_unknown:
                unknown_masks += amount
            else:
                by_mask[kept.label] += amount
    unknown = totals.unaccounted + work.differing_branches()
    return TracedCount(
        **{**phases, "forward": phases.get("forward", 0) + phases.get("evaluation", 0)},
        **by_operands,
        by_scope=split(model, lambda matmul: matmul.scope),
        by_dtype=split(model, lambda matmul: matmul.dtype),
        by_operation=split(model, lambda m: operation(m.phase, m.scope, m.primitive)),
        by_primitive=split(model, lambda matmul: matmul.primitive),
        by_mask=dict(by_mask),
        complex_products=sum(
            n for m, n in model.items() if m.dtype in COMPLEX_DTYPES and m.primitive != "fft"
        ),
        skipped=work.skipped(),
        overhang=split(
            {m: n for m, n in work.overhang.items() if m.phase in MODEL_PHASES},
            lambda m: operation(m.phase, m.scope, m.primitive),
        ),
        avoidable=avoidable_work(counter.jaxpr, lambda eqn: counter.purposes.get(id(eqn))),
        unknown_masks=unknown_masks,
        unaccounted=tuple(
            dataclasses.replace(item, times=times) for item, times in unknown.items()
        ),
    )
