"""The layers of a decoder; repeated patterns are scanned, with or without remat."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ..building import Builder, Inputs
from .block import Block, LayerSpec

# Longer periods are not searched for.
_LONGEST_PERIOD = 16


class LayerSegment(NamedTuple):
    """Consecutive layers: `pattern`, repeated `repeats` times, from layer `first` on."""

    pattern: tuple[LayerSpec, ...]
    repeats: int
    first: int


def segments_of(layers: Sequence[LayerSpec], first_alone: bool = False) -> tuple[LayerSegment, ...]:
    """Cuts layers into runs of repeated patterns, the longest first.

    Args:
        first_alone: whether the first layer is a run of its own.

    >>> [(s.pattern, s.repeats) for s in segments_of("abbabbc")]
    [(('a', 'b', 'b'), 2), (('c',), 1)]
    """
    found = [LayerSegment((layers[0],), 1, 0)] if first_alone else []
    first = len(found)
    while first < len(layers):
        period, repeats = _longest_run(layers[first:])
        found.append(LayerSegment(tuple(layers[first : first + period]), repeats, first))
        first += period * repeats
    return tuple(found)


def _longest_run(layers: Sequence[LayerSpec]) -> tuple[int, int]:
    """Period and repeats that cover the most layers from the start; the shorter period on ties."""
    best = (1, 1)
    for period in range(1, min(_LONGEST_PERIOD, len(layers) // 2) + 1):
        pattern, repeats = layers[:period], 1
        while layers[repeats * period : (repeats + 1) * period] == pattern:
            repeats += 1
        if repeats > 1 and period * repeats > best[0] * best[1]:
            best = (period, repeats)
    return best


# The layers' notes, by segment and place.
Notes = list[list[dict[str, jax.Array]]]
Remat = Callable[..., Callable[..., Any]]


class Stack(nnx.Module):
    """Blocks in order.

    Args:
        layers: from first to last.
        keys: one for each layer, so that scanned and unrolled layers start from the same weights.
        scan: whether repeated patterns are scanned.
        remat: wraps the function of a block; takes ``prevent_cse``.
        whole_patterns: whether `remat` wraps a repeat of a scanned pattern instead of each block.
        first_alone: whether the first layer stays out of the scan: its input needs no gradient,
            and a scan would compute one.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        keys: jax.Array,
        build: Builder,
        *,
        scan: bool,
        remat: Remat,
        whole_patterns: bool = False,
        first_alone: bool = False,
    ) -> None:
        self.segments = segments_of(layers, first_alone) if scan else _single(layers)
        self.remat = remat
        self.whole_patterns = whole_patterns
        self.groups = nnx.List(
            [nnx.List(blocks_of(segment, keys, build)) for segment in self.segments]
        )

    def __call__(
        self, x: jax.Array, inputs: Inputs, per_layer: jax.Array | None = None
    ) -> tuple[jax.Array, Notes]:
        """Runs all layers.

        Args:
            x: [batch, sequence, (streams,) emb_dim].
            per_layer: each layer's own input, [layers, batch, sequence, width].

        Returns:
            `x` after the last layer, and the notes of each segment's places; those of a scanned
            segment have its repeats as leading dimension.
        """
        notes = []
        kept: dict[str, Any] = {}
        for segment, blocks in zip(self.segments, self.groups, strict=True):
            split = [nnx.split(block) for block in blocks]
            graphdefs = [graphdef for graphdef, _ in split]
            run = run_pattern(segment, graphdefs, self.remat, whole=self.whole_patterns)
            here = dataclasses.replace(inputs, kept=kept)
            steps = [weights for _, weights in split], _inputs_of(segment, per_layer)
            x, made, noted = _repeated(run, x, steps, here, is_scanned=segment.repeats > 1)
            kept = {**kept, **made}
            notes.append(noted)
        return x, notes


def _repeated(
    run: Callable[..., Any], x: jax.Array, steps: Any, inputs: Inputs, *, is_scanned: bool
) -> tuple[jax.Array, dict[str, Any], list[dict[str, jax.Array]]]:
    """Runs a segment: x, what its last repeat keeps, its notes."""
    if not is_scanned:
        weights, own = steps
        x, (made, notes) = run(x, weights, None if own is None else own[0], inputs)
        return x, made, notes
    x, (made, notes) = jax.lax.scan(lambda x, step: run(x, *step, inputs), x, steps)
    return x, jax.tree.map(lambda stacked: stacked[-1], made), notes


