"""Healthy training loops on CPUs, and the same with one fault each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mfu_jax

Array = jax.Array
State = Any
Step = Callable[[State, Array], tuple[State, Array]]


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop over a step.

    Attributes:
        step: a jitted step.
        state: its first state.
        batch: makes one batch.
        data_seconds: that the loader sleeps for each batch.
        reads_loss: every step is waited for.
        log_seconds: that the loop sleeps after each step.
        recompile_every: steps, after which the step is a new function; 0: never.
        evaluate: runs after every step.
    """

    step: Step
    state: State
    batch: Callable[[], Array]
    data_seconds: float = 0.0
    reads_loss: bool = False
    log_seconds: float = 0.0
    recompile_every: int = 0
    evaluate: Callable[[State, Array], Array] | None = None

    def run(self, steps: int) -> float:
        """Seconds of so many steps."""
        begin = time.monotonic()
        self._run(steps)
        return time.monotonic() - begin

    def trace(self, folder: Path, steps: int) -> None:
        """The same under a trace, with the program beside it."""
        self.run(2)
        with mfu_jax.profile(folder, self.step, self.state, self.batch()):
            self._run(steps + 1)  # of which the last one only ends the one before

    def _run(self, steps: int) -> None:
        state, loss, step = self.state, None, self.step
        previous: list[Array] = []
        for number in range(steps):
            batch = self._next_batch()
            if self.recompile_every and number % self.recompile_every == 1:
                step = _anew(self.step)
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                state, loss = step(state, batch)
            self._after(state, batch, loss)
            previous.append(loss)
            if len(previous) > 1:
                previous.pop(0).block_until_ready()  # a logger's: one step behind
        jax.block_until_ready((state, loss))

    def _next_batch(self) -> Array:
        if self.data_seconds:
            time.sleep(self.data_seconds)
        return self.batch()

    def _after(self, state: State, batch: Array, loss: Array) -> None:
        if self.reads_loss:
            float(loss)
        if self.log_seconds:
            time.sleep(self.log_seconds)
        if self.evaluate is not None:
            self._run_evaluation(state, batch)

    def _run_evaluation(self, state: State, batch: Array) -> None:
        assert self.evaluate is not None
        float(self.evaluate(state, batch))


