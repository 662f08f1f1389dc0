"""Trains the reference model and logs MFU and HFU of every step.

usage: mfu-jax train [FILE.yml] [key=value …]

The same as python -m mfu_jax.train. Without a file it trains configs/demo.yml; configs/base.yml
lists every key with its default; model=NAME is short for model_name=NAME.

example: mfu-jax train model=llama2-7b scale=tiny steps=20"""

from __future__ import annotations

from collections.abc import Sequence

from mfu_jax.util.optional_deps import TRAIN, require


def main(argv: Sequence[str]) -> int:
    """Trains; see `mfu_jax.train`."""
    for part in ("flax", "optax", "orbax.checkpoint"):
        require(part, "the trainer", install=TRAIN)
    from mfu_jax.train import main as train

    return train(argv)