def run_pattern(
    segment: LayerSegment, graphdefs: Sequence[Any], remat: Remat, *, whole: bool = False
) -> Callable[..., Any]:
    """One repeat of a pattern: (x, weights of its places, their own inputs, `Inputs`) → x, and what
    the blocks keep and note; `remat` wraps each block, or a scanned pattern as a whole.
    """
    # Inside a scan, XLA cannot merge the recomputation with the forward pass anyway.
    options = {"prevent_cse": False} if segment.repeats > 1 else {}
    whole = whole and segment.repeats > 1
    blocks = [run_block(graphdef) for graphdef in graphdefs]
    if not whole:
        blocks = [remat(block, **options) for block in blocks]
    names = _names(segment)

    def run(x: jax.Array, weights: Any, own: jax.Array | None, inputs: Inputs) -> Any:
        notes = []
        made: dict[str, Any] = {}
        for place, block in enumerate(blocks):
            here = dataclasses.replace(
                inputs,
                kept={**inputs.kept, **made},
                per_layer=None if own is None else own[place],
            )
            with jax.named_scope(names[place]):
                x, kept, noted = block(x, weights[place], here)
            made |= kept
            notes.append(noted)
        return x, (made, notes)

    return remat(run, **options) if whole else run


def run_block(graphdef: Any) -> Callable[..., Any]:
    """A block as a function of its weights that also returns what it keeps and notes."""

    def run(x: jax.Array, weights: Any, inputs: Inputs) -> Any:
        before = inputs.kept
        inputs = dataclasses.replace(inputs, kept=dict(before), notes={})
        y = nnx.merge(graphdef, weights)(x, inputs)
        made = {name: kv for name, kv in inputs.kept.items() if kv is not before.get(name)}
        return y, made, inputs.notes

    return run


def _names(segment: LayerSegment) -> list[str]:
    """The named scopes of a pattern's places."""
    if segment.repeats == 1:
        return [f"layers_{segment.first + place}" for place in range(len(segment.pattern))]
    if len(segment.pattern) == 1:
        return ["layers"]
    return [f"layers/place_{place}" for place in range(len(segment.pattern))]


def _single(layers: Sequence[LayerSpec]) -> tuple[LayerSegment, ...]:
    return tuple(LayerSegment((layer,), 1, number) for number, layer in enumerate(layers))


def _keys(keys: jax.Array, segment: LayerSegment, place: int) -> jax.Array:
    """The keys of one place of a pattern: one for each repeat."""
    first, period = segment.first, len(segment.pattern)
    return keys[first + place : first + period * segment.repeats : period]


def _inputs_of(segment: LayerSegment, per_layer: jax.Array | None) -> jax.Array | None:
    """[layers, …] → [repeats, places, …] for a segment."""
    if per_layer is None:
        return None
    period = len(segment.pattern)
    own = per_layer[segment.first : segment.first + period * segment.repeats]
    return own.reshape(segment.repeats, period, *own.shape[1:])


def blocks_of(segment: LayerSegment, keys: jax.Array, build: Builder) -> list[nnx.Module]:
    """A segment's blocks, place by place; `keys` are those of all layers."""
    return [
        _blocks(spec, _keys(keys, segment, place), build)
        for place, spec in enumerate(segment.pattern)
    ]


def _blocks(spec: LayerSpec, keys: jax.Array, build: Builder) -> nnx.Module:
    """One block for a single key; for several keys, one with stacked weights."""

    def make(key: jax.Array) -> Block:
        return Block(spec, build.of_layer(key))

    if len(keys) == 1:
        return make(keys[0])
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(keys[0])))
    stacked = jax.vmap(lambda key: nnx.state(make(key)))(keys)
    made: nnx.Module = nnx.merge(graphdef, stacked)
    return made


def results(segments: Sequence[LayerSegment], notes: Notes) -> list[jax.Array]:
    """The results of layers with `shown` (see `LayerSpec`), from first to last."""
    found: dict[int, jax.Array] = {}
    for segment, places in zip(segments, notes, strict=True):
        for place, note in enumerate(places):
            if "result" in note:
                period, first = len(segment.pattern), segment.first + place
                stacked = note["result"] if segment.repeats > 1 else note["result"][None]
                found |= {first + period * i: one for i, one in enumerate(stacked)}
    return [found[number] for number in sorted(found)]


def total(notes: Notes, name: str) -> jax.Array:
    """The sum of a note over all layers; 0 if no layer has it."""
    return sum((value.sum() for value in _found(notes, name)), jnp.zeros((), jnp.float32))


def mean(notes: Notes, name: str) -> jax.Array:
    """The mean of a note over the layers that have it."""
    found = _found(notes, name)
    return sum((value.sum() for value in found), jnp.zeros(())) / sum(v.size for v in found)


def _found(notes: Notes, name: str) -> list[jax.Array]:
    return [note[name] for places in notes for note in places if name in note]
