"""What is said of two calls that ran different programs."""

from typing import Any

import jax
import pytest

from mfu_jax.instrumentation.signatures import Signature

X = jax.ShapeDtypeStruct((8, 4), "float32")


def step(x: Any, n: int = 1, m: int = 1) -> None: ...


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (((X, 2), {}), ((X,), {"n": 2}), "n: now given by name"),
        (((X,), {"n": 2}), ((X, 2), {}), "n: now given by position"),
        (((X, 2, 3), {}), ((X,), {"n": 2, "m": 3}), "m, n: now given by name"),
        ((([X],), {}), (((X,),), {}), "a static field of an argument, or the kind of a container"),
    ],
)
def test_the_same_leaves_given_differently_are_told_apart(
    before: tuple[Any, Any], after: tuple[Any, Any], told: str
) -> None:
    one, two = (Signature.of(step, args, kwargs) for args, kwargs in (before, after))
    (line,) = one.differences(two)
    assert line.startswith(told)
    assert one.differences(one) == []
