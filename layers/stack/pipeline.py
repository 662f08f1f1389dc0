"""Layers in stages on different devices: a circular pipeline (arXiv 2104.04473, section 2.2).

Each device along the mesh's `pipeline` axis has every P-th chunk of the layers. A batch is cut
into microbatches, which pass from stage to stage, `repeats` times around. In every turn, all stages
work; in the first and the last P - 1 turns, some work on zeros: the bubble.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ..building import Builder, Inputs
from ..sharding import BATCH_AXES, SEQUENCE_AXIS, STAGE_AXIS, constrain
from .block import LayerSpec
from .stack import LayerSegment, Notes, Remat, blocks_of, run_pattern, segments_of

# Notes that are means over tokens; others are sums.
_MEANS = ("balance_loss", "indexer_loss")
# The fields of `Inputs` that a microbatch carries; stages share nothing else.
OF_ROWS = ("tokens", "positions", "segment_ids", "images", "grid")


class PipelineSchedule(NamedTuple):
    """Which stage works on what, and when.

    Attributes:
        stages: devices along the pipeline axis, P.
        repeats: how often a microbatch passes through all stages.
        chunk: repeats of the layers' pattern in one stage and pass.
        microbatches: number of parts of a batch.
    """

    stages: int
    repeats: int
    chunk: int
    microbatches: int

    @property
    def turns(self) -> int:
        """Number of turns, the bubble included."""
        return self.microbatches * self.repeats + self.stages - 1

    @property
    def bubble(self) -> Fraction:
        """The fraction of turns in which a stage works on zeros."""
        return Fraction(self.stages - 1, self.turns)


def schedule_of(config: Any, layers: Sequence[LayerSpec]) -> PipelineSchedule | None:
    """The schedule of a config; None without a pipeline.

    Raises:
        ValueError: the layers cannot be cut into equal stages.
    """
    stages = config.pipeline * config.dcn_pipeline_parallelism
    if stages <= 1:
        return None
    segment, *others = segments_of(layers)
    if others or config.mtp_num_layers or not all(layer.stands_alone for layer in layers):
        raise ValueError(
            f"pipeline={stages} needs layers that repeat one pattern and share nothing, without "
            "multi-token prediction; this model has others: leave pipeline at 1"
        )
    period, own = len(segment.pattern), config.num_layers_per_pipeline_stage
    count = period * segment.repeats
    if own % period or count % (stages * own):
        raise ValueError(
            f"num_decoder_layers={count} cannot be cut into pipeline={stages} stages of "
            f"num_layers_per_pipeline_stage={own} layers; expected a multiple of {stages} × {own}, "
            f"and stages that are a multiple of the pattern's {period} layers"
        )
    wanted = config.num_pipeline_microbatches
    return PipelineSchedule(
        stages=stages,
        repeats=count // (stages * own),
        chunk=own // period,
        microbatches=stages if wanted == -1 else wanted,
    )


class Pipeline(nnx.Module):
    """The same layers as a `Stack`, in pipeline stages.

    The weights of each place of the pattern are [repeats, stages, chunk, ...]: in layer order,
    and split over stages.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        keys: jax.Array,
        build: Builder,
        *,
        schedule: PipelineSchedule,
        remat: Remat,
    ) -> None:
        (segment,) = self.segments = segments_of(layers)
        self.schedule = schedule
        self.remat = remat
        self.groups = nnx.List([nnx.List(_staged(segment, keys, build, schedule))])

    def __call__(
        self, x: jax.Array, inputs: Inputs, per_layer: jax.Array | None = None
    ) -> tuple[jax.Array, Notes]:
        """Runs all layers; `x` and the results are as in `Stack`.

        The notes have the same leading dimensions as the weights.
        """
        plan = self.schedule
        (segment,) = self.segments
        split = [nnx.split(block) for block in self.groups[0]]
        runs = run_pattern(segment, [graphdef for graphdef, _ in split], self.remat)
        rows = jax.tree.map(
            lambda of_batch: _microbatches(of_batch, plan.microbatches),
            {name: getattr(inputs, name) for name in OF_ROWS},
        )

        def stage(weights: Any, x: jax.Array, rows: dict[str, Any]) -> Any:
            here = Inputs(**rows)
            x, (_, notes) = jax.lax.scan(lambda x, own: runs(x, own, None, here), x, weights)
            return x, notes

        turn = _Turn(plan, jax.vmap(stage, spmd_axis_name=STAGE_AXIS), rows, [w for _, w in split])
        streams = _microbatches(x, plan.microbatches)
        flowing = jnp.zeros((plan.stages, *streams.shape[1:]), streams.dtype)
        first = jnp.zeros((), jnp.int32)
        shapes = jax.eval_shape(lambda: turn(flowing, streams, first)[2])
        zeros = jax.tree.map(lambda note: jnp.zeros(note.shape, note.dtype), shapes)

        def body(state: Any, number: jax.Array) -> tuple[Any, None]:
            flowing, streams, notes = state
            flowing, streams, noted = turn(flowing, streams, number)
            return (flowing, streams, jax.tree.map(jnp.add, notes, noted)), None

        state = (_over_stages(flowing), streams, zeros)
        (_, streams, notes), _ = jax.lax.scan(body, state, jnp.arange(plan.turns))
        means = [
            {name: v / plan.microbatches if name in _MEANS else v for name, v in note.items()}
            for note in notes
        ]
        return _joined(_by_rows(streams)), [means]


