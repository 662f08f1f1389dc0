"""Walks a jaxpr, multiplies loop bodies by their trip counts, and classifies each matmul."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mfu_jax.flops.attention_kernels import BY_PRIMITIVE
from mfu_jax.flops.count import Unaccounted
from mfu_jax.flops.lengths import NO_LENGTHS, Lengths
from mfu_jax.flops.purposes import Purpose, purposes
from mfu_jax.flops.scopes import read_scope
from mfu_jax.flops.traced.attention_primitives import fused_attention
from mfu_jax.flops.traced.flow import (
    INPUT,
    Flow,
    MatmulKind,
    Origin,
    Score,
    Tally,
    either,
    join,
    of_constant,
    operand_dtype,
    unaccounted,
)
from mfu_jax.flops.traced.integers.arithmetic import typed
from mfu_jax.flops.traced.integers.evaluation import LONGEST_LOOP, chosen_branch
from mfu_jax.flops.traced.integers.needs import scan_of, while_of
from mfu_jax.flops.traced.known_values import Known, constant, scalar
from mfu_jax.flops.traced.loops import Decided, Decisions, Runs
from mfu_jax.flops.traced.masks import patterns as mask_patterns
from mfu_jax.flops.traced.masks.pairs import Band
from mfu_jax.flops.traced.masks.scores import Scores, is_batched
from mfu_jax.flops.traced.mosaic_gpu import MESH_KERNELS
from mfu_jax.flops.traced.primitive_kinds import FREE, is_call
from mfu_jax.flops.traced.ragged import RAGGED_DOTS, share_of_ragged_dot
from mfu_jax.flops.traced.rules import RULES
from mfu_jax.flops.traced.tracing import inner_jaxprs
from mfu_jax.flops.traced.value_graph import value_graph
from mfu_jax.flops.traced.walk_kernels import mesh_kernel, pallas_call
from mfu_jax.flops.traced.walk_loops import loop_work
from mfu_jax.util.jax_internals import Literal, open_jaxpr


class Walker:
    """Counts jaxprs; a jaxpr that recurs in the same role is walked only once."""

    def __init__(self, lengths: Lengths = NO_LENGTHS) -> None:
        self.lengths = lengths
        self.jaxpr: Any = None
        self.saw_checkpoint = False
        self.scores = Scores()
        self.constants: dict[Any, Flow] = {}
        self.decisions = Decisions({})
        self.takes_decisions = True
        # The value keeps alive what the key identifies, so that no id is reused.
        self._seen: dict[Any, tuple[Any, Decided, list[Flow], Tally]] = {}

    def count(self, jaxpr: Any, constants: Mapping[Any, Any]) -> Tally:
        """The work of one run of a whole function, given the constants of all its jaxprs."""
        for variable, value in constants.items():
            flow = of_constant(constant(value), Origin.INPUT)
            self.constants[variable] = flow._replace(known=typed(flow.known, variable.aval))
        self.decisions = Decisions({v: flow.known for v, flow in self.constants.items()})
        self.jaxpr = jaxpr
        return self.walk(jaxpr, [INPUT] * len(jaxpr.invars))[1]

    @functools.cached_property
    def purposes(self) -> Mapping[int, Purpose]:
        """What matmuls that are not differentiated are for, by ``id`` of the equation."""
        matmuls = frozenset({"pallas_call", *BY_PRIMITIVE, *RULES})
        return purposes(value_graph(self.jaxpr, matmuls))

    def walk(
        self, jaxpr: Any, flows: Sequence[Flow], stack: str = "", decided: Decided | None = None
    ) -> tuple[list[Flow], Tally]:
        """Follows `flows` through an open jaxpr under the name stack `stack`.

        Args:
            jaxpr: the jaxpr.
            flows: flows of its inputs.
            stack: the name stack around it.
            decided: known values that settle its decisions; None: those of the inputs do.

        Returns:
            The flows of the jaxpr's results (without values) and the work of one run.
        """
        if not self.takes_decisions:
            decided = Decided()
        elif decided is None:
            decided = self.decisions.inside(jaxpr, [flow.known for flow in flows])
        flows = [flow.without_value() for flow in flows]
        device = self.decisions.device
        key = (id(jaxpr), tuple(flows), stack, decided.key, self.takes_decisions, device)
        if key not in self._seen:
            self._seen[key] = (jaxpr, decided, *self._walk(jaxpr, flows, stack, decided))
        _, _, out_flows, tally = self._seen[key]
        return out_flows, tally

    def _walk(
        self, jaxpr: Any, flows: Sequence[Flow], stack: str, decided: Decided
    ) -> tuple[list[Flow], Tally]:
        env: dict[Any, Flow] = {}

        def bind(variables: Sequence[Any], flows: Sequence[Flow]) -> None:
            for variable, flow in zip(variables, flows, strict=True):
                value = decided.values.get(variable)
                env[variable] = flow if value is None else flow._replace(known=value)

        env.update((variable, self.constants.get(variable, INPUT)) for variable in jaxpr.constvars)
        bind(jaxpr.invars, flows)

        def read(atom: Any) -> Flow:
            if isinstance(atom, Literal):
                return of_constant(scalar(atom.val))
            return env[atom]

        tally = Tally()
        for eqn in jaxpr.eqns:
            own = str(eqn.source_info.name_stack)
            here = f"{stack}/{own}" if stack and own else stack or own
            out_flows = self._equation(eqn, [read(v) for v in eqn.invars], here, tally)
            bind(eqn.outvars, out_flows)
        return [read(v).without_value() for v in jaxpr.outvars], tally

    def _equation(self, eqn: Any, flows: list[Flow], stack: str, tally: Tally) -> Sequence[Flow]:
        name = eqn.primitive.name
        flows = self._of_device(eqn, flows)
        self.saw_checkpoint |= name in ("checkpoint", "remat2")
        if name in RULES:
            return self._matmul(eqn, flows, stack, tally)
        if name in _DESCENTS:
            return _DESCENTS[name](self, eqn, flows, stack, tally)
        inner = inner_jaxprs(eqn.params)
        if is_call(eqn):
            ((jaxpr,),) = inner.values()
            out_flows, body = self.walk(jaxpr, flows, stack)
            tally.add(body)
            if len(out_flows) == len(eqn.outvars):
                return out_flows
            return [join(flows)] * len(eqn.outvars)  # run_state returns its references' values
        everything = join(flows)
        if inner:
            self._unknown_call(eqn, inner, everything, stack, tally)
        elif name not in FREE:
            tally.unaccounted[
                unaccounted(eqn, stack, "this primitive has no known cost; add it with "
                             "mfu_jax.flops.traced.rules.register_rule")
            ] += 1  # fmt: skip
        elif len(eqn.outvars) == 1:
            return [self._elementwise(eqn, flows)]
        return [everything] * len(eqn.outvars)

    def _of_device(self, eqn: Any, flows: list[Flow]) -> list[Flow]:
        """The flows, with the values on the device that decides what an equation runs."""
        known = [flow.known for flow in flows]
        values = self.decisions.operands(eqn, known)
        return flows if values is known else list(map(_with_value, flows, values))

    def _elementwise(self, eqn: Any, flows: list[Flow]) -> Flow:
        """The flow of an elementwise equation's result."""
        result = join(flows, eqn.outvars[0].aval.size)
        self.scores.follow(eqn, flows, result)
        pattern = mask_patterns.follow(eqn, [flow.pattern for flow in flows])
        return result._replace(pattern=pattern)

    def _matmul(self, eqn: Any, flows: list[Flow], stack: str, tally: Tally) -> list[Flow]:
        flops = RULES[eqn.primitive.name](eqn)
        if eqn.primitive.name in RAGGED_DOTS:
            share, wrong = share_of_ragged_dot(eqn, self.lengths)
            flops = int(flops * share)
            if wrong:
                tally.unaccounted[unaccounted(eqn, stack, wrong)] += 1
        return self.add_work(eqn, {operand_dtype(eqn): flops}, flows, stack, tally)

    def add_work(
        self,
        eqn: Any,
        flops: Mapping[str, int],
        flows: list[Flow],
        stack: str,
        tally: Tally,
        scores: tuple[int, ...] = (),
    ) -> list[Flow]:
        """Adds the FLOPs (by dtype) of an equation under `stack`; returns its results' flows.

        `scores` are an attention kernel's, whose operands are never parameters.
        """
        phase, scope = read_scope(stack, drop_last=False)
        operands, is_attention = flows[:2], bool(scores)
        has_input = not is_attention and any(flow.origin == Origin.INPUT for flow in operands)
        made: frozenset[Score] = frozenset()
        if not is_attention and eqn.outvars:  # a kernel may write only to references
            scores, made = self.scores.of_matmul(eqn, operands, stack)
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
            )
            if amount:
                tally.flops[matmul] += amount
        return [Flow(Origin.ACTIVATION, scores=made)] * len(eqn.outvars)

    def _unknown_call(
        self, eqn: Any, inner: dict[str, tuple[Any, ...]], flow: Flow, stack: str, tally: Tally
    ) -> None:
        body = Tally()
        for jaxpr in (j for jaxprs in inner.values() for j in jaxprs):
            body.add(self.walk(jaxpr, [flow] * len(jaxpr.invars), stack)[1])
        if body.flops or body.unaccounted:
            tally.add(body)
            reason = "an unknown primitive holds these; each was counted as if it ran once"
            tally.unaccounted[unaccounted(eqn, stack, reason)] += 1


