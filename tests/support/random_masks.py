"""Random masked attention, and the FLOPs that it needs by running its jaxpr.

A program scans layers of attention. Each layer has a flag, and its scores are masked by random
unions, intersections and choices of masks, filled with what masks and what does not, and used once
or twice.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mfu_jax.flops.traced.control_flow.loops import scan_of
from mfu_jax.flops.traced.counting import count_model_flops
from mfu_jax.flops.traced.jaxprs import inner_jaxprs
from mfu_jax.util.jax_internals import Literal

S, HEADS, WIDTH = 7, 2, 3  # no other size of a program is S
MODEL = HEADS * WIDTH
NEVER = -1e30

Flagged = Callable[[Any], Any]  # flag → mask
Step = Callable[[Any, Any], Any]  # scores, flag → scores


class EmptyRowError(Exception):
    """A query sees no key, so its softmax is over the fill, or none of its scores is needed."""


class Program(NamedTuple):
    """A function of its layers' weights, their flags and the tokens."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def verdict(self) -> str:
        """What is wrong with the count; "exact" or "at most", a bound that says so, if nothing."""
        count, needed = count_model_flops(self.function, *self.arguments), self.needed()
        exact = count.activations - count.skipped.get("exact", 0)
        is_bound = count.unknown_masks or any("at most" in label for label in count.by_mask)
        is_bound = is_bound or count.unaccounted
        if exact == needed:
            return "exact"
        return "at most" if exact > needed and is_bound else f"{exact} counted, {needed} needed"

    def needed(self) -> int:
        """FLOPs of attention, pair by pair: what is not 0, or what the results depend on."""
        jaxpr = jax.make_jaxpr(self.function)(*self.arguments)
        run = _Run([])
        results = run.jaxpr(jaxpr.jaxpr, jaxpr.consts, self.arguments)
        numbers = np.random.default_rng(0)
        weights = [numbers.normal(size=np.shape(r)).astype(np.float32) for r in results]

        def total(taps: list[Any]) -> Any:
            results = _Run(taps).jaxpr(jaxpr.jaxpr, jaxpr.consts, self.arguments)
            return sum(jnp.sum(w * r) for w, r in zip(weights, results, strict=True))

        taps = [jnp.asarray(np.zeros(shape, np.float32)) for shape, _ in run.made]
        slopes = jax.grad(total)(taps)
        if any(map(_has_empty_row, slopes)):
            raise EmptyRowError
        made = zip(slopes, run.made, strict=True)
        return run.used + sum(int(jnp.sum(s != 0)) * flops for s, (_, flops) in made)


