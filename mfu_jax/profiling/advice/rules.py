"""The closed list of causes, and the resulting advice.

Adding a cause: a rule in a file beside this one and a row of `RULES`, also of `_OF_MANY_OPS` if it
removes ops; a host's cause is a member of `HostWork` first. A row in docs/profile.md, one more in
`test_causes_are_a_closed_list`, and a planted fault: `FAULTS` in tests/campaigns/planted/, of the
trainer or of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mfu_jax.profiling.advice import batch, elementwise, host, matmuls, work
from mfu_jax.profiling.advice.stats import LEAST, ProfileStats
from mfu_jax.profiling.attribution.step_times import MeasuredStep
from mfu_jax.verdict import NOTABLE


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One cause of lost time.

    Attributes:
        cause: its name, from a closed list.
        evidence: the numbers that show it.
        remedy: what to do, with the reference trainer's key, a flag or a function, where one does.
        gain_seconds: by how much a step is expected to be shorter without it.
    """

    cause: str
    evidence: str
    remedy: str
    gain_seconds: float


Evidence = tuple[float, str]
"""Gain in seconds per step, and the evidence."""


class CauseRule(NamedTuple):
    """How a cause is found, and what to do about it: text, or made of the numbers and the gain."""

    find: Callable[[ProfileStats], Evidence | None]
    remedy: str | Callable[[ProfileStats, float], str]


RULES: Mapping[str, CauseRule] = {
    "host-bound loop": CauseRule(
        host.host_bound,
        lambda stats, _: (
            f"the loop's own work in another thread, or less often ({_log_period(stats)})"
        ),
    ),
    "slow data": CauseRule(host.slow_data, "prefetch batches in other threads or processes"),
    "host-to-device transfer": CauseRule(
        host.transfer, "jax.device_put(batch, sharding) a step ahead, or in the loader's thread"
    ),
    "sync in the loop": CauseRule(
        host.sync,
        lambda stats, _: f"read values of the step before, or less often ({_log_period(stats)})",
    ),
    "recompiles": CauseRule(
        host.recompiles,
        "JAX_EXPLAIN_CACHE_MISSES=1 names the argument that changes",
    ),
    "unscanned dispatch": CauseRule(
        host.dispatch, "one jit around the whole step, scan_layers=true, or jax.lax.scan over steps"
    ),
    "eval in the loop": CauseRule(work.evaluation, work.rarer_evaluation),
    "host callback in the step": CauseRule(
        work.callback, "return the values, in place of pure_callback, io_callback or debug.print"
    ),
    "remat heavier than memory needs": CauseRule(work.remat, work.lighter_remat),
    "small batch": CauseRule(batch.small_batch, batch.larger_batch),
    "float32 matmuls": CauseRule(matmuls.float32, "dtype=bfloat16 of all operands"),
    "padding of odd shapes": CauseRule(matmuls.odd_shapes, matmuls.even_sizes),
    "attention without a kernel": CauseRule(
        matmuls.attention, "attention=auto: cudnn_flash on NVIDIA, splash on TPU"
    ),
    "unfused elementwise chain": CauseRule(
        elementwise.chain,
        "no optimization_barrier, checkpoint or callback between these ops",
    ),
    "logits in float32": CauseRule(elementwise.logits, "num_vocab_tiling=8, or logits in bfloat16"),
    "exposed all-gather": CauseRule(work.all_gather, work.fewer_shards),
    "imbalance between devices": CauseRule(
        work.imbalance, "divide the work evenly, or look at that device's clock and neighbours"
    ),
}

_LESS_OFTEN = 100  # steps: less than a hundredth of the work, and still a point every minute

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
    for cause, (find, remedy) in RULES.items():
        if finding := find(stats):
            gain = finding[0] * (stats.gaps if cause in _OF_MANY_OPS else 1)
            if gain >= least_gain(stats.measured) * stats.step:
                text = remedy if isinstance(remedy, str) else remedy(stats, gain)
                yield Advice(cause=cause, evidence=finding[1], remedy=text, gain_seconds=gain)


def _log_period(stats: ProfileStats) -> str:
    now = stats.settings.get("log_period", "")
    return f"log_period={max(_LESS_OFTEN, 10 * int(now) if now.isdecimal() else 0)}"


def least_gain(measured: MeasuredStep) -> float:
    """The smallest gain worth advice, as a fraction of a step; a CPU's times are noisier."""
    return LEAST if measured.platform == "cpu" else NOTABLE