def _scan(walker: Walker, eqn: Any, flows: list[Flow], stack: str, tally: Tally) -> list[Flow]:
    scan = scan_of(eqn)
    if walker.takes_decisions:
        runs = walker.decisions.of_scan(scan, [flow.known for flow in flows])
    else:
        runs = [Runs(Decided(), scan.length)]
    slices = [flow.stacked(scan.length, -1) for flow in flows[scan.consts + scan.carries :]]
    flows = [*flows[: scan.consts + scan.carries], *slices]
    out_flows = loop_work(walker, scan.body, flows, scan.consts, scan.carries, stack, runs, tally)
    stacked = (flow.stacked(scan.length, 1) for flow in out_flows[scan.carries :])
    return [*out_flows[: scan.carries], *stacked]


def _while(walker: Walker, eqn: Any, flows: list[Flow], stack: str, tally: Tally) -> list[Flow]:
    loop = while_of(eqn)
    trips, runs = None, [Runs(Decided(), 1)]
    if walker.takes_decisions:
        trips, runs = walker.decisions.of_while(loop, [flow.known for flow in flows])
    fixed = flows[: loop.cond_consts]
    inputs = flows[loop.cond_consts :]
    body = Tally()
    carries = len(inputs) - loop.body_consts
    out_flows = loop_work(walker, loop.body, inputs, loop.body_consts, carries, stack, runs, body)
    _, test = walker.walk(loop.condition, [*fixed, *out_flows], stack)
    tally.add(body)
    tally.add(test, 2 if trips is None else trips + 1)
    if trips is None and (body.flops or test.flops or body.unaccounted or test.unaccounted):
        reason = (
            "a while loop whose trip count depends on data, or is not proved and more than "
            f"{LONGEST_LOOP:,}: its body was counted once; use scan or fori_loop with a static "
            "bound, or add the other iterations yourself"
        )
        tally.unaccounted[unaccounted(eqn, stack, reason)] += 1
    return out_flows


