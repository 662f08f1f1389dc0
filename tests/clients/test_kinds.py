"""Kinds of training loops: each stays as it was, its FLOPs are right, no word is said in vain."""

from __future__ import annotations

import logging

import jax
import numpy as np
import pytest

from tests.support.client import Bare, Client, Observed, run_loop
from tests.support.client_loops import CLIENTS


@pytest.mark.full
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_loop_is_observed_and_stays_as_it_was(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip(client.package)
    bare = run_loop(client.loop, Bare())
    observer = Observed(shares_logger=client.shares_logger, peak_tflops_per_device=1)
    with caplog.at_level(logging.WARNING, logger="mfu_jax"):
        ours = run_loop(client.loop, observer)
        observer.close()

    for left, right in zip(bare.outputs, ours.outputs, strict=True):
        jax.tree.map(np.testing.assert_array_equal, left, right)
    assert not bare.settled - ours.settled
    assert sum((ours.settled - bare.settled).values()) <= client.views
    for step, (left, right) in enumerate(zip(bare.alive, ours.alive, strict=True)):
        extra = right - left
        assert not left - right
        assert all(np.prod(shape) <= jax.device_count() for shape, _ in extra), (step, extra)

    flops = [step.flops for step in observer.steps]
    assert sum(f.model.per_device for f in flops) == client.flops
    assert sum(f.executed.total for f in flops) == client.flops
    assert [f.ledger.residual for f in flops] == [0] * len(flops)
    records = observer.memory.records
    assert len(records) == len(bare.outputs)
    assert {flag for record in records for flag in record.flags} == set()
    assert [note for record in records if record.kind == "step" for note in record.notes] == []
    assert [record.getMessage() for record in caplog.records] == []


def test_the_list_names_at_least_twenty_two_kinds() -> None:
    assert len({client.name for client in CLIENTS}) == len(CLIENTS) >= 22
