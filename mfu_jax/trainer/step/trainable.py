"""Which weights a step trains: all, all but `frozen`, or only adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax import nnx

from mfu_jax.errors import UserError, nearest
from mfu_jax.trainer.config.pyconfig import Config

# Modules of the reference model → the analytic count's names of their weights.
_PROJECTIONS = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "o_proj",
    "query_a": "q_a",
    "query_b": "q_b",
    "out_a": "o_a",
    "out_b": "o_b",
}
# Hyper-connections → the block that they wrap.
_AROUND = {"mixer_connection": "attention", "feed_forward_connection": "mlp"}
_OF_INDEXER = {"query": "q_proj", "key": "k_proj", "head_weights": "weights_proj"}
_OUTSIDE = {
    "token_embedder": frozenset({"embedding", "tokens"}),
    "position_embedder": frozenset({"embedding", "positions"}),
    "logits_dense": frozenset({"head", "logits"}),
    "hyper_head": frozenset({"head", "hyper_head"}),
}
_ADAPTERS = ("lora_a", "lora_b")
_TOWER = "vision_encoder"
# Parts of the tower and its projector → their layers in the analytic count, and their names there.
_OF_SIGHT = {
    "patches": ("vision/patches", "patch_embedding"),
    "positions": ("vision/patches", "positions"),
    "fc1": ("vision/pixel_shuffle", "fc1"),
    "fc2": ("vision/pixel_shuffle", "fc2"),
    "projection": ("vision/projector", "projection"),
}
_OF_SQUARES = ("mlp_0", "mlp_2")


def trained_and_frozen(config: Config, params: Any) -> tuple[Any, Any]:
    """Splits a model's weights into those that are trained, and the others.

    Raises:
        UserError: `frozen` matches nothing in this model.
    """
    flat = dict(nnx.to_flat_state(params))
    is_trained = _chosen(config, list(flat))
    parts: tuple[dict[Any, Any], dict[Any, Any]] = ({}, {})
    for path, variable in flat.items():
        parts[not is_trained[path]][path] = variable
    trained, frozen = (nnx.from_flat_state(part) for part in parts)
    return trained, frozen


def joined(trained: Any, frozen: Any) -> Any:
    """Merges both parts of `trained_and_frozen`."""
    return nnx.merge_state(trained, frozen)


def all_are_trained(config: Config) -> bool:
    """Whether a step trains every weight of the decoder."""
    return not config.lora_rank and not config.frozen


def _chosen(config: Config, paths: Sequence[Any]) -> dict[Any, bool]:
    """Path of a weight → whether it is trained."""
    if config.lora_rank:
        return {path: path[-1] in _ADAPTERS for path in paths}
    still = _TOWER if config.freeze_vision_encoder_params else ""
    if not config.frozen:
        return {path: path[0] != still for path in paths}
    words = {path: _words(path, len(config.mlp_activations) > 1) for path in paths}
    tied = _OUTSIDE["logits_dense"] if config.logits_via_embedding else frozenset()
    known = sorted(tied.union(*words.values()))
    for name in config.frozen:
        if name not in known:
            raise UserError(
                f"frozen names {name!r}, which the reference model does not freeze here; "
                f"expected {', '.join(known)}",
                hint=nearest(name, known),
            )
    frozen = set(config.frozen)
    return {
        path: path[0] != still and bool(found) and not found & frozen
        for path, found in words.items()
    }


def _words(path: Sequence[Any], gated: bool) -> frozenset[str]:
    """The names of a matmul's weights; none for norms and biases.

    >>> sorted(_words(("layers", "groups", 0, 0, "feed_forward", "wo", "kernel"), True))
    ['layers', 'mlp', 'wo']
    """
    names = [str(name) for name in path]
    if names[0] in _OUTSIDE:
        return _OUTSIDE[names[0]] if names[-1] in ("kernel", "embedding") else frozenset()
    if names[0].startswith("vision_"):
        return _words_of_sight(names)
    if names[-1] == "kernel" and (block := _AROUND.get(names[-3])):
        return frozenset({"layers", "hyper_connection", block, "mix_proj"})
    part = names[-2] if names[-1] == "kernel" else names[-1]
    if "mixer" in names and (names[-1] == "kernel" or part == "out_a"):
        part = "compressor" if "compressor" in names else part
        if "indexer" in names:
            return frozenset({"layers", "indexer", _OF_INDEXER.get(part, part)})
        return frozenset({"layers", "attention", _PROJECTIONS.get(part, part)})
    if "feed_forward" not in names:
        return frozenset()
    after = names[names.index("feed_forward") + 1 :]
    if after in (["wi_0"], ["wi_1"], ["wo"]):
        return frozenset({"layers", "moe", "experts", *after})
    if after[-1] != "kernel":
        return frozenset()
    if "router" in after:
        return frozenset({"layers", "moe", "router"})
    name = after[-2] if gated or after[-2] == "wo" else "wi"
    return frozenset({"layers", name} | ({"moe", "shared"} if "shared" in after else {"mlp"}))


def _words_of_sight(names: list[str]) -> frozenset[str]:
    """The same for the vision tower and its projector.

    >>> sorted(_words_of_sight(["vision_encoder", "layers", "0", "mixer", "query", "kernel"]))
    ['attention', 'q_proj', 'vision', 'vision/layers']
    """
    part = names[-2] if names[-1] == "kernel" else names[-1]
    if part in _OF_SIGHT:
        return frozenset({"vision", *_OF_SIGHT[part]})
    if names[-1] != "kernel":
        return frozenset()
    if part in _OF_SQUARES:
        layer = "vision/deepstack_mergers" if "deep" in names else "vision/projector"
        return frozenset({"vision", layer, part})
    if "mixer" in names:
        return frozenset({"vision", "vision/layers", "attention", _PROJECTIONS[part]})
    return frozenset({"vision", "vision/layers", "mlp", "wi" if part == "wi_0" else part})