def _cond(walker: Walker, eqn: Any, flows: list[Flow], stack: str, tally: Tally) -> list[Flow]:
    branches = inner_jaxprs(eqn.params)["branches"]
    index, *operands = flows
    chosen = chosen_branch(walker.decisions.here(index.known), len(branches))
    if chosen is not None:
        branches = (branches[chosen],)
    runs = [walker.walk(branch, operands, stack) for branch in branches]
    totals = [body.total for _, body in runs]
    costliest = max((body for _, body in runs), key=lambda body: body.total)
    unknown: Counter[Unaccounted] = Counter()
    for _, body in runs:  # any of them may have unaccounted work
        unknown |= body.unaccounted
    kernels = {kernel for _, body in runs for kernel in body.kernels}
    tally.add(Tally(costliest.flops, unknown, kernels))
    if len(set(totals)) > 1:
        reason = (
            f"the branches cost {', '.join(map(str, totals))} FLOPs; which one runs depends on "
            "data, or on a loop too long to evaluate: the most expensive one was counted"
        )
        tally.unaccounted[unaccounted(eqn, stack, reason)] += 1
    out_flows = runs[0][0]
    for other, _ in runs[1:]:
        out_flows = [either(a, b) for a, b in zip(out_flows, other, strict=True)]
    return out_flows


def _shard_map(walker: Walker, eqn: Any, flows: list[Flow], stack: str, tally: Tally) -> list[Flow]:
    """The body is one device's; all devices along the manual axes run it."""
    (jaxpr,) = inner_jaxprs(eqn.params)["jaxpr"]

    def run(values: Sequence[Known]) -> tuple[list[Flow], Tally]:
        return walker.walk(jaxpr, list(map(_with_value, flows, values)), stack)

    out_flows: list[Flow] = []
    known = [flow.known for flow in flows]
    for share, (found, body) in walker.decisions.by_place(eqn, known, run):
        tally.add(body, share.devices)
        pairs = zip(out_flows, found, strict=True)
        out_flows = [either(a, b) for a, b in pairs] if out_flows else found
    return out_flows


def _with_value(flow: Flow, value: Known) -> Flow:
    return flow if flow.known is value else flow._replace(known=value)


def _fused_attention(
    walker: Walker, eqn: Any, flows: list[Flow], stack: str, tally: Tally
) -> list[Flow]:
    attention = fused_attention(eqn)
    number = walker.scores.new(stack, attention.sizes)
    if attention.band != Band():
        walker.scores.mask(number, attention.band, *attention.sizes)
    flops = {operand_dtype(eqn): attention.flops}
    return walker.add_work(eqn, flops, flows, stack, tally, scores=(number,))


def _linear_solve(
    walker: Walker, eqn: Any, flows: list[Flow], stack: str, tally: Tally
) -> list[Flow]:
    """`jax.lax.custom_linear_solve` runs its solver; its other functions are for gradients."""
    solve = open_jaxpr(eqn.params["jaxprs"].solve)
    lengths = eqn.params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    consts = flows[start : start + lengths.solve]
    b = flows[start + lengths.solve + lengths.transpose_solve :]
    out_flows, body = walker.walk(solve, [*consts, *b], stack)
    tally.add(body)
    return out_flows


_Descent = Callable[[Walker, Any, list[Flow], str, Tally], list[Flow]]
_DESCENTS: dict[str, _Descent] = {
    **dict.fromkeys(BY_PRIMITIVE, _fused_attention),
    **dict.fromkeys(MESH_KERNELS, mesh_kernel),
    "cond": _cond,
    "linear_solve": _linear_solve,
    "pallas_call": pallas_call,
    "custom_linear_solve": _linear_solve,
    "scan": _scan,
    "shard_map": _shard_map,
    "while": _while,
}