class _Turn(NamedTuple):
    """One turn of all stages.

    Attributes:
        plan: the schedule.
        stages: computes all stages from stacked weights, activations and rows.
        rows: `OF_ROWS`, each [microbatches, rows, sequence].
        weights: trees of [repeats, stages, chunk, ...].
    """

    plan: PipelineSchedule
    stages: Callable[..., Any]
    rows: dict[str, Any]
    weights: Any

    def __call__(self, flowing: jax.Array, streams: jax.Array, turn: jax.Array) -> Any:
        """Passes each microbatch one stage on.

        Args:
            flowing: each stage's input from the stage before, [stages, rows, sequence, ...].
            streams: each microbatch after its last completed pass.
            turn: its number.
        """
        plan = self.plan
        number = jnp.arange(plan.stages)
        item = turn - number  # index over all passes of all microbatches, in order
        is_real = (item >= 0) & (item < plan.microbatches * plan.repeats)
        microbatch = item % plan.microbatches
        repeat = jnp.clip(item // plan.microbatches, 0, plan.repeats - 1)
        entering = _one_of(streams, microbatch[0])
        is_first = number.reshape(-1, *(1,) * (flowing.ndim - 1)) == 0
        x = _over_stages(jnp.where(is_first, entering, flowing))
        rows = jax.tree.map(lambda of_all: _over_stages(of_all[microbatch]), self.rows)
        x, notes = self.stages(_of_repeat(self.weights, repeat), x, rows)
        x = _over_stages(x)
        streams = _with_result(streams, x[-1:], turn - plan.stages + 1)
        notes = jax.tree.map(lambda note: _of_layers(note, is_real, repeat, plan.repeats), notes)
        return jnp.roll(x, 1, axis=0), streams, notes


def _with_result(streams: jax.Array, result: jax.Array, item: jax.Array) -> jax.Array:
    """`streams` with the last stage's result, once there is one."""
    place = item % streams.shape[0]
    new = _by_rows(jnp.where(item >= 0, result, _one_of(streams, place)))
    return _by_rows(jax.lax.dynamic_update_index_in_dim(streams, new, place, 0))


def _one_of(streams: jax.Array, place: jax.Array) -> jax.Array:
    """[1, rows, sequence, ...]; placed, or XLA gathers the rows of all microbatches for it."""
    return _by_rows(jax.lax.dynamic_index_in_dim(streams, place, keepdims=True))


def _of_repeat(weights: Any, repeat: jax.Array) -> Any:
    """[repeats, stages, ...] → [stages, ...]: each stage's weights for its current pass."""

    def pick(weight: jax.Array) -> jax.Array:
        if weight.shape[0] == 1:
            return weight[0]
        index = repeat.reshape(1, -1, *(1,) * (weight.ndim - 2))
        return jnp.take_along_axis(weight, index, axis=0, mode="promise_in_bounds")[0]

    return jax.tree.map(pick, weights)


def _of_layers(note: jax.Array, is_real: jax.Array, repeat: jax.Array, repeats: int) -> jax.Array:
    """[stages, ...] → [repeats, stages, ...]: zeros for other passes, and in the bubble."""
    is_own = is_real & (jnp.arange(repeats)[:, None] == repeat)
    return jnp.where(is_own.reshape(*is_own.shape, *(1,) * (note.ndim - 1)), note, 0)


def _over_stages(x: jax.Array) -> jax.Array:
    """Places activations [stages, rows, sequence, ...] on their stages' devices."""
    return constrain(x, STAGE_AXIS, BATCH_AXES, SEQUENCE_AXIS, *(None,) * (x.ndim - 3))


def _microbatches(x: jax.Array, count: int) -> jax.Array:
    """[batch, sequence, ...] → [count, rows, sequence, ...]: each has rows of every device."""
    return _by_rows(x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1))


def _by_rows(x: jax.Array) -> jax.Array:
    """Places [microbatches, rows, sequence, ...] on the devices of its rows."""
    return constrain(x, None, BATCH_AXES, SEQUENCE_AXIS, *(None,) * (x.ndim - 3))


def _joined(streams: jax.Array) -> jax.Array:
    """The inverse of `_microbatches`."""
    return streams.swapaxes(0, 1).reshape(-1, *streams.shape[2:])


def _staged(
    segment: LayerSegment, keys: jax.Array, build: Builder, schedule: PipelineSchedule
) -> list[nnx.Module]:
    """The blocks of each place, with weights [repeats, stages, chunk, ...]."""
    leading = (schedule.repeats, schedule.stages, schedule.chunk)

    def stage(block: nnx.Module) -> nnx.Module:
        graphdef, weights = nnx.split(block)
        cut = jax.tree.map(lambda w: w.reshape(*leading, *w.shape[1:]), weights)
        return nnx.merge(graphdef, cut)

    return [stage(block) for block in blocks_of(segment, keys, build)]
