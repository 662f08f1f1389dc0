"""Which gradients a training step needs: frozen weights, LoRA, a reference model.

A weight matmul has two gradients: of its weights and of its input. Frozen weights need no gradient;
an input needs one only if something below it trains. Gradients that nothing needs are not
counted.
"""

from __future__ import annotations

import dataclasses
import functools

from mfu_jax.errors import UserError, nearest
from mfu_jax.flops.analytic.architectures.families import build
from mfu_jax.flops.analytic.components import Component, Layer, Layers
from mfu_jax.flops.analytic.formulas import Components
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.analytic.names import FIRST, INDEXER, LOGITS, LORA_A, LORA_B

# Parts that read the residual stream itself, through a norm; the others read their predecessor in
# the same block.
_READS_STREAM = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "q_a", "kv_a", "kv_proj", "in_proj", "in_proj_qkvz"),
        *("in_proj_ba", "gate_proj", "wi", "wi_0", "wi_1", "router", "shared_gate", LOGITS),
        *("relative_proj", "sinks_proj", "taps_proj"),
    }
)
# The indexer's query side; its other projections produce keys.
_OF_INDEXED_QUERIES = (f"{INDEXER}/q_proj", f"{INDEXER}/weights_proj")
# Parts that end a block: their output is added to the residual stream.
_ENDS_BLOCK = frozenset({"o_proj", "o_b", "out_proj", "wo"})


def training_model(config: ModelConfig) -> Layers:
    """The layers of `config` with the gradients that its training step needs.

    Raises:
        UserError: `frozen` or `lora_targets` match nothing in the model.
    """
    model = build(config)
    training = config.training
    if training.lora_rank:
        model = _with_adapters(model, training.lora_rank, training.lora_targets)
    elif training.frozen:
        model = _frozen(model, training.frozen)
    if training.lora_rank or training.frozen:
        model = _without_unneeded_gradients(model)
    return _with_reference(model) if training.use_dpo else model


def _with_reference(model: Layers) -> Layers:
    """Adds DPO's reference model to the policy: a separate forward pass, no gradient."""

    def forward_only(part: Component) -> Components:
        return (part.replace(left_gradient=False, right_gradient=False, parameters=0),)

    reference = (
        dataclasses.replace(layer.each(forward_only), name=f"reference/{layer.name}")
        for layer in model
    )
    return (*model, *reference)


def _with_adapters(model: Layers, rank: int, targets: tuple[str, ...]) -> Layers:
    """LoRA: freezes everything; targets get ``A [inputs, r]`` and ``B [r, outputs]`` beside it."""
    if not targets:
        raise UserError(
            f"lora_rank={rank} needs lora_targets, the projections that get adapters",
            hint="for example lora_targets=q_proj,v_proj",
        )
    open_layers = [layer for layer in model if not _is_frozen_tower(layer)]
    names = {_last(part) for layer in open_layers for part in layer.components if part.inputs}
    _check_names("lora_targets", targets, names)

    def adapted(part: Component) -> Components:
        frozen = part.replace(right_gradient=part.kind == "attention")
        if _last(part) not in targets or not part.inputs:
            return (frozen,)
        copies = part.parameters // (part.inputs * part.outputs) or 1
        times = part.macs // (part.inputs * part.outputs)
        down = part.replace(
            name=f"{part.name}/{LORA_A}",
            macs=times * part.inputs * rank,
            parameters=copies * part.inputs * rank,
            active_parameters=None,
        )
        up = part.replace(
            name=f"{part.name}/{LORA_B}",
            macs=times * rank * part.outputs,
            parameters=copies * rank * part.outputs,
            active_parameters=None,
        )
        return (frozen, down, up)

    def still(part: Component) -> Components:
        return (part.replace(right_gradient=part.kind == "attention"),)

    return tuple(layer.each(still if _is_frozen_tower(layer) else adapted) for layer in model)


def _frozen(model: Layers, frozen: tuple[str, ...]) -> Layers:
    """Freezes the weights of the layers and components named in `frozen`."""
    known = {name for layer in model for part in layer.components for name in _names(layer, part)}
    _check_names("frozen", frozen, known)
    chosen = set(frozen)

    def freeze(layer: Layer, part: Component) -> Components:
        if part.kind == "attention" or chosen.isdisjoint(_names(layer, part)):
            return (part,)
        return (part.replace(right_gradient=False),)

    return tuple(layer.each(functools.partial(freeze, layer)) for layer in model)


