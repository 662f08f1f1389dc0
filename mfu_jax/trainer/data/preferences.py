"""Direct preference optimisation (DPO, arXiv 2305.18290): its pairs and its loss.

Rows of a batch are pairs: chosen, rejected, chosen, …
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The first part of a row's text is the prompt.
_PROMPT = 0.5


def preference_pair(row: np.ndarray, images: int = 0) -> dict[str, np.ndarray]:
    """A row of S + 1 tokens → a pair with the same prompt; each int32 [2, S].

    The chosen text is the actual continuation, the rejected one its tokens in random order.

    Args:
        row: [S + 1].
        images: number of image tokens, which begin the prompt.

    >>> pair = preference_pair(np.arange(10, 19))
    >>> pair["inputs"][0].tolist(), pair["inputs"][1, :4].tolist()
    ([10, 11, 12, 13, 14, 15, 16, 17], [10, 11, 12, 13])
    >>> pair["targets_weight"][1].tolist()
    [0, 0, 0, 1, 1, 1, 1, 1]
    """
    row = row.astype(np.int32)
    length = len(row) - 1
    prompt = images + int((length - images) * _PROMPT)
    order = np.random.default_rng(zlib.crc32(row.tobytes())).permutation(len(row) - prompt)
    rejected = np.concatenate([row[:prompt], row[prompt:][order]])
    rows = np.stack([row, rejected])
    places = np.broadcast_to(np.arange(length, dtype=np.int32), (2, length))
    return {
        "inputs": rows[:, :-1],
        "targets": rows[:, 1:],
        "inputs_position": places,
        "inputs_segmentation": np.ones((2, length), np.int32),
        "targets_weight": (places >= prompt - 1).astype(np.int32),
    }


def preference_loss(
    policy: jax.Array, reference: jax.Array, batch: dict[str, jax.Array], config: Any
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of each pair, and sums over the pairs of the metrics shown (equation 7).

    Args:
        policy, reference: logits of the trained and of the reference model, [2 · pairs,
            sequence, vocabulary].
        batch: [2 · pairs, sequence].
    """
    with jax.named_scope("reference"):
        before = jax.lax.stop_gradient(_log_probabilities(reference, batch))
    gained = _log_probabilities(policy, batch) - before
    rewards = config.dpo_beta * gained.reshape(-1, 2)
    margins = rewards[:, 0] - rewards[:, 1]
    smoothing = config.dpo_label_smoothing
    right, wrong = jax.nn.log_sigmoid(margins), jax.nn.log_sigmoid(-margins)
    shown = {
        "dpo_reward_margin": margins.sum(),
        "dpo_reward_accuracy": (margins > 0).sum().astype(jnp.float32),
    }
    return -(1 - smoothing) * right - smoothing * wrong, jax.lax.stop_gradient(shown)


def _log_probabilities(logits: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """Log probability of each row's targets after the prompt, [rows]."""
    vocabulary = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    of_target = jnp.where(vocabulary == batch["targets"][..., None], logits, 0).sum(-1)
    weights = batch["targets_weight"].astype(jnp.float32)
    return ((of_target - jax.nn.logsumexp(logits, axis=-1)) * weights).sum(-1)
