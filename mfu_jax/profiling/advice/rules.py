"""The closed list of causes, and the resulting advice.

Adding a cause: a rule in a file beside this one and a row of `RULES`, also of `_OF_MANY_OPS` if it
removes ops; a host's cause is a member of `HostWork` first. A row in docs/profile.md, one more in
`test_causes_are_a_closed_list`, and a planted fault: `FAULTS` in tests/campaigns/planted/, of the
trainer or of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from mfu_jax.profiling.advice import batch, elementwise, host, matmuls, work
from mfu_jax.profiling.advice.stats import LEAST, ProfileStats


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One cause of lost time.

    Attributes:
        cause: its name, from a closed list.
        evidence: the numbers that show it, and the usual remedy.
        gain_seconds: by how much a step is expected to be shorter without it.
    """

    cause: str
    evidence: str
    gain_seconds: float


Evidence = tuple[float, str]
"""Gain in seconds per step, and the evidence."""

RULES: Mapping[str, Callable[[ProfileStats], Evidence | None]] = {
    "host-bound loop": host.host_bound,
    "slow data": host.slow_data,
    "host-to-device transfer": host.transfer,
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
    "exposed all-gather": work.all_gather,
    "imbalance between devices": work.imbalance,
}

# These gain by removing or shortening ops, so the gaps between ops shrink as well.
_OF_MANY_OPS = (
    "small batch",
    "remat heavier than memory needs",
    "attention without a kernel",
    "unfused elementwise chain",
)


def advice_for(stats: ProfileStats) -> tuple[Advice, ...]:
    """The causes with strong evidence, largest gain first."""
    return tuple(sorted(_advice(stats), key=lambda advice: -advice.gain_seconds))


def _advice(stats: ProfileStats) -> Iterator[Advice]:
    for cause, rule in RULES.items():
        if finding := rule(stats):
            gain = finding[0] * (stats.gaps if cause in _OF_MANY_OPS else 1)
            if gain >= LEAST * stats.step:
                yield Advice(cause=cause, evidence=finding[1], gain_seconds=gain)