def _names(layer: Layer, part: Component) -> set[str]:
    """The names by which `frozen` may refer to a part: its layer, its tower, a word of its name."""
    tower, slash, _ = layer.name.partition("/")
    return {layer.name, *part.name.split("/"), *((tower,) if slash else ())}


def _is_frozen_tower(layer: Layer) -> bool:
    """Whether nothing in a layer trains even before LoRA; it then gets no adapters."""
    return not any(part.right_gradient for part in layer.components if part.macs)


def _without_unneeded_gradients(model: Layers) -> Layers:
    """Follows the residual stream up: below the first trained weight, inputs need no gradient.

    Kinds of layers are taken in order of first appearance.
    """
    layers: list[Layer] = []
    flows = False
    for layer in model:
        first, flows_after = _through(layer, flows)
        if flows_after == flows or layer.repeats == 1:
            layers.append(first)
        else:
            rest, _ = _through(layer, flows_after)
            layers.append(dataclasses.replace(first, name=f"{layer.name}/{FIRST}", repeats=1))
            layers.append(dataclasses.replace(rest, repeats=layer.repeats - 1))
        flows = flows_after
    return tuple(layers)


def _through(layer: Layer, flows: bool) -> tuple[Layer, bool]:
    """The layer with the gradients it needs, and whether its output needs one.

    Args:
        layer: as built, with every gradient.
        flows: whether its input needs a gradient.
    """
    block = flows  # whether anything so far in the block has a gradient
    trains: dict[str, bool] = {}  # projection → whether its result has a gradient
    parts = []
    for part in layer.components:
        changed = part
        if part.name.startswith(f"{INDEXER}/"):
            changed = _of_indexer(part, trains)
        elif part.table:
            flows = block = flows or part.right_gradient
        elif part.kind == "attention":
            changed = _scores(part, trains, block)
        elif part.macs:
            base, last = part.name.removesuffix("/" + _last(part)), _last(part)
            if last in (LORA_A, LORA_B):
                below = trains[base] if last == LORA_B else _reads(base, flows, block)
                trains[base] = True
            else:
                below = _reads(part.name, flows, block)
                trains[part.name] = below or part.right_gradient
            changed = part.replace(left_gradient=below and part.left_gradient)
            block = block or any((below, part.right_gradient))
        parts.append(changed)
        if _last(part) in _ENDS_BLOCK or _is_adapter_of(part, _ENDS_BLOCK):
            flows = block = flows or block
    return dataclasses.replace(layer, components=tuple(parts)), flows or block


def _of_indexer(part: Component, trains: dict[str, bool]) -> Component:
    """A part of an indexer: its inputs are detached, and the model does not train through it.

    Scores multiply queries and keys; the sum over heads multiplies scores and head weights.
    """
    if part.kind != "attention":
        trains[part.name] = part.right_gradient
        return part
    query, weights = (trains.get(name, False) for name in _OF_INDEXED_QUERIES)
    key = any(
        value
        for name, value in trains.items()
        if name.startswith(f"{INDEXER}/") and name not in _OF_INDEXED_QUERIES
    )
    left, right = (query, key) if _last(part) == "scores" else (query or key, weights)
    return part.replace(
        left_gradient=part.left_gradient and left, right_gradient=part.right_gradient and right
    )


def _scores(part: Component, trains: dict[str, bool], block: bool) -> Component:
    """An operand (Q and K, or P and V) gets a gradient only if its side trains."""
    prefix = part.name.rsplit("/", 1)[0]
    sides = [trains.get(f"{prefix}/{name}") for name in ("q_proj", "k_proj", "v_proj")]
    if any(side is None for side in sides):
        return part.replace(left_gradient=block, right_gradient=block)
    query, key, value = map(bool, sides)
    if part.name.endswith("_qk"):
        return part.replace(left_gradient=query, right_gradient=key)
    return part.replace(left_gradient=query or key, right_gradient=value)


def _reads(name: str, flows: bool, block: bool) -> bool:
    return flows if name.rsplit("/", 1)[-1] in _READS_STREAM else block


def _is_adapter_of(part: Component, names: frozenset[str]) -> bool:
    path = part.name.split("/")
    return path[-1] == LORA_B and path[-2] in names


def _last(part: Component) -> str:
    return part.name.rsplit("/", 1)[-1]


def _check_names(key: str, given: tuple[str, ...], known: set[str]) -> None:
    for name in given:
        if name not in known:
            raise UserError(
                f"{key} names {name!r}, which this model does not have; it has "
                f"{', '.join(sorted(known))}",
                hint=nearest(name, known),
            )
