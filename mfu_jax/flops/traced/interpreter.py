"""Interprets a jaxpr: multiplies loop bodies by their trip counts, and classifies each matmul."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mfu_jax.flops import undifferentiated
from mfu_jax.flops.attention_kernels import BY_PRIMITIVE
from mfu_jax.flops.lengths import NO_LENGTHS, Lengths
from mfu_jax.flops.scopes import read_scope
from mfu_jax.flops.traced.abstract_values import (
    INPUT,
    AbstractValue,
    Origin,
    Score,
    Values,
    join,
    of_constant,
)
from mfu_jax.flops.traced.control_flow import loops
from mfu_jax.flops.traced.control_flow.decisions import Decisions
from mfu_jax.flops.traced.integers.arithmetic import typed
from mfu_jax.flops.traced.integers.evaluation import trip_count
from mfu_jax.flops.traced.integers.known_values import constant, scalar
from mfu_jax.flops.traced.integers.needs import Decided
from mfu_jax.flops.traced.jaxprs import (
    MESH_KERNELS,
    bodies,
    interpret,
    is_call,
    operand_dtype,
    stack_below,
)
from mfu_jax.flops.traced.kernels.attention import fused_attention
from mfu_jax.flops.traced.kernels.ragged import RAGGED_DOTS, share_of_ragged_dot
from mfu_jax.flops.traced.kernels.work import kernel_work
from mfu_jax.flops.traced.masks import patterns as mask_patterns
from mfu_jax.flops.traced.masks.pairs import Band, KeptPairs, kept_pairs
from mfu_jax.flops.traced.primitive_kinds import FREE
from mfu_jax.flops.traced.rules import RULES
from mfu_jax.flops.traced.scores import ScoreMasks, is_batched
from mfu_jax.flops.traced.value_graph import value_graph
from mfu_jax.flops.traced.work_totals import MatmulKind, WorkTotals, unaccounted
from mfu_jax.flops.undifferentiated import Purpose
from mfu_jax.util.attributes import temporarily
from mfu_jax.util.jax_internals import Literal, open_jaxpr


class JaxprCounter:
    """Counts jaxprs; a jaxpr that recurs in the same role is walked only once."""

    def __init__(self, lengths: Lengths = NO_LENGTHS) -> None:
        self.lengths = lengths
        self.jaxpr: Any = None
        self.saw_checkpoint = False
        self.scores = ScoreMasks()
        self.constants: dict[Any, AbstractValue] = {}
        self.decisions = Decisions({})
        self.takes_decisions = True
        # The entry keeps alive what the key identifies, so that no id is reused.
        self._seen: dict[Any, tuple[Any, Decided, Values, WorkTotals]] = {}

    def count(self, jaxpr: Any, constants: Mapping[Any, Any]) -> WorkTotals:
        """The work of one run of a whole function, given the constants of all its jaxprs."""
        for variable, data in constants.items():
            value = of_constant(constant(data), Origin.INPUT)
            self.constants[variable] = value._replace(known=typed(value.known, variable.aval))
        self.decisions = Decisions({v: value.known for v, value in self.constants.items()})
        self.jaxpr = jaxpr
        results, totals = self.walk(jaxpr, [INPUT] * len(jaxpr.invars))
        self.use_scores(results)
        return totals

    @functools.cached_property
    def purposes(self) -> Mapping[int, Purpose]:
        """What matmuls that are not differentiated are for, by ``id`` of the equation."""
        matmuls = frozenset({"pallas_call", *BY_PRIMITIVE, *RULES})
        return undifferentiated.classify(value_graph(self.jaxpr, matmuls))

    def walk(
        self,
        jaxpr: Any,
        values: Sequence[AbstractValue],
        stack: str = "",
        decided: Decided | None = None,
    ) -> tuple[Values, WorkTotals]:
        """Follows `values` through an open jaxpr under the name stack `stack`.

        Args:
            jaxpr: the jaxpr.
            values: its inputs.
            stack: the name stack around it.
            decided: known values that settle its decisions; None: those of the inputs do.

        Returns:
            The jaxpr's results (without `known`) and the work of one run.
        """
        if not self.takes_decisions:
            decided = Decided()
        elif decided is None:
            decided = self.decisions.inside(jaxpr, [value.known for value in values])
        values = [value.without_value() for value in values]
        device = self.decisions.devices.key()
        key = (id(jaxpr), tuple(values), stack, decided.key, self.takes_decisions, device)
        is_repeated = key in self._seen
        if not is_repeated:
            self._seen[key] = (jaxpr, decided, *self._walk(jaxpr, values, stack, decided))
        _, _, results, totals = self._seen[key]
        if is_repeated:
            self.scores.share(results, values)
        return results, totals

    def use_scores(self, values: Iterable[AbstractValue]) -> None:
        """Records that everything that these values depend on is needed."""
        self.scores.use(values)

    def in_branch(self, is_sure: bool) -> contextlib.AbstractContextManager[None]:
        """Follows a branch; unless it surely runs, what it needs of earlier scores is a bound."""
        first = self.scores.first_sure if is_sure else self.scores.made
        return temporarily(self.scores, first_sure=first)

    @contextlib.contextmanager
    def without_decisions(self) -> Iterator[None]:
        """Follows values through all branches and loops; the work counted meanwhile is not used."""
        with temporarily(self, takes_decisions=False), temporarily(self.scores, is_recording=False):
            yield

    def _walk(
        self, jaxpr: Any, inputs: Sequence[AbstractValue], stack: str, decided: Decided
    ) -> tuple[Values, WorkTotals]:
        totals = WorkTotals()

        def decide(variables: Sequence[Any], values: Sequence[AbstractValue]) -> Values:
            known = (decided.values.get(variable) for variable in variables)
            pairs = zip(values, known, strict=True)
            return [value if k is None else value._replace(known=k) for value, k in pairs]

        def fixed(atom: Any) -> AbstractValue:
            if isinstance(atom, Literal):
                return of_constant(scalar(atom.val))
            return self.constants.get(atom, INPUT)

        def equation(eqn: Any, operands: Values) -> Values:
            results = self._equation(eqn, operands, stack_below(stack, eqn), totals)
            return decide(eqn.outvars, results)

        given = dict(zip(jaxpr.invars, decide(jaxpr.invars, inputs), strict=True))
        results = interpret(jaxpr, given, fixed, equation)
        return [value.without_value() for value in results], totals

    def _equation(
        self, eqn: Any, values: Values, stack: str, totals: WorkTotals
    ) -> Sequence[AbstractValue]:
        name = eqn.primitive.name
        values = self._of_device(eqn, values)
        self.saw_checkpoint |= name in ("checkpoint", "remat2")
        if name in RULES:
            return self._matmul(eqn, values, stack, totals)
        if name in _HANDLERS:
            return _HANDLERS[name](self, eqn, values, stack, totals)
        inner = bodies(eqn)
        if is_call(eqn):
            (jaxpr,) = inner
            results, body = self.walk(jaxpr, values, stack)
            totals.add(body)
            if len(results) == len(eqn.outvars):
                return results
            self.use_scores(values)
            return [join(values)] * len(eqn.outvars)  # run_state returns its references' values
        everything = join(values)
        if inner and name not in mask_patterns.CUTS:
            self._unknown_call(eqn, everything, stack, totals)
        elif name not in FREE:
            totals.unaccounted[
                unaccounted(eqn, stack, "this primitive has no known cost; add it with "
                             "mfu_jax.flops.traced.rules.register_rule")
            ] += 1  # fmt: skip
        elif name in ("device_put", "optimization_barrier"):
            return [value.without_value() for value in values]
        elif len(eqn.outvars) == 1 or name in ("split", "unstack"):
            return [self._elementwise(eqn, values, index) for index in range(len(eqn.outvars))]
        self.use_scores(values)
        return [everything] * len(eqn.outvars)

    def _of_device(self, eqn: Any, values: Values) -> Values:
        """The operands as known on the device that decides what an equation runs."""
        known = [value.known for value in values]
        there = self.decisions.operands(eqn, known)
        return values if there is known else list(map(AbstractValue.with_known, values, there))

    def _elementwise(self, eqn: Any, values: Values, index: int) -> AbstractValue:
        """A result of an elementwise equation, or one that moves elements."""
        pattern = mask_patterns.follow(eqn, [value.pattern for value in values], index)
        scores = self.scores.follow(eqn, values, index)
        return join(values)._replace(pattern=pattern, scores=scores)

    def _matmul(self, eqn: Any, values: Values, stack: str, totals: WorkTotals) -> Values:
        flops = RULES[eqn.primitive.name](eqn)
        if eqn.primitive.name in RAGGED_DOTS:
            share, wrong = share_of_ragged_dot(eqn, self.lengths)
            flops = int(flops * share)
            if wrong:
                totals.unaccounted[unaccounted(eqn, stack, wrong)] += 1
        return self._add_work(eqn, {operand_dtype(eqn): flops}, values, stack, totals)

    def _kernel(self, eqn: Any, values: Values, stack: str, totals: WorkTotals) -> Values:
        """A Pallas kernel, whose body runs on a grid or on a mesh."""
        known = [value.known for value in values]
        work = kernel_work(eqn, known, stack, self.lengths, trip_count)
        totals.kernels.add((work.name, work.run))
        for reason in work.unknown:
            totals.unaccounted[unaccounted(eqn, stack, f"{work.name}: {reason}")] += 1
        scores = () if work.sizes is None else (self.scores.new(stack, work.sizes, work.kept),)
        arrays = values[work.first_array :]
        return self._add_work(eqn, work.flops, arrays, stack, totals, scores, work.overhang)

    def _fused_attention(self, eqn: Any, values: Values, stack: str, totals: WorkTotals) -> Values:
        attention = fused_attention(eqn)
        number = self.scores.new(stack, attention.sizes)
        if attention.band != Band():
            self.scores.mask(number, kept_pairs(attention.band, *attention.sizes))
        flops = {operand_dtype(eqn): attention.flops}
        return self._add_work(eqn, flops, values, stack, totals, scores=(number,))

    def _add_work(
        self,
        eqn: Any,
        flops: Mapping[str, int],
        values: Values,
        stack: str,
        totals: WorkTotals,
        scores: tuple[int, ...] = (),
        overhang: int = 0,
    ) -> Values:
        """Adds the FLOPs (by dtype) of an equation under `stack`; returns its results.

        `scores` are an attention kernel's, whose operands are never parameters; `overhang` is what
        a kernel runs beyond its arrays.
        """
        phase, scope = read_scope(stack, drop_last=False)
        operands, is_attention = values[:2], bool(scores)
        has_input = not is_attention and any(value.origin == Origin.INPUT for value in operands)
        kept: KeptPairs | None = None
        made: frozenset[Score] = frozenset()
        if not is_attention and eqn.outvars:  # a kernel may write only to references
            scores, kept, made = self.scores.of_matmul(eqn, operands, stack)
        self.use_scores(values)
        if phase == "forward" and "jvp(" not in stack:
            phase = self.purposes.get(id(eqn), phase)
        for dtype, amount in flops.items():
            matmul = MatmulKind(
                phase=phase,
                scope=scope,
                dtype=dtype,
                primitive=eqn.primitive.name,
                site=eqn.source_info.traceback,
                has_input=has_input,
                is_batched=is_attention or is_batched(eqn),
                scores=scores,
                kept=kept,
            )
            if amount:
                totals.flops[matmul] += amount
            if overhang:
                totals.overhang[matmul] += overhang
                overhang = 0
        return [AbstractValue(Origin.ACTIVATION, scores=made)] * len(eqn.outvars)

    def _linear_solve(self, eqn: Any, values: Values, stack: str, totals: WorkTotals) -> Values:
        """`jax.lax.custom_linear_solve` runs its solver; its other functions are for gradients."""
        self.use_scores(values)
        solve = open_jaxpr(eqn.params["jaxprs"].solve)
        lengths = eqn.params["const_lengths"]
        start = lengths.matvec + lengths.vecmat
        consts = values[start : start + lengths.solve]
        b = values[start + lengths.solve + lengths.transpose_solve :]
        results, body = self.walk(solve, [*consts, *b], stack)
        totals.add(body)
        return results

    def _unknown_call(self, eqn: Any, value: AbstractValue, stack: str, totals: WorkTotals) -> None:
        body = WorkTotals()
        for jaxpr in bodies(eqn):
            body.add(self.walk(jaxpr, [value] * len(jaxpr.invars), stack)[1])
        if body.total or body.unaccounted:
            totals.add(body)
            reason = "an unknown primitive holds these; each was counted as if it ran once"
            totals.unaccounted[unaccounted(eqn, stack, reason)] += 1


_Handler = Callable[[JaxprCounter, Any, Values, str, WorkTotals], Values]
_HANDLERS: dict[str, _Handler] = {
    **dict.fromkeys(BY_PRIMITIVE, JaxprCounter._fused_attention),
    **dict.fromkeys(("pallas_call", *MESH_KERNELS), JaxprCounter._kernel),
    **dict.fromkeys(("linear_solve", "custom_linear_solve"), JaxprCounter._linear_solve),
    "cond": loops.cond,
    "scan": loops.scan,
    "shard_map": loops.shard_map,
    "while": loops.while_loop,
}
