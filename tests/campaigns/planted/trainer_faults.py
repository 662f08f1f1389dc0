"""Faults that cost time, each planted in an otherwise healthy run of the reference trainer.

A fault is planted from outside: by a config key, by a wrapper of the data or the logger, or by
changing a function of the trainer while the run sets itself up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from mfu_jax.layers.attention.ops import (
    ATTENTION_OPS,
    AttentionInputs,
    dot_product,
    masked_probabilities,
    weighted,
)

from mfu_jax.trainer import loop as trainer
from mfu_jax.trainer.step import train_step as trainer_step
from tests.campaigns.planted.turns import TurnedTrainer

_KEYS = ("dataset_type=synthetic", "max_target_length=256", "per_device_batch_size=4")
# A step of some 50 ms on an H100.
ON_GPU = (
    *("dtype=bfloat16", "max_target_length=1024", "per_device_batch_size=8", "emb_dim=2048"),
    *("mlp_dim=8192", "num_decoder_layers=8", "num_query_heads=16", "num_kv_heads=16"),
    *("head_dim=128", "vocab_size=32768"),
)
_LOG_SECONDS = 0.1  # of a loop's own work: hidden, unless it waits for the device
_DATA_SECONDS = 0.2
# A step that waits for Python reuses the memory of the previous step; one called ahead gets fresh
# pages, which takes milliseconds: the wait must be long compared to that.
_CALLBACK_SECONDS = 0.2
_COMPILE_EVERY = 4  # steps


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        cause: of the advice expected first; empty: no advice at all.
        options: of the `TurnedTrainer` with the fault, in addition to its keys.
        healthy: options of the trainer without the fault.
        keys: of the trainer's config, for both.
        faulty_keys: with the fault.
        healthy_keys: without.
        share: of a healthy step that does the same work as a step with the fault.
        devices: number of virtual devices.
    """

    cause: str
    options: Mapping[str, Any] = field(default_factory=dict)
    healthy: Mapping[str, Any] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    faulty_keys: tuple[str, ...] = ()
    healthy_keys: tuple[str, ...] = ()
    share: float = 1.0
    devices: int = 1

    def pair(self, folder: Path, keys: tuple[str, ...] = ()) -> tuple[TurnedTrainer, TurnedTrainer]:
        """The trainers with and without the fault; `keys` replace those of the fault."""
        keys = (*_KEYS, *(keys or self.keys))
        return (
            TurnedTrainer(folder / "faulty", (*keys, *self.faulty_keys), **self.options),
            TurnedTrainer(folder / "healthy", (*keys, *self.healthy_keys), **self.healthy),
        )


