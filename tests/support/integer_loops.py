"""Random programs of integer loops and branches, with a matmul in their innermost bodies.

A program is a list of statements on a state: three integers of random dtypes, the matrix, and how
many matmuls it ran. JAX traces it; Python runs it first, to leave out those that run too long.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mfu_jax.flops.traced.counting import TracedCount, count_model_flops

SIZE = 4
ONE = 2 * SIZE**3  # FLOPs of one matmul
VARIABLES = 3
FUEL = 400  # iterations of all loops of a program together
DTYPES = ("int32", "int32", "int32", "uint32", "int8", "uint8", "int16")

State = tuple[Any, ...]  # integers, then the matrix, matmuls that ran, and a data-dependent integer
Expression = Callable[[Any, State], Any]
Statement = Callable[[Any, State], State]
MATRIX, RAN, DATA = VARIABLES, VARIABLES + 1, VARIABLES + 2


class OutOfFuelError(Exception):
    """The program runs too long."""


class JaxMachine:
    """Traces a program."""

    xp = jnp

    def product(self, x: Any) -> Any:
        return jnp.tanh(x @ jnp.full((SIZE, SIZE), 0.3))

    def branch(self, index: Any, branches: Sequence[Callable[[State], State]], s: State) -> State:
        if len(branches) == 2:
            return lax.cond(index != 0, branches[1], branches[0], s)
        return lax.switch(index, branches, s)

    def loop(
        self, holds: Callable[[State], Any], body: Callable[[State], State], s: State
    ) -> State:
        return lax.while_loop(holds, body, s)

    def count(self, n: Any, body: Callable[[Any, State], State], s: State) -> State:
        return lax.fori_loop(jnp.int32(0), n.astype("int32"), body, s)

    def scan(self, table: Any, body: Callable[[Any, State], State], s: State) -> State:
        return lax.scan(lambda s, p: (body(p, s), None), s, jnp.asarray(table))[0]


class PythonMachine:
    """Runs a program."""

    xp = np

    def __init__(self) -> None:
        self.fuel = FUEL

    def burn(self) -> None:
        self.fuel -= 1
        if self.fuel < 0:
            raise OutOfFuelError

    def product(self, x: Any) -> Any:
        return x

    def branch(self, index: Any, branches: Sequence[Callable[[State], State]], s: State) -> State:
        return branches[min(max(int(index), 0), len(branches) - 1)](s)

    def loop(
        self, holds: Callable[[State], Any], body: Callable[[State], State], s: State
    ) -> State:
        while holds(s):
            self.burn()
            s = body(s)
        return s

    def count(self, n: Any, body: Callable[[Any, State], State], s: State) -> State:
        for i in range(int(n.astype("int32"))):
            self.burn()
            s = body(np.int32(i), s)
        return s

    def scan(self, table: Any, body: Callable[[Any, State], State], s: State) -> State:
        for p in table:
            self.burn()
            s = body(p, s)
        return s


class Program:
    """A random program.

    Args:
        rng: where its choices come from.
        uses_data: whether some of its integers come from its arguments.
    """

    def __init__(self, rng: random.Random, *, uses_data: bool = False) -> None:
        self.rng = rng
        self.uses_data = uses_data
        self.dtypes = [rng.choice(DTYPES) for _ in range(VARIABLES)]
        self.initial = [rng.randrange(0, 12) for _ in range(VARIABLES)]
        self.statements = self._block(depth=0)

    def __call__(self, x: Any, data: Any) -> tuple[Any, Any]:
        """The matrix and how many matmuls ran, traced."""
        state = self._run(JaxMachine(), (x, jnp.int32(0), data))
        return state[MATRIX], state[RAN]

    def expected(self, data: int) -> int:
        """How many matmuls run, in Python.

        Raises:
            OutOfFuelError: more than `FUEL` iterations.
        """
        with np.errstate(over="ignore"):
            return int(self._run(PythonMachine(), (0.0, np.int32(0), np.int32(data)))[RAN])

    def _run(self, machine: Any, rest: State) -> State:
        pairs = zip(self.initial, self.dtypes, strict=True)
        state = (*(machine.xp.asarray(v, dtype=d)[()] for v, d in pairs), *rest)
        return _run_all(self.statements, machine, state)

    # Expressions

    def _leaf(self, dtype: str) -> Expression:
        if self.uses_data and self.rng.random() < 0.15:
            return lambda m, s: s[DATA].astype(dtype)
        if self.rng.random() < 0.6:
            index = self.rng.randrange(VARIABLES)
            return lambda m, s: s[index].astype(dtype)
        return _constant(self.rng.randrange(0, 9), dtype)

    def _expression(self, dtype: str, depth: int = 0) -> Expression:
        rng = self.rng
        if depth > 2 or rng.random() < 0.25:
            return self._leaf(dtype)
        a, b = self._expression(dtype, depth + 1), self._expression(dtype, depth + 1)
        few = _constant(rng.randrange(1, 5), dtype)
        kinds: list[Expression] = [
            lambda m, s: a(m, s) + b(m, s),
            lambda m, s: a(m, s) - b(m, s),
            lambda m, s: a(m, s) * few(m, s),
            lambda m, s: a(m, s) // few(m, s),
            lambda m, s: a(m, s) % few(m, s),
            lambda m, s: a(m, s) << few(m, s),
            lambda m, s: a(m, s) >> few(m, s),
            lambda m, s: a(m, s) & b(m, s),
            lambda m, s: a(m, s) | b(m, s),
            lambda m, s: a(m, s) ^ b(m, s),
            lambda m, s: ~a(m, s),
            lambda m, s: m.xp.minimum(a(m, s), b(m, s)),
            lambda m, s: m.xp.maximum(a(m, s), b(m, s)),
        ]
        if rng.random() < 0.25:
            relation = self._relation()
            return lambda m, s: m.xp.where(relation(m, s), a(m, s), b(m, s))
        if rng.random() < 0.2:
            return self._lookup(dtype, a)
        return rng.choice(kinds)

    def _lookup(self, dtype: str, index: Expression) -> Expression:
        table = [self.rng.randrange(0, 6) for _ in range(self.rng.randrange(2, 9))]

        def looked_up(m: Any, s: State) -> Any:
            at = index(m, s).astype("int32") % m.xp.asarray(len(table), dtype="int32")
            return m.xp.asarray(table, dtype=dtype)[at]

        return looked_up

    def _relation(self) -> Expression:
        dtype = self.rng.choice(DTYPES)
        a, b = self._leaf(dtype), self._leaf(dtype)
        kinds: list[Expression] = [
            lambda m, s: a(m, s) < b(m, s),
            lambda m, s: a(m, s) >= b(m, s),
            lambda m, s: a(m, s) == b(m, s),
            lambda m, s: a(m, s) % a(m, s).dtype.type(2) == a(m, s).dtype.type(0),
        ]
        return self.rng.choice(kinds)

    # Statements

    def _block(self, depth: int) -> list[Statement]:
        block = [self._statement(depth) for _ in range(self.rng.randrange(1, 3))]
        if depth and self.rng.random() < 0.7:
            block.insert(self.rng.randrange(len(block) + 1), _multiply)
        return block

    def _statement(self, depth: int) -> Statement:
        if depth > 2:
            return self._assignment()
        if depth == 0:
            kinds = [self._while, self._fori, self._scan]
        else:
            kinds = [self._assignment, self._while, self._fori, self._scan, self._branch]
        return self.rng.choice(kinds)(depth) if depth else self.rng.choice(kinds)(0)

    def _assignment(self, depth: int = 0) -> Statement:
        index = self.rng.randrange(VARIABLES)
        value = self._expression(self.dtypes[index])
        return lambda m, s: _put(s, index, value(m, s))

    def _while(self, depth: int) -> Statement:
        rng = self.rng
        index = rng.randrange(VARIABLES)
        dtype = self.dtypes[index]
        start, update = self._leaf(dtype), self._update(index)
        bound = self._leaf(dtype) if rng.random() < 0.3 else _constant(rng.randrange(5, 100), dtype)
        relations: list[Expression] = [
            lambda m, s: s[index] < bound(m, s),
            lambda m, s: s[index] < bound(m, s),
            lambda m, s: s[index] <= bound(m, s),
            lambda m, s: s[index] != bound(m, s),
            lambda m, s: (s[index] < bound(m, s)) & (s[RAN] < 50),
        ]
        relation, body = rng.choice(relations), self._block(depth + 1)

        def run(m: Any, s: State) -> State:
            s = _put(s, index, start(m, s))

            def after(s: State) -> State:
                s = _run_all(body, m, s)
                return _put(s, index, update(m, s))

            return m.loop(lambda s: relation(m, s), after, s)

        return run

    def _update(self, index: int) -> Expression:
        """The next value of a loop's counter, which mostly grows."""
        rng, dtype = self.rng, self.dtypes[index]
        step, more = (_constant(rng.randrange(1, n), dtype) for n in (5, 20))
        turn = _constant(rng.randrange(1, 20), dtype)
        other = self._expression(dtype, 1)
        one, three = _constant(1, dtype), _constant(3, dtype)
        kinds: list[Expression] = [
            lambda m, s: s[index] + step(m, s),
            lambda m, s: m.xp.where(
                s[index] < turn(m, s), s[index] + step(m, s), s[index] + more(m, s)
            ),
            lambda m, s: m.xp.maximum(
                s[index] + one(m, s),
                m.xp.where(s[index] >= turn(m, s), s[index] * three(m, s), turn(m, s)),
            ),
            lambda m, s: s[index] * three(m, s) + one(m, s),
            lambda m, s: (s[index] << one(m, s)) | one(m, s),
            lambda m, s: s[index] + (other(m, s) & three(m, s)) + one(m, s),
            lambda m, s: m.xp.maximum(s[index], other(m, s)) + step(m, s),
            lambda m, s: s[index] - step(m, s),
        ]
        return rng.choice(kinds)

    def _fori(self, depth: int) -> Statement:
        dtype = "int32"
        bound = self._expression(dtype, 1)
        most, body = _constant(self.rng.randrange(2, 8), dtype), self._block(depth + 1)
        index = self.rng.randrange(VARIABLES)
        target = self.dtypes[index]

        def run(m: Any, s: State) -> State:
            def iteration(i: Any, s: State) -> State:
                return _run_all(body, m, _put(s, index, i.astype(target)))

            return m.count(bound(m, s) % most(m, s), iteration, s)

        return run

    def _scan(self, depth: int) -> Statement:
        size = self.rng.randrange(1, 8)
        is_range = self.rng.random() < 0.4
        table = range(size) if is_range else [self.rng.randrange(0, 9) for _ in range(size)]
        values = np.array(list(table), np.int32)
        index, body = self.rng.randrange(VARIABLES), self._block(depth + 1)
        target = self.dtypes[index]
        return lambda m, s: m.scan(
            values, lambda p, s: _run_all(body, m, _put(s, index, p.astype(target))), s
        )

    def _branch(self, depth: int) -> Statement:
        branches = [self._block(depth + 1) for _ in range(self.rng.randrange(2, 4))]
        count = len(branches)
        index = self._expression("int32", 1)

        def run(m: Any, s: State) -> State:
            ways = [lambda s, block=block: _run_all(block, m, s) for block in branches]
            return m.branch(index(m, s) % m.xp.asarray(count, dtype="int32"), ways, s)

        return run


