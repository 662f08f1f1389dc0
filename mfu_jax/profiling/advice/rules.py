"""The closed list of causes, and the resulting advice.

Adding a cause: a rule in a file beside this one, listed here, and a fault in
scripts/campaigns/faults/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from mfu_jax.profiling.advice import batch, devices, elementwise, host, matmuls, work
from mfu_jax.profiling.advice.stats import LEAST, Advice, Facts

Finding = tuple[float, str]
"""Gain in seconds per step, and the evidence."""

RULES: Mapping[str, Callable[[Facts], Finding | None]] = {
    "host-bound loop": host.host_bound,
    "slow data": host.slow_data,
    "sync in the loop": host.sync,
    "recompiles": host.recompiles,
    "unscanned dispatch": host.dispatch,
    "eval in the loop": work.evaluation,
    "host callback in the step": work.callback,
    "remat heavier than memory needs": work.remat,
    "small batch": batch.small_batch,
    "float32 matmuls": matmuls.float32,
    "padding of odd shapes": matmuls.odd_shapes,
    "attention without a kernel": matmuls.attention,
    "unfused elementwise chain": elementwise.chain,
    "logits in float32": elementwise.logits,
    "exposed all-gather": devices.all_gather,
    "imbalance between devices": devices.imbalance,
}

# These gain by removing or shortening ops, so the gaps between ops shrink as well.
_OF_MANY_OPS = (
    "small batch",
    "remat heavier than memory needs",
    "attention without a kernel",
    "unfused elementwise chain",
)


def advice_for(facts: Facts) -> tuple[Advice, ...]:
    """The causes with strong evidence, largest gain first."""
    return tuple(sorted(_advice(facts), key=lambda advice: -advice.gain_seconds))


def _advice(facts: Facts) -> Iterator[Advice]:
    for cause, rule in RULES.items():
        if finding := rule(facts):
            gain = finding[0] * (facts.gaps if cause in _OF_MANY_OPS else 1)
            if gain >= LEAST * facts.step:
                yield Advice(cause=cause, evidence=finding[1], gain_seconds=gain)
