"""What the garbage collector looks at during training."""

from __future__ import annotations

import gc

import pytest

from mfu_jax.trainer.settled_heap import settled_heap


def test_the_collector_leaves_alone_what_was_there_before() -> None:
    old = [[]]
    with pytest.raises(KeyError), settled_heap():
        assert not any(one is old for one in gc.get_objects())
        new = [[]]
        assert any(one is new for one in gc.get_objects())
        raise KeyError
    assert any(one is old for one in gc.get_objects())
    assert gc.get_freeze_count() == 0
