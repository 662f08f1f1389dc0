"""The model FLOPs of any JAX function, counted on its jaxpr. Nothing is run, nothing compiled."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mfu_jax.flops import _jax_internals, linalg_rules  # noqa: F401  (registers its rules)
from mfu_jax.flops.count import FlopCount
from mfu_jax.flops.jaxpr_flow import Matmul, Tally, sort_operands
from mfu_jax.flops.jaxpr_walk import Walker


@dataclass(frozen=True, kw_only=True)
class TracedCount(FlopCount):
    """Matmul FLOPs (2·m·n·k each) of one call of a JAX function, over all devices.

    `total` is the model: `forward` + `backward`, what runs without any `jax.checkpoint` and without
    dead code, every attention pair counted (convention ``dense``). The splits sum to it.
    Apart from it stand `rematerialized`, what the function's checkpoints add to that, and
    `optimizer`, matmuls on gradients (of Muon, say).

    Attributes:
        weights: the part of `total` where an operand is a parameter, and their gradients.
        activations: the part where both operands are activations: attention scores and values.
        by_primitive: `total` by JAX primitive (``dot_general``).
    """

    weights: int = 0
    activations: int = 0
    by_primitive: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Model FLOPs: forward + backward."""
        return self.forward + self.backward


def count_model_flops(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> TracedCount:
    """Counts the matmul FLOPs of ``fn(*args, **kwargs)`` from its jaxpr.

    Args:
        fn: a function, plain or jitted: a whole training step, a loss, its gradient.
        *args: its arguments; `jax.ShapeDtypeStruct`s (and trees of them) are enough.
        **kwargs: the same, by name.

    Returns:
        A `TracedCount` for one call, over all devices, in exact ints. What has no known count is
        in its `unaccounted`.

    Raises:
        mfu_jax.errors.UserError: `fn` cannot be traced with these arguments.

    >>> import jax, jax.numpy as jnp
    >>> def loss(w, x):
    ...     return jnp.sum(jax.checkpoint(jnp.tanh)(x @ w) ** 2)
    >>> w, x = jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((2, 8), "float32")
    >>> count = count_model_flops(jax.value_and_grad(loss), w, x)
    >>> count.forward, count.backward, count.total == 2 * (2 * 2 * 8 * 4)
    (128, 128, True)
    """
    as_written, has_checkpoints = _tally(fn, args, kwargs)
    if not has_checkpoints:
        return _summary(as_written)
    with _jax_internals.without_checkpoints():
        model, _ = _tally(fn, args, kwargs)
    count = _summary(model)
    return dataclasses.replace(
        count, rematerialized=count.rematerialized + as_written.total - model.total
    )


def pallas_kernel_flops(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, int]:
    """What one call of each Pallas kernel in ``fn(*args, **kwargs)`` executes, by kernel name.

    Grid times body, without the blocks that are known to be skipped. A name that stands for
    kernels of different cost is left out: it does not tell them apart.
    """
    walker = Walker()
    walker.count(*_jax_internals.trace(fn, args, kwargs))
    return {name: costs.pop() for name, costs in walker.kernels.items() if len(costs) == 1}


def _tally(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tally, bool]:
    """The work of one call, and whether there is a `jax.checkpoint` in it."""
    walker = Walker()
    tally = walker.count(*_jax_internals.trace(fn, args, kwargs))
    return tally, walker.saw_checkpoint


def _summary(tally: Tally) -> TracedCount:
    phases = _split(tally.flops, lambda matmul: matmul.phase)
    model = {m: flops for m, flops in tally.flops.items() if m.phase in ("forward", "backward")}
    operands = sort_operands(model)
    by_operands = _split(model, lambda matmul: operands[matmul])
    return TracedCount(
        forward=phases.get("forward", 0),
        backward=phases.get("backward", 0),
        rematerialized=phases.get("rematerialized", 0),
        optimizer=phases.get("optimizer", 0),
        other=phases.get("other", 0),
        weights=by_operands.get("weights", 0),
        activations=by_operands.get("activations", 0),
        by_scope=_split(model, lambda matmul: matmul.scope),
        by_dtype=_split(model, lambda matmul: matmul.dtype),
        by_primitive=_split(model, lambda matmul: matmul.primitive),
        unaccounted=tuple(
            dataclasses.replace(item, times=times) for item, times in tally.unaccounted.items()
        ),
    )


def _split(flops: Mapping[Matmul, int], key: Callable[[Matmul], str]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for matmul, amount in flops.items():
        sums[key(matmul)] += amount
    return dict(sums)
