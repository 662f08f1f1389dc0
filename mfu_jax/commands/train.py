"""`mfu-jax train [FILE.yml] key=value …`: the same as ``python -m mfu_jax.train``."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Trains; see `mfu_jax.train`."""
    from mfu_jax.train import main as train

    return train(arguments)