def _constant(value: int, dtype: str) -> Expression:
    return lambda m, s: m.xp.asarray(value, dtype=dtype)


def _put(s: State, index: int, value: Any) -> State:
    value = value.astype(s[index].dtype)
    return (*s[:index], value, *s[index + 1 :])


def _multiply(m: Any, s: State) -> State:
    s = _put(s, RAN, s[RAN] + m.xp.asarray(1, dtype="int32"))
    return (*s[:MATRIX], m.product(s[MATRIX]), *s[MATRIX + 1 :])


def _run_all(statements: Sequence[Statement], m: Any, s: State) -> State:
    for statement in statements:
        s = statement(m, s)
    return s


def random_program(rng: random.Random, *, uses_data: bool = False, data: int = 0) -> Program:
    """A program that ends, and whose matmuls run at least once."""
    while True:
        program = Program(rng, uses_data=uses_data)
        try:
            if program.expected(data):
                return program
        except OutOfFuelError:
            continue


def compiled(program: Program, *, fused: bool = True) -> Any:
    """The program compiled for this machine; without its small fusions in half the time."""
    x = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
    data = jax.ShapeDtypeStruct((), jnp.int32)
    quickly = {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    } | ({} if fused else {"xla_cpu_use_fusion_emitters": False})  # jax 0.12 has no such option
    return jax.jit(program.__call__).lower(x, data).compile(compiler_options=quickly)


def traced(program: Program) -> TracedCount:
    """The program's traced count."""
    x = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
    return count_model_flops(program.__call__, x, jax.ShapeDtypeStruct((), jnp.int32))