class _Run:
    """Runs a jaxpr equation by equation.

    Attributes:
        used: FLOPs of the matmuls that multiply by scores, where these are not 0.
        made: shape and FLOPs per element of the scores that matmuls make.
    """

    def __init__(self, taps: Sequence[Any]) -> None:
        self.counts = not taps
        self.taps = iter(taps)
        self.used = 0
        self.made: list[tuple[tuple[int, ...], int]] = []

    def jaxpr(self, jaxpr: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else known[atom]

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [read(v) for v in eqn.invars])
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, values: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        inner = inner_jaxprs(eqn.params)
        if name == "scan":
            return self._scan(eqn, values)
        if name == "cond":
            return self.jaxpr(inner["branches"][int(values[0])], (), values[1:])
        if inner:
            return self.jaxpr(next(iter(inner.values()))[0], (), values)
        results = eqn.primitive.bind(*values, **eqn.params)
        results = list(results) if eqn.primitive.multiple_results else [results]
        if name == "reduce_max" and float(jnp.min(lax.stop_gradient(results[0]))) < NEVER / 2:
            raise EmptyRowError
        return [self._matmul(eqn, values, results[0])] if name == "dot_general" else results

    def _matmul(self, eqn: Any, values: list[Any], result: Any) -> Any:
        (contracted, _), _ = eqn.params["dimension_numbers"]
        elements = math.prod(result.shape)
        terms = elements * math.prod(values[0].shape[d] for d in contracted)
        if result.shape.count(S) == 2:
            self.made.append((result.shape, 2 * terms // elements))
            return result + next(self.taps, 0.0)
        for value in values:
            if self.counts and value.shape.count(S) == 2:
                if _has_empty_row(value):
                    raise EmptyRowError
                self.used += 2 * terms // value.size * int(jnp.sum(value != 0))
        return result

    def _scan(self, eqn: Any, values: list[Any]) -> list[Any]:
        loop = scan_of(eqn)
        start = loop.consts + loop.carries
        consts, carry = values[: loop.consts], values[loop.consts : start]
        rows = []
        for index in reversed(range(loop.length)) if loop.reverse else range(loop.length):
            slices = [value[index] for value in values[start:]]
            results = self.jaxpr(loop.body, (), [*consts, *carry, *slices])
            carry = results[: loop.carries]
            rows.append(results[loop.carries :])
        rows = rows[::-1] if loop.reverse else rows
        return [*carry, *(jnp.stack(column) for column in zip(*rows, strict=True))]


def _has_empty_row(pairs: Any) -> bool:
    """Whether every pair of some query or key is 0."""
    axes = [axis for axis, size in enumerate(pairs.shape) if size == S]
    return any(bool(jnp.any(jnp.all(pairs == 0, axis))) for axis in axes)


def judged(seed: int) -> str:
    """The verdict on the program of a seed; on another one if a query of it sees no key."""
    rng = random.Random(seed)
    while True:
        try:
            return _program(rng).verdict()
        except EmptyRowError:
            continue


def _program(rng: random.Random) -> Program:
    layers = rng.randint(1, 2)
    uses = [
        (
            _steps(rng),
            rng.choice((softmax_with_sink, softmax_beside_sink, jax.nn.sigmoid)),
            _after(rng),
        )
        for _ in range(rng.choice((1, 1, 2)))
    ]

    def layer(x: Any, given: Any) -> tuple[Any, None]:
        w, flag = given
        q, k, v = (jnp.tanh(x @ each).reshape(S, HEADS, WIDTH) for each in w)
        s = jnp.einsum("qhd,khd->hqk", q, k)
        y = 0.0
        for steps, normalised, after in uses:
            y = y + after(normalised(steps(s, flag)), flag, v)
        return x + y.reshape(S, MODEL), None

    def forward(w: Any, flags: Any, x: Any) -> Any:
        return lax.scan(layer, x, (w, flags))[0]

    def gradient(w: Any, flags: Any, x: Any) -> Any:
        return jax.value_and_grad(lambda w: jnp.sum(forward(w, flags, x) ** 2))(w)

    numbers = np.random.default_rng(rng.randrange(2**32))
    # So small that no tanh saturates: its gradient of 0 would need no pair at all.
    w = 0.1 * numbers.normal(size=(layers, 3, MODEL, MODEL)).astype(np.float32)
    x = numbers.normal(size=(S, MODEL)).astype(np.float32)
    flags = numbers.integers(0, 2, layers).astype(bool)
    return Program(rng.choice((forward, gradient)), (w, flags, x))


def _atom(rng: random.Random) -> Flagged:
    i, j = np.indices((S, S))
    size, shift = rng.randint(1, S - 1), rng.randint(-2, 2)
    window = (i >= j) & (i - j < size)
    table = rng.choice((i - j >= shift, window, abs(i - j) < size))

    def positions() -> Iterator[Any]:
        return (lax.broadcasted_iota(jnp.int32, (S, S), d) for d in (0, 1))

    def of_positions(mask: Callable[[Any, Any], Any]) -> Flagged:
        return lambda flag: mask(*positions())

    return rng.choice(
        (
            of_positions(lambda i, j: i >= j),
            of_positions(lambda i, j: j <= i + shift),
            of_positions(lambda i, j: i <= j),
            of_positions(lambda i, j: (i >= j) & (i - j < size)),
            of_positions(lambda i, j: abs(i - j) < size),
            of_positions(lambda i, j: ~(j > i)),
            lambda flag: jnp.tril(jnp.ones((S, S), bool), shift),
            lambda flag: jnp.asarray(table),
            lambda flag: table,
        )
    )


def _mask(rng: random.Random, depth: int = 2) -> Flagged:
    if not depth or rng.random() < 0.4:
        return _atom(rng)
    a, b = _mask(rng, depth - 1), _mask(rng, depth - 1)
    return rng.choice(
        (
            lambda flag: a(flag) & b(flag),
            lambda flag: a(flag) | b(flag),
            lambda flag: jnp.logical_not(a(flag)) | b(flag),
            lambda flag: jnp.where(flag, a(flag), b(flag)),
            lambda flag: lax.cond(flag, lambda: jnp.asarray(a(flag)), lambda: jnp.asarray(b(flag))),
            lambda flag: a(flag) | (b(flag) & flag),
            lambda flag: a(flag) & (b(flag) | flag),
        )
    )


def _fill(rng: random.Random) -> Step:
    mask = _mask(rng)
    return rng.choice(
        (
            lambda s, flag: jnp.where(mask(flag), s, NEVER),
            lambda s, flag: jnp.where(mask(flag), s, NEVER),
            lambda s, flag: jnp.where(jnp.logical_not(mask(flag)), NEVER, s),
            lambda s, flag: s + jnp.where(mask(flag), 0.0, NEVER),
            lambda s, flag: s + (1 - mask(flag) * 1.0) * NEVER,
            lambda s, flag: jnp.where(mask(flag), s, 0),
            lambda s, flag: jnp.where(mask(flag), s, jnp.cos(flag * 1.0)),
        )
    )


def _steps(rng: random.Random) -> Step:
    steps: list[Step] = []
    for _ in range(rng.randint(0, 2)):
        a, b = _fill(rng), _fill(rng)
        choices: tuple[Step, ...] = (
            a,
            a,
            lambda s, flag: 0.7 * s,
            lambda s, flag: jnp.concatenate([s[:, :, :3], s[:, :, 3:]], -1),
            lambda s, flag, a=a, b=b: jnp.where(flag, a(s, flag), b(s, flag)),
            lambda s, flag, a=a, b=b: lax.cond(flag, lambda: a(s, flag), lambda: b(s, flag)),
            lambda s, flag, a=a: lax.cond(flag, lambda: a(s, flag), lambda: s),
        )
        steps.append(rng.choice(choices))

    def run(s: Any, flag: Any) -> Any:
        for step in steps:
            s = step(s, flag)
        return s

    return run


def softmax_with_sink(s: Any) -> Any:
    """A query that sees one key depends on its score, too."""
    weights = jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))
    return weights / (1 + weights.sum(-1, keepdims=True))


def softmax_beside_sink(s: Any) -> Any:
    """The same with the sink as another key, whose weight is dropped (gpt-oss)."""
    s = jnp.concatenate([s, jnp.zeros((HEADS, S, 1))], -1)
    return jax.nn.softmax(s)[..., :-1]


def _after(rng: random.Random) -> Callable[[Any, Any, Any], Any]:
    mask = _mask(rng)

    def values(p: Any, flag: Any, v: Any) -> Any:
        return jnp.einsum("hqk,khd->qhd", p, v)

    def of_transposed(p: Any, flag: Any, v: Any) -> Any:
        return jnp.einsum("khq,khd->qhd", p.transpose(2, 0, 1), v)

    choices: tuple[Callable[[Any, Any, Any], Any], ...] = (
        values,
        values,
        values,
        of_transposed,
        lambda p, flag, v: values(p * mask(flag), flag, v),
        lambda p, flag, v: values(jnp.where(mask(flag), p, 0), flag, v),
        lambda p, flag, v: values(p, flag, v) + p.sum((0, 1))[:, None, None],
    )
    return rng.choice(choices)
