"""The step over eight devices: the losses of one, and its FLOPs but for named lines."""

import pytest

from tests.campaigns.meshes import (
    KINDS,
    MESHES,
    SAMPLE,
    STEPS_OF_A_TEST,
    TOKENS,
    extra,
    one_device,
    trained,
)
from tests.support.floats import assert_close_as_float32


@pytest.mark.full
@pytest.mark.parametrize(("kind", "axes"), SAMPLE)
def test_a_mesh_trains_as_one_device(kind: str, axes: str) -> None:
    losses, flops = trained({**KINDS[kind], **MESHES[axes]}, 8)
    expected, of_one = one_device(kind)
    assert_close_as_float32(losses, expected, terms=STEPS_OF_A_TEST * TOKENS)
    more = extra(kind, axes)
    assert flops.executed.total * 8 == of_one.executed.total + sum(more.values())
    bubble = sum(line.flops for line in flops.ledger.lines if line.label == "pipeline bubble")
    assert bubble > 0 or "pipeline" not in axes
    assert flops.ledger.residual == of_one.ledger.residual == 0
