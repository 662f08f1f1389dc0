"""The work of all iterations of a loop in a jaxpr."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mfu_jax.flops.traced.flow import Flow, Tally, either
from mfu_jax.flops.traced.loops import Decided, Runs

if TYPE_CHECKING:
    from mfu_jax.flops.traced.walk import Walker


def loop_work(
    walker: Walker,
    body: Any,
    flows: Sequence[Flow],
    consts: int,
    carries: int,
    stack: str,
    runs: Sequence[Runs],
    tally: Tally,
) -> list[Flow]:
    """Adds all iterations of a loop; returns the flows of its body's results.

    If iterations take different decisions, the flows cover all branches.

    Args:
        walker: the walk.
        body: the open jaxpr (constants, carry, slices) → (carry, slices).
        flows: flows of its inputs in the first iteration.
        consts: number of constants.
        carries: number of carry entries.
        stack: the name stack around the loop.
        runs: its iterations, grouped by their decisions.
        tally: where to add the work.
    """
    inputs = _Inputs(
        list(flows[:consts]),
        [flow.without_value() for flow in flows[consts : consts + carries]],
        list(flows[consts + carries :]),
    )
    if len(runs) == 1:
        ((decided, times, _),) = runs
        out_flows, _, work = _settle(walker, body, inputs, stack, decided)
        tally.add(work, times)
        return out_flows
    with _taking_no_decisions(walker):
        out_flows, inputs, _ = _settle(walker, body, inputs, stack, Decided())
    for decided, times, _ in runs:
        tally.add(walker.walk(body, inputs.all, stack, decided)[1], times)
    return out_flows


class _Inputs(NamedTuple):
    """Flows of the inputs of a loop's body."""

    consts: list[Flow]
    carry: list[Flow]
    slices: list[Flow]

    @property
    def all(self) -> list[Flow]:
        return [*self.consts, *self.carry, *self.slices]


def _settle(
    walker: Walker, body: Any, inputs: _Inputs, stack: str, decided: Decided
) -> tuple[list[Flow], _Inputs, Tally]:
    """Walks a loop's body with flows of the carry that hold in every iteration.

    Returns:
        The flows of the body's results and of its inputs, and the work of one run.
    """
    while True:
        out_flows, work = walker.walk(body, inputs.all, stack, decided)
        widened = [
            either(before, after) for before, after in zip(inputs.carry, out_flows, strict=False)
        ]
        if widened == inputs.carry:
            return out_flows, inputs, work
        inputs = inputs._replace(carry=widened)


@contextlib.contextmanager
def _taking_no_decisions(walker: Walker) -> Iterator[None]:
    """Follows flows through all branches and loops; the work counted meanwhile is not used."""
    before, walker.takes_decisions = walker.takes_decisions, False
    try:
        yield
    finally:
        walker.takes_decisions = before
