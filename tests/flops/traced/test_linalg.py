"""Factorisations, solves and transforms: their textbook counts, written out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from mfu_jax.flops.traced.counting import count_model_flops
from tests.support.small_functions import shape


@pytest.mark.parametrize(
    ("fn", "argument", "expected"),
    [
        (jnp.linalg.cholesky, shape(5, 12, 12), 5 * 576),  # 12³/3
        (jax.scipy.linalg.lu_factor, shape(12, 12), 1152),  # 2·12³/3
        (jax.scipy.linalg.lu_factor, shape(20, 12), 20 * 144 - 576),
        # QR 2·20·144 − 2·12³/3, then Q [20, 12] from 12 reflectors:
        # 4·20·12·12 − 2·32·144 + 4·12³/3
        (jnp.linalg.qr, shape(20, 12), 5760 - 1152 + 11520 - 9216 + 2304),
        (lambda a: jnp.linalg.eigh(a)[0], shape(4, 4), 9 * 64),
        (jnp.linalg.eigvals, shape(4, 4), 10 * 64),
        (lambda a: jnp.linalg.svd(a, compute_uv=False), shape(3, 6, 3), 3 * (4 * 6 * 9 - 36)),
        (lambda a: jnp.linalg.svd(a, full_matrices=False), shape(6, 3), 14 * 54 + 8 * 27),
        (lambda a: jnp.linalg.svd(a), shape(3, 6), 4 * 36 * 3 + 8 * 54 + 9 * 27),
        (jnp.fft.fft, shape(7, 16, dtype=jnp.complex64), 7 * 5 * 16 * 4),
        (jnp.fft.rfft, shape(7, 16), 7 * 5 * 16 * 4 // 2),
        (lambda x: jnp.fft.irfft(x, 16), shape(7, 9, dtype=jnp.complex64), 7 * 5 * 16 * 4 // 2),
        (jnp.fft.fft2, shape(3, 8, 4, dtype=jnp.complex64), 3 * 5 * 32 * 5),
    ],
)
def test_textbook_counts(fn, argument, expected):
    count = count_model_flops(fn, argument)
    assert count.total == expected
    assert count.unaccounted == ()


# A complex multiply-add is four real ones: four times the textbook's real count.
@pytest.mark.parametrize(
    ("fn", "argument", "real"),
    [
        (jnp.linalg.cholesky, (5, 12, 12), 5 * 576),
        (jax.scipy.linalg.lu_factor, (20, 12), 20 * 144 - 576),
        (jnp.linalg.qr, (20, 12), 5760 - 1152 + 11520 - 9216 + 2304),
        (lambda a: jnp.linalg.eigh(a)[0], (4, 4), 9 * 64),
        (jnp.linalg.eigvals, (4, 4), 10 * 64),
        (lambda a: jnp.linalg.svd(a, full_matrices=False), (6, 3), 14 * 54 + 8 * 27),
        (lambda a: jax.scipy.linalg.solve_triangular(a, a), (12, 12), 12**3),
    ],
)
def test_complex_matrices_take_four_times_as_many(fn, argument, real):
    count = count_model_flops(fn, shape(*argument, dtype=jnp.complex64))
    assert (count.total, count.unaccounted) == (4 * real, ())


def test_solve_is_lu_and_two_triangular_solves():
    count = count_model_flops(jnp.linalg.solve, shape(12, 12), shape(12, 5))
    assert count.by_primitive == {"lu": 2 * 12**3 // 3, "triangular_solve": 2 * 12**2 * 5}
    assert count.unaccounted == ()
