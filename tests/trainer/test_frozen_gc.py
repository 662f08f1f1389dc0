"""What the garbage collector looks at during training."""

from __future__ import annotations

import gc

import pytest

from mfu_jax.trainer.loop import frozen_gc


@pytest.mark.full
def test_the_collector_leaves_alone_what_was_there_before() -> None:
    old = [[]]
    with frozen_gc() as freeze:
        assert any(one is old for one in gc.get_objects())
        freeze()
        assert not any(one is old for one in gc.get_objects())
        new = [[]]
        assert any(one is new for one in gc.get_objects())
    assert any(one is old for one in gc.get_objects())


def a_loop_that_raises() -> None:
    with frozen_gc() as freeze:
        freeze()
        raise KeyError


@pytest.mark.full
def test_a_loop_that_raises_gives_everything_back() -> None:
    with pytest.raises(KeyError):
        a_loop_that_raises()
    assert gc.get_freeze_count() == 0
