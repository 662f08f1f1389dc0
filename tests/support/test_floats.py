"""The float comparison accepts another order of summation, and nothing that a bug would do."""

import numpy as np
import pytest

from tests.support.floats import assert_close_as_float32, assert_differs_by_rounding

TERMS = 1024
RNG = np.random.default_rng(0)
A = RNG.normal(size=(16, TERMS)).astype(np.float32)
B = RNG.normal(size=(TERMS, 16)).astype(np.float32)
EXACT = A.astype(np.float64) @ B.astype(np.float64)


def one_term_after_another() -> np.ndarray:
    total = np.zeros((16, 16), np.float32)
    for k in range(TERMS):
        total += A[:, k, None] * B[None, k]
    return total


def test_any_order_of_summation_is_accepted() -> None:
    assert_close_as_float32(one_term_after_another(), EXACT, terms=TERMS)
    assert_close_as_float32({"a": [A @ B]}, {"a": [EXACT]}, terms=TERMS)


@pytest.mark.parametrize("element", [(0, 0), np.unravel_index(np.abs(EXACT).argmin(), (16, 16))])
def test_one_element_off_by_a_thousandth_of_the_largest_is_caught(element: tuple[int, int]) -> None:
    planted = A @ B
    planted[element] += 1e-3 * np.abs(EXACT).max()
    with pytest.raises(AssertionError):
        assert_close_as_float32(planted, EXACT, terms=TERMS)


def test_a_dropped_term_is_caught() -> None:
    with pytest.raises(AssertionError):
        assert_close_as_float32(A[:, 1:] @ B[1:], EXACT, terms=TERMS)


def test_each_leaf_is_held_to_its_own_largest_element() -> None:
    small = np.array([1e-3, 1.1e-3])
    with pytest.raises(AssertionError):
        assert_close_as_float32([EXACT, small * 1.001], [EXACT, small], terms=TERMS)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_nan_and_infinity_are_caught(wrong: float) -> None:
    with pytest.raises(AssertionError):
        assert_close_as_float32(np.array([1.0, wrong]), np.array([1.0, 1.0]), terms=TERMS)
    with pytest.raises(AssertionError):
        assert_close_as_float32(np.array([1.0, 2.0]), np.array([1.0, wrong]), terms=TERMS)


def test_another_tree_is_caught() -> None:
    with pytest.raises(AssertionError):
        assert_close_as_float32([EXACT], [EXACT, EXACT], terms=TERMS)
    with pytest.raises(AssertionError):
        assert_close_as_float32(1.0, np.ones(3), terms=TERMS)


def with_nearly_equal_numbers(weights: np.ndarray) -> np.ndarray:
    """[2, 16]: two rows of a product, the second divided by a small difference of weights."""
    rows = (weights @ B)[:2]
    return np.stack([rows[0], rows[1] / (weights[2, 1] - weights[2, 0])])


def test_a_row_that_amplifies_rounding_may_be_off_by_more() -> None:
    weights = A.copy()
    weights[2, :2] = 1, np.float32(1.001)
    exact = with_nearly_equal_numbers(weights.astype(np.float64))
    moved = np.array([[0.0], [1e-4 * np.abs(exact[1]).max()]])
    assert_differs_by_rounding(with_nearly_equal_numbers, weights, exact + moved)
    with pytest.raises(AssertionError):
        assert_differs_by_rounding(with_nearly_equal_numbers, weights, exact + 1e-1 * moved[1])


def test_another_result_is_no_rounding() -> None:
    with pytest.raises(AssertionError):
        assert_differs_by_rounding(lambda a: a[:, 1:] @ B[1:], A, EXACT)