class _Slow:
    """A data loader that sleeps for each batch."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __next__(self) -> Any:
        time.sleep(_DATA_SECONDS)
        return next(self._batches)


Record = Callable[..., None]


def _logs(record: Record) -> Record:
    def log(step: int, metrics: Any) -> None:
        record(step, metrics)
        time.sleep(_LOG_SECONDS)

    return log


def _reads_loss(record: Record) -> Record:
    def log(step: int, metrics: Any) -> None:
        float(metrics["loss"])
        _logs(record)(step, metrics)

    return log


def _busy(record: Record) -> Record:
    def log(step: int, metrics: Any) -> None:
        record(step, metrics)
        time.sleep(_DATA_SECONDS)

    return log


class _Recompiled:
    """A compiled step that is compiled again every few calls."""

    def __init__(self, compile_again: Callable[[], Any]) -> None:
        self._compile_again = compile_again
        self._compiled = compile_again()
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def __call__(self, *args: Any) -> Any:
        self._calls += 1
        if self._calls % _COMPILE_EVERY == 0:
            self._compiled = self._compile_again()
        return self._compiled(*args)


def _recompiles() -> Any:
    compile_step = trainer.compile_train_step

    def compile_train_step(*args: Any) -> Any:
        return _Recompiled(lambda: compile_step(*args))

    return mock.patch.object(trainer, "compile_train_step", compile_train_step)


def _in_loss(change: Callable[..., Any]) -> Callable[[], Any]:
    """A plant that changes the inputs and outputs of a step's loss function.

    Args:
        change: maps the loss function and its batch to the replacement result.
    """

    def plant() -> Any:
        loss_of: Callable[..., Any] = trainer_step.objective

        def objective(*arguments: Any) -> Any:
            *weights, batch, config = arguments
            return change(lambda batch: loss_of(*weights, batch, config), batch)

        return mock.patch.object(trainer_step, "objective", objective)

    return plant


def _asks_host(loss_of: Callable[[Any], Any], batch: Any) -> Any:
    """The step computes nothing before the host has answered: if nothing needed the answer, the
    call would be dropped, or hidden behind matmuls."""

    def slow(token: np.ndarray) -> np.ndarray:
        time.sleep(_CALLBACK_SECONDS)
        return np.zeros_like(token)

    inputs = batch["inputs"]
    zero = jax.pure_callback(slow, jax.ShapeDtypeStruct((), inputs.dtype), inputs[0, 0])
    return loss_of(batch | {"inputs": inputs + zero})


def _straggles(rounds: int) -> Callable[[Any, Any], Any]:
    """The first device computes longer before the step, and the others wait for it there.

    If it computed alongside the others' matmuls, those would get more of the shared memory's
    bandwidth than in the healthy run. Rounds are long because each is an event: tracing would slow
    down many short ones.
    """

    def local() -> jax.Array:
        is_first = jax.lax.axis_index("data") == 0
        often = jnp.where(is_first, rounds, 0)
        busy = jax.lax.fori_loop(0, often, lambda _, y: jnp.sin(jnp.sin(y)), jnp.ones((2**17,)))
        return jax.lax.psum(busy[0], "data")

    def change(loss_of: Callable[[Any], Any], batch: Any) -> Any:
        total = jax.shard_map(local, in_specs=(), out_specs=PartitionSpec(), check_vma=False)()
        never = (total < -1e9).astype(jnp.int32)
        return loss_of(batch | {"inputs": batch["inputs"] + never})

    return change


def _evaluates_within() -> Any:
    make = trainer_step.make_train_step

    def make_train_step(config: Any) -> Any:
        step, evaluate = make(config), trainer_step.make_eval_step(config)

        def train_step(state: Any, batch: Any) -> Any:
            loss, tokens = evaluate(state, {key: value[:, ::-1] for key, value in batch.items()})
            state, metrics = step(state, batch)
            return state, {**metrics, "eval_loss": loss / tokens}

        return train_step

    return mock.patch.object(trainer_step, "make_train_step", make_train_step)


def _in_blocks(x: AttentionInputs) -> jax.Array:
    """Causal attention that skips the keys after each block of queries."""
    mask, size = x.mask, 128
    parts = []
    for start in range(0, x.q.shape[1], size):
        end = start + size
        block = x.q[:, start:end], x.k[:, :end], mask[:, start:end, :end]
        found = masked_probabilities(*block, pattern=x.pattern, sinks=x.sinks)
        parts.append(weighted(x.v[:, :end], found, x.q.dtype))
    return jnp.concatenate(parts, axis=1)


def _with_attention(op: Any) -> Callable[[], Any]:
    return lambda: mock.patch.dict(ATTENTION_OPS, {"dot_product": op})


FAULTS: Mapping[str, Fault] = {
    "none": Fault(cause=""),
    "none wide": Fault(cause="", keys=("emb_dim=512", "mlp_dim=2048", "num_decoder_layers=2")),
    "none deep": Fault(cause="", keys=("num_decoder_layers=12", "vocab_size=1024")),
    "none accumulated": Fault(cause="", keys=("gradient_accumulation_steps=2",)),
    "none two devices": Fault(cause="", devices=2),
    "data": Fault(cause="slow data", options={"data": _Slow}),
    "sync": Fault(  # a step long enough to hide the loop's own work
        cause="sync in the loop",
        keys=("per_device_batch_size=8",),
        options={"record": _reads_loss},
        healthy={"record": _logs},
    ),
    "host": Fault(cause="host-bound loop", options={"record": _busy}),
    "recompile": Fault(cause="recompiles", options={"plant": _recompiles}),
    "remat": Fault(
        cause="remat heavier than memory needs",
        # Wide: a CPU copies what a scan keeps into the stacked array of all layers and back, which
        # took all that narrow layers would gain. 6000: rows of whole pages (6144) share a few
        # cache sets, so that a transposed copy took ten times as long in some runs.
        keys=(
            *("max_target_length=256", "per_device_batch_size=2", "vocab_size=1024"),
            *("emb_dim=1536", "mlp_dim=6000", "num_decoder_layers=2"),
        ),
        faulty_keys=("remat_policy=full",),
        healthy_keys=("remat_policy=minimal",),  # which keeps the results of matmuls
    ),
    "batch": Fault(
        cause="small batch",
        keys=("max_target_length=8", "emb_dim=512", "mlp_dim=2048", "num_decoder_layers=2"),
        faulty_keys=("per_device_batch_size=1",),
        healthy_keys=("per_device_batch_size=8",),
        share=1 / 8,
    ),
    "attention": Fault(
        cause="attention without a kernel",
        keys=("max_target_length=1024", "per_device_batch_size=1", "num_decoder_layers=2"),
        options={"plant": _with_attention(dot_product)},
        healthy={"plant": _with_attention(_in_blocks)},
    ),
    "straggler": Fault(
        cause="imbalance between devices",
        options={"plant": _in_loss(_straggles(300))},
        healthy={"plant": _in_loss(_straggles(0))},
        devices=2,
    ),
    "evaluation": Fault(cause="eval in the loop", faulty_keys=("eval_interval=1", "eval_steps=2")),
    "evaluation within": Fault(cause="eval in the loop", options={"plant": _evaluates_within}),
    "callback": Fault(cause="host callback in the step", options={"plant": _in_loss(_asks_host)}),
}
HOST_FAULTS = ("none", "data", "sync", "host", "recompile", "evaluation", "callback")
