"""Packed documents in an instrumented step: counts each batch's own attention pairs.

The pairs are summed on the device from the step's segment ids, before the step is dispatched. The
recorder's thread reads the sums once the step has ended, so nothing waits for them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import jax

from mfu_jax.errors import UserError
from mfu_jax.flops.traced.masks.pairs import document_pairs, read_pairs
from mfu_jax.logger.records.step_cost import StepCost


@jax.jit
def _pairs_by_kind(segment_ids: Any) -> dict[str, jax.Array]:
    return {
        "documents": document_pairs(segment_ids),
        "causal_documents": document_pairs(segment_ids, causal=True),
    }


class PackedDocuments:
    """Sums the pairs of each step's batch.

    Args:
        segment_ids: a function from the step's arguments to its segment ids, [..., S] ints, 0 for
            positions without a token.
    """

    def __init__(self, segment_ids: Callable[..., Any]) -> None:
        self._segment_ids = segment_ids

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PackedBatch | None:
        """The pairs of one call, still being computed; None if JAX is tracing the call.

        Raises:
            UserError: `segment_ids` returned no array of ints, or one that spans processes.
        """
        ids = self._segment_ids(*args, **kwargs)
        if isinstance(ids, jax.core.Tracer):
            return None
        shape = getattr(ids, "shape", ())
        if not shape or jax.numpy.dtype(ids.dtype).kind not in "iu":
            raise UserError(
                f"segment_ids=… returned {type(ids).__name__} {shape}; expected an array of "
                "ints, [batch, sequence]",
                hint="usually the whole batch was returned; return its segment ids",
            )
        if not getattr(ids, "is_fully_addressable", True):
            raise UserError(
                "segment_ids=… returned an array that spans processes; expected one that this "
                "process can read",
                hint="usually the global batch; use logger.record(step, metrics, cost=…) with "
                "pairs summed over processes",
            )
        return PackedBatch(_pairs_by_kind(ids), math.prod(shape) * shape[-1])


@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """The attention pairs of one batch.

    Attributes:
        pairs: by kind of mask, for `read_pairs`.
        of: all pairs, B·S².
    """

    pairs: Mapping[str, jax.Array]
    of: int

    def cost(
        self, packed: Mapping[str, int | Fraction], cost: StepCost | Callable[[], StepCost]
    ) -> StepCost:
        """The step's cost minus pairs absent from this batch; call this on the recorder's thread.

        Args:
            packed: FLOPs of one device with all pairs, by kind of mask.
            cost: the step's cost with all pairs.
        """
        whole = cost() if callable(cost) else cost
        if whole.model_flops_per_device is None:
            return whole
        saved = sum(
            flops * Fraction(self.of - read_pairs(self.pairs[kind]), self.of)
            for kind, flops in packed.items()
        )
        model = whole.model_flops_per_device - saved
        seconds = whole.optimal_model_seconds
        if seconds is not None and whole.model_flops_per_device:
            seconds *= float(model / Fraction(whole.model_flops_per_device))
        return dataclasses.replace(
            whole, model_flops_per_device=model, optimal_model_seconds=seconds
        )
