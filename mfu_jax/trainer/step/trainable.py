"""Which weights a step trains: all, all but `frozen`, or only adapters."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flax import nnx

from mfu_jax.errors import UserError, nearest
from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.util.yaml_files import read_mapping

_ADAPTERS = ("lora_a", "lora_b")
_TOWER = "vision_encoder"


@functools.cache
def _tables() -> Mapping[str, Any]:
    return read_mapping(Path(__file__).with_name("trainable.yml"))


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
    tied = {"head", "logits"} if config.logits_via_embedding else set()
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
    text = "/".join(map(str, path))
    names = _tables()["names"] | ({} if gated else {"wi_0": "wi"})
    for pattern, words in _tables()["weights"].items():
        if found := re.fullmatch(pattern, text):
            part = found.groupdict().get("part", "")
            return frozenset(names.get(part, part) if word == "*" else word for word in words)
    return frozenset()