def _anew(step: Any) -> Any:
    def train_step(state: State, batch: Array) -> tuple[State, Array]:
        return step.__wrapped__(state, batch)

    return jax.jit(train_step)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        cause: of the advice that must come first; empty: no advice at all.
        loop: with the fault.
        healthy: without.
        share: of a healthy step that does the work of one with the fault.
    """

    cause: str
    loop: Callable[[], Loop]
    healthy: Callable[[], Loop]
    share: float = 1.0


LAYERS, D, F, ROWS = 4, 256, 1024, 512


def _mlp(state: State, x: Array, *, remat: bool = False) -> Array:
    def layer(x: Array, w: tuple[Array, Array]) -> tuple[Array, None]:
        with jax.named_scope("mlp"):
            return x + jax.nn.relu(x @ w[0]) @ w[1], None

    return jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, state)[0]


def _weights(layers: int = LAYERS, d: int = D, f: int = F) -> State:
    values = np.random.default_rng(0)
    up, down = values.normal(size=(layers, d, f)), values.normal(size=(layers, f, d))
    return jnp.asarray(up / 100, jnp.float32), jnp.asarray(down / 100, jnp.float32)


def _batch(rows: int = ROWS, d: int = D) -> Callable[[], Array]:
    fixed = np.ones((rows, d), np.float32)
    return lambda: jax.device_put(fixed)


def _step(loss_of: Callable[[State, Array], Array]) -> Step:
    def train_step(state: State, batch: Array) -> tuple[State, Array]:
        loss, gradient = jax.value_and_grad(loss_of)(state, batch)
        with jax.named_scope("optimizer"):
            return jax.tree.map(lambda w, g: w - 1e-3 * g, state, gradient), loss

    return jax.jit(train_step)


def _square(y: Array) -> Array:
    with jax.named_scope("loss"):
        return jnp.mean(y * y)


def healthy() -> Loop:
    """A scanned MLP."""
    return Loop(
        step=_step(lambda state, x: _square(_mlp(state, x))), state=_weights(), batch=_batch()
    )


def _with(**changes: Any) -> Callable[[], Loop]:
    return lambda: replace(healthy(), **changes)


def _remat() -> Loop:
    step = _step(lambda state, x: _square(_mlp(state, x, remat=True)))
    return replace(healthy(), step=step)


def _evaluation() -> Loop:
    def evaluate_step(state: State, batch: Array) -> Array:
        return _square(_mlp(state, batch))

    return replace(healthy(), evaluate=jax.jit(evaluate_step))


def _callback() -> Loop:
    def slow(x: np.ndarray) -> np.ndarray:
        time.sleep(0.02)
        return x

    def loss_of(state: State, x: Array) -> Array:
        loss = _square(_mlp(state, x))
        return loss + 0 * jax.pure_callback(
            slow, jax.ShapeDtypeStruct((), jnp.float32), jax.lax.stop_gradient(loss)
        )

    return replace(healthy(), step=_step(loss_of))


def _rows(rows: int) -> Callable[[], Loop]:
    return lambda: replace(healthy(), state=_weights(4, 1024, 4096), batch=_batch(rows, 1024))


SEQUENCE, HEADS, WIDTH, BLOCK = 1024, 4, 32, 128


def _attention(blocks: bool) -> Callable[[], Loop]:
    """Causal attention over all pairs, or over the blocks that the mask keeps."""

    def attend(q: Array, k: Array, v: Array, first: int) -> Array:
        scores = jnp.einsum("hqd,hkd->hqk", q, k)
        rows = first + jnp.arange(q.shape[1])[:, None]
        scores = jnp.where(rows >= jnp.arange(k.shape[1])[None, :], scores, -1e9)
        return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores), v)

    def loss_of(w: Array, x: Array) -> Array:
        with jax.named_scope("attention"):
            q, k, v = jnp.einsum("sd,cdhe->chse", x, w)
            size = BLOCK if blocks else SEQUENCE
            parts = [
                attend(q[:, i : i + size], k[:, : i + size], v[:, : i + size], i)
                for i in range(0, SEQUENCE, size)
            ]
        return _square(jnp.concatenate(parts, axis=1))

    values = np.random.default_rng(0).normal(size=(3, 64, HEADS, WIDTH))
    state = jnp.asarray(values / 8, jnp.float32)
    return lambda: Loop(step=_step(loss_of), state=state, batch=_batch(SEQUENCE, 64))


def _two_devices(extra: int) -> Callable[[], Loop]:
    """Data parallel on two devices, the first of which does more, in a loop on one core."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def loss_of(state: State, x: Array) -> Array:
        return _square(_mlp(state, x))

    def local(state: State, x: Array) -> tuple[State, Array]:
        again = jnp.where(jax.lax.axis_index("data") == 0, extra, 0)
        busy = jax.lax.fori_loop(0, again, lambda _, y: jnp.sin(y), jnp.ones((4096,)))
        loss, gradient = jax.value_and_grad(loss_of)(state, x + 0 * busy[0])
        gradient = jax.lax.pmean(gradient, "data")
        return jax.tree.map(lambda w, g: w - 1e-3 * g, state, gradient), loss[None]

    def train_step(state: State, batch: Array) -> tuple[State, Array]:
        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec("data")),
            out_specs=(PartitionSpec(), PartitionSpec("data")),
            check_vma=False,
        )(state, batch)

    sharding = NamedSharding(mesh, PartitionSpec("data"))
    state = jax.device_put(_weights(), NamedSharding(mesh, PartitionSpec()))
    fixed = np.ones((ROWS, D), np.float32)
    return lambda: Loop(
        step=jax.jit(train_step), state=state, batch=lambda: jax.device_put(fixed, sharding)
    )


FAULTS: Mapping[str, Fault] = {
    "none": Fault(cause="", loop=healthy, healthy=healthy),
    "data": Fault(cause="slow data", loop=_with(data_seconds=0.3), healthy=healthy),
    "sync": Fault(
        cause="sync in the loop",
        loop=_with(reads_loss=True, log_seconds=0.02),
        healthy=_with(log_seconds=0.02),
    ),
    "recompile": Fault(cause="recompiles", loop=_with(recompile_every=4), healthy=healthy),
    "remat": Fault(cause="remat heavier than memory needs", loop=_remat, healthy=healthy),
    "batch": Fault(cause="small batch", loop=_rows(1), healthy=_rows(8), share=1 / 8),
    "attention": Fault(
        cause="attention without a kernel", loop=_attention(False), healthy=_attention(True)
    ),
    "straggler": Fault(
        cause="imbalance between devices", loop=_two_devices(3000), healthy=_two_devices(0)
    ),
    "evaluation": Fault(cause="eval in the loop", loop=_evaluation, healthy=healthy),
    "callback": Fault(cause="host callback in the step", loop=_callback, healthy=healthy),
}
