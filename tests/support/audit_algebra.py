"""More programs that try to fool the counters: linear algebra, long sums, folded transposes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tests.support.audit_programs import SQUARE, Audit, B, D

W = jax.ShapeDtypeStruct((D, D), jnp.float32)
X = jax.ShapeDtypeStruct((B, D), jnp.float32)
LONG = 4096
ROOTS = 3


def _loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def natural_gradient(w, a, x):
    """XLA gives the gradient's matmul the name of a transpose in the solve."""
    value, g = jax.value_and_grad(_loss)(w, x)
    a = 0.9 * a + x.T @ x
    return w - jnp.linalg.solve(a + jnp.eye(D), g), a, value


def transposed_gradient(w, x):
    value, g = jax.value_and_grad(_loss)(w, x)
    return g.T, value


def muon_of_a_transposed_gradient(w, x):
    """Products of gradients are the optimizer's, whatever XLA names them."""
    value, g = jax.value_and_grad(_loss)(w, x)
    return w - 0.1 * ((g @ g.T).T @ g).T, value


def spectral_norm(w, u, x):
    """Weights over their largest singular value, by one step of power iteration, differentiated.

    CPU programs give some of its gradients no name; the update is their nearest user.
    """

    def normalised(v):
        return v / jnp.sqrt((v**2).sum(-1, keepdims=True) + 1e-12)

    def loss(w):
        v = normalised(u @ w.T)
        after = normalised(v @ w)
        return jnp.mean((x @ (w / (v @ w @ after.T)[0, 0])) ** 2), after

    (value, after), g = jax.value_and_grad(loss, has_aux=True)(w)
    return w - 0.1 * g, after, value


def gradient_with_respect_to_inputs_twice(w, x):
    """A Hessian of one row x: D tangents forward, D cotangents backward."""
    return jax.hessian(lambda row: jnp.sum(jnp.tanh(jnp.tanh(row @ w) @ w)))(x[0])


def adversaries(generator, critic, z, real):
    """CPUs name no product with a vector; what uses it is a fusion named for its last step."""

    def criticised(critic, x):
        return jnp.mean(jax.nn.softplus(x @ critic))

    def made(generator):
        return jnp.tanh(z @ generator)

    of_critic = jax.grad(lambda c: criticised(c, made(generator)) - criticised(c, real))(critic)
    of_generator = jax.grad(lambda g: criticised(critic, made(g)))(generator)
    return generator - of_generator, critic - of_critic


def long_sum(x, y):
    """CPUs sum windows first, under no name, and their sums under the matmul's."""
    return jnp.vdot(x, y)


def full_contraction(x, y):
    return jnp.einsum("bi,bi->", x, y)


def roots(a):
    """A factor's triangle is no causal mask over the factorisation."""
    return jnp.linalg.cholesky(a @ a.swapaxes(1, 2) + jnp.eye(D))


def inverse_of_a_triangle_of_products(k, v):
    """Chunked delta rule: a mask over the scores k·k, and a solve with what it keeps."""
    scores = jnp.tril(jnp.einsum("bid,bjd->bij", k, k), -1) + jnp.eye(D)
    return jax.scipy.linalg.solve_triangular(scores, v, lower=True)


PADDED = 4


def padded_by_the_user(w, x):
    """Zeros and results that the step itself adds and drops are the model's, not XLA's."""

    def loss(w, x):
        rows = jnp.pad(x, ((0, PADDED), (0, PADDED)))
        return jnp.sum(jnp.tanh((rows @ w)[:B, : D - PADDED]))

    return jax.value_and_grad(loss, argnums=(0, 1))(w, x)


def _of(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


_VECTOR, _CRITIC = 2 * D * D, 2 * B * D
ALGEBRA: dict[str, Audit] = {
    "natural_gradient": Audit(
        natural_gradient, (W, W, X), forward=SQUARE, backward=SQUARE,
        # x.T @ x, LU rounded down, and two triangular solves with D right-hand sides.
        optimizer=2 * D * D * B + 2 * D**3 // 3 + 2 * D**3,
    ),
    "transposed_gradient": Audit(transposed_gradient, (W, X), forward=SQUARE, backward=SQUARE),
    "muon_of_a_transposed_gradient": Audit(
        muon_of_a_transposed_gradient, (W, X),
        forward=SQUARE, backward=SQUARE, optimizer=2 * 2 * D**3,
    ),
    "gradient_with_respect_to_inputs_twice": Audit(
        gradient_with_respect_to_inputs_twice, (W, X),
        # Two products of the row and of its D tangents; backward, the first layer's cotangent needs
        # one product of the row, and both layers' D tangents one each.
        forward=2 * _VECTOR + 2 * D * _VECTOR, backward=_VECTOR + 2 * D * _VECTOR,
    ),
    "padded_by_the_user": Audit(
        padded_by_the_user, (_of(D + PADDED, D), X),
        forward=2 * (B + PADDED) * (D + PADDED) * D,
        backward=2 * 2 * (B + PADDED) * (D + PADDED) * D,
    ),
    # What is made, and what the critic says of it, is the same for both: it runs once.
    "adversaries": Audit(
        adversaries, (W, _of(D, 1), X, X),
        forward=2 * SQUARE + 3 * _CRITIC, backward=SQUARE + 3 * _CRITIC,
        removed=SQUARE + _CRITIC,
    ),
    "long_sum": Audit(long_sum, (_of(LONG), _of(LONG)), forward=2 * LONG),
    "full_contraction": Audit(full_contraction, (_of(B, D), _of(B, D)), forward=2 * B * D),
    # n³ / 3 each, rounded down.
    "roots": Audit(roots, (_of(ROOTS, D, D),), forward=ROOTS * (2 * D**3 + D**3 // 3)),
    "inverse_of_a_triangle_of_products": Audit(
        inverse_of_a_triangle_of_products, (_of(ROOTS, D, D), _of(ROOTS, D, D)),
        forward=ROOTS * 2 * D**3 + ROOTS * D**3,
    ),
}  # fmt: skip
