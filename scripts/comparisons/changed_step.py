"""Compiles the reference trainer's step with a change that no config key makes.

    python -m scripts.comparisons.changed_step REQUEST.json OUT.mfu

As `mfu_jax.trainer.planned.planned_step`, whose requests it reads; `config.change` is a key of
`CHANGES`. `scripts/comparisons/maxtext_step.py` starts it, to show the effect of each saving.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax.ad_checkpoint import checkpoint_name
from mfu_jax.layers.feed_forward import mlp
from mfu_jax.layers.projections import linears

from mfu_jax.trainer.planned import planned_step
from mfu_jax.trainer.step import train_step as step


class _FusedMlp(linears.Mlp):
    """A gated MLP whose first two products are one."""

    def __init__(self, build: Any, hidden: int, activations: Any, *, use_bias: bool) -> None:
        super().__init__(build, hidden, activations, use_bias=use_bias)
        del self.wi_0, self.wi_1
        axes = ("embed", "qkv", "mlp")  # a separate dimension, which is not split
        self.wi = build.dense((build.emb_dim,), (2, hidden), axes, bias=use_bias)

    def __call__(self, x: jax.Array, inputs: Any = None) -> jax.Array:
        both = checkpoint_name(self.wi(x), "mlpwi_0")
        first, second = (linears.ACTIVATIONS[name] for name in self.activations)
        hidden = first(both[..., 0, :]) * second(both[..., 1, :])
        return checkpoint_name(self.wo(hidden), "mlpwo")


def _without_donation(function: Any, *, donate_argnums: Any = (), **options: Any) -> Any:
    return _JIT(function, **options)


_JIT = jax.jit
CHANGES: dict[str, Callable[[], Any]] = {
    "no donation": lambda: mock.patch.object(step.jax, "jit", _without_donation),
    "fused MLP": lambda: mock.patch.object(mlp, "Mlp", _FusedMlp),
}


def main(argv: list[str]) -> None:
    """Compiles the requested step with its change, and writes the dump."""
    change = json.loads(Path(argv[0]).read_text(encoding="utf-8"))["config"]["change"]
    lower = planned_step.lower

    @functools.wraps(lower)
    def changed(*args: Any) -> Any:
        with CHANGES[change]():
            return lower(*args)

    with mock.patch.object(planned_step, "lower", changed):
        planned_step.main(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
