"""Control flow, devices, dtypes: the traced count of small programs, written out by hand."""

from __future__ import annotations

import functools
import threading
from concurrent import futures

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import sparse

from mfu_jax.errors import UserError
from mfu_jax.flops.traced import tracing
from mfu_jax.flops.traced.counting import count_model_flops
from mfu_jax.util import jax_internals
from tests.support.jax_versions import has_scaled_dot
from tests.support.small_functions import FIRST, SECOND, TWO_LAYERS, B, D, F, shape


def test_muon_belongs_to_the_optimizer():
    def step(w, x):
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
        for _ in range(5):
            gradient = 1.5 * gradient - 0.5 * gradient @ (gradient.T @ gradient)
        return w - gradient

    count = count_model_flops(step, shape(D, F), shape(B, D))
    assert count.total == 2 * (2 * B * D * F)
    assert count.optimizer == 5 * (2 * F * D * F + 2 * D * F * F)


def test_while_loops():
    def repeat(bound, x, w):
        return jax.lax.while_loop(
            lambda c: c[0] < bound, lambda c: (c[0] + 2, jnp.tanh(c[1] @ w)), (1, x)
        )[1]

    w = shape(D, D)
    one = 2 * B * D * D
    count = count_model_flops(lambda x, w: repeat(10, x, w), shape(B, D), w)
    assert count.total == 5 * one  # 1, 3, 5, 7, 9
    assert count.unaccounted == ()
    dynamic = count_model_flops(repeat, shape(dtype=jnp.int32), shape(B, D), w)
    assert dynamic.total == one
    (item,) = dynamic.unaccounted
    assert item.name == "while"
    assert "trip count depends on data" in item.reason


def test_fori_loop_counts_down_and_up():
    def loop(x, w):
        x = jax.lax.fori_loop(3, 10, lambda i, x: jnp.tanh(x @ w), x)
        down = (jnp.int32(9), x)
        return jax.lax.while_loop(lambda c: c[0] >= 2, lambda c: (c[0] - 3, c[1] @ w), down)[1]

    count = count_model_flops(loop, shape(B, D), shape(D, D))
    assert count.total == (7 + 3) * 2 * B * D * D  # 3…9, and 9, 6, 3
    assert count.unaccounted == ()


def test_cond_counts_the_most_expensive_branch_and_says_so():
    def fn(flag, x, w):
        return jax.lax.cond(flag, lambda: x @ w @ w, lambda: x @ w)

    count = count_model_flops(fn, shape(dtype=jnp.bool_), shape(B, D), shape(D, D))
    assert count.total == 2 * 2 * B * D * D
    (item,) = count.unaccounted
    assert item.name == "cond"


def test_switch_with_equal_branches_needs_no_word():
    def fn(index, x, w):
        return jax.lax.switch(index, [lambda: x @ w, lambda: jnp.tanh(x) @ w.T])

    count = count_model_flops(fn, shape(dtype=jnp.int32), shape(B, D), shape(D, D))
    assert count.total == 2 * B * D * D
    assert count.unaccounted == ()


def test_what_is_not_known_is_listed():
    def fn(x):
        return jax.pure_callback(lambda x: x, shape(B, D), x @ x.T @ x)

    count = count_model_flops(fn, shape(B, D))
    assert count.total == 2 * 2 * B * B * D
    (item,) = count.unaccounted
    assert item.name == "pure_callback"


def test_dead_code_is_not_counted():
    """A hand-written gradient has no use for the half of it that nobody asked for."""

    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))

    def loss(w, x):
        unused = x @ w @ w.T  # noqa: F841
        return jnp.sum(product(x, w) ** 2)

    count = count_model_flops(jax.value_and_grad(loss), shape(D, F), shape(B, D))
    assert (count.forward, count.backward) == (FIRST, FIRST)


def test_shard_map_is_multiplied_by_its_devices():
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "tensor"), axis_types=auto)
    spec = jax.sharding.PartitionSpec
    product = jax.shard_map(
        lambda x, w: jax.lax.psum(x @ w, "tensor"),
        mesh=mesh,
        in_specs=(spec("data", "tensor"), spec("tensor", None)),
        out_specs=spec("data", None),
    )

    def loss(w, x):
        return jnp.sum(product(x, w) ** 2)

    count = count_model_flops(jax.value_and_grad(loss, (0, 1)), shape(8, 6), shape(16, 8))
    assert count.forward == 2 * 16 * 8 * 6
    assert count.backward == 2 * count.forward


def test_pmap_is_multiplied_by_its_devices():
    devices = jax.device_count()
    count = count_model_flops(
        jax.pmap(lambda x, w: x @ w, in_axes=(0, None)), shape(devices, B, D), shape(D, F)
    )
    assert count.total == devices * FIRST


def test_low_precision_matmuls_are_split_by_dtype():
    def fn(a, b, c):
        eight = jax.lax.dot(a, b, preferred_element_type=jnp.bfloat16)
        return eight @ c + jax.lax.dot(
            c[:4].astype(jnp.int8), c.astype(jnp.int8), preferred_element_type=jnp.int32
        )

    a, b = shape(4, 8, dtype=jnp.float8_e4m3fn), shape(8, 4, dtype=jnp.float8_e4m3fn)
    count = count_model_flops(fn, a, b, shape(4, 4, dtype=jnp.bfloat16))
    assert count.by_dtype == {"f8e4m3fn": 2 * 4 * 8 * 4, "bf16": 2 * 4**3, "s8": 2 * 4**3}


@has_scaled_dot
def test_scaled_dots():
    eight = functools.partial(shape, dtype=jnp.float8_e4m3fn)
    scale = functools.partial(shape, dtype=jnp.float8_e8m0fnu)
    scaled = count_model_flops(
        lambda a, b, s, t: jax.lax.scaled_dot(a, b, lhs_scale=s, rhs_scale=t),
        *(eight(2, 4, 64), eight(2, 64, 8), scale(2, 4, 2), scale(2, 2, 8)),
    )
    nn = count_model_flops(
        jax.nn.scaled_matmul, eight(2, 4, 64), eight(2, 8, 64), scale(2, 4, 2), scale(2, 8, 2)
    )
    assert scaled.by_dtype == nn.by_dtype == {"f8e4m3fn": 2 * 2 * 4 * 64 * 8}


@pytest.mark.parametrize(
    ("form", "indices"), [(sparse.BCOO, [(20, 2)]), (sparse.BCSR, [(20,), (17,)])]
)
def test_a_sparse_product_multiplies_what_is_stored(form, indices):
    stored, rows, columns = 20, 16, 8
    places = [shape(*sizes, dtype=jnp.int32) for sizes in indices]

    def loss(values, places, x):
        return jnp.sum(jnp.tanh(form((values, *places), shape=(rows, rows)) @ x))

    count = count_model_flops(
        jax.value_and_grad(loss, (0, 2)), shape(stored), places, shape(rows, columns)
    )
    # Both gradients are as large: a product at the stored places, and one with the transposed.
    assert (count.forward, count.backward) == (2 * stored * columns, 2 * 2 * stored * columns)
    assert not count.unaccounted


def test_static_arguments():
    def power(x, n):
        for _ in range(n):
            x = x @ x
        return x

    for fn in (power, jax.jit(power, static_argnums=1)):
        assert count_model_flops(fn, shape(D, D), 3).total == 3 * 2 * D**3


def test_a_whole_optax_step_leaves_nothing_unaccounted():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def loss(w, x, key):
        hidden = jax.nn.relu(x @ w["a"])
        hidden = jnp.where(jax.random.bernoulli(key, 0.9, hidden.shape), hidden / 0.9, 0)
        return optax.squared_error(hidden @ w["b"]).mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(w, state, x, key):
        value, gradient = jax.value_and_grad(loss)(w, x, key)
        updates, state = optimizer.update(gradient, state, w)
        return optax.apply_updates(w, updates), state, value

    state = jax.eval_shape(optimizer.init, TWO_LAYERS)
    key = jax.eval_shape(lambda: jax.random.key(0))
    count = count_model_flops(step, TWO_LAYERS, state, shape(B, D), key)
    assert (count.forward, count.backward) == (FIRST + SECOND, FIRST + 2 * SECOND)
    assert count.optimizer == 0
    assert count.unaccounted == ()


@jax.checkpoint
def checkpointed_layer(w, x):
    return jnp.tanh(x @ w) @ w


def checkpointed_loss(w, x):
    return jnp.sum(checkpointed_layer(w, x))


def primitives_of_gradient():
    jaxpr = jax.make_jaxpr(jax.grad(checkpointed_loss))(jnp.ones((D, D)), jnp.ones((B, D)))
    return {eqn.primitive.name for eqn in jaxpr.eqns}


def test_checkpoints_are_ignored_on_the_counting_thread_only():
    before = primitives_of_gradient()
    seen = []
    with tracing.without_checkpoints():
        thread = threading.Thread(target=lambda: seen.append(primitives_of_gradient()))
        thread.start()
        thread.join()
        here = primitives_of_gradient()
    assert before - here == {"remat2"}
    assert seen == [before]
    assert primitives_of_gradient() == before


def test_threads_count_and_train_at_once():
    """Both counts trace while the other one does, and a third thread traces its own remat."""
    original = jax_internals.remat_p.bind
    expected = count_model_flops(jax.grad(checkpointed_loss), shape(D, D), shape(B, D))
    meeting = threading.Barrier(3)

    def meet(w, x):
        meeting.wait(timeout=60)
        loss = checkpointed_loss(w, x)
        meeting.wait(timeout=60)
        return loss

    def train():
        programs = []
        for _ in range(2):  # a count traces twice: as written, and without checkpoints
            meeting.wait(timeout=60)
            programs.append(primitives_of_gradient())
            meeting.wait(timeout=60)
        return programs

    before = primitives_of_gradient()
    with futures.ThreadPoolExecutor(3) as pool:
        arguments = shape(D, D), shape(B, D)
        counting = [pool.submit(count_model_flops, jax.grad(meet), *arguments) for _ in range(2)]
        training = pool.submit(train)
    assert [count.result().to_json() for count in counting] == [expected.to_json()] * 2
    assert "remat2" in before
    assert training.result() == [before] * 2
    assert jax_internals.remat_p.bind == original


def test_nothing_of_jax_stays_patched_after_an_exception():
    original = jax_internals.remat_p.bind
    patched = []

    def fails_without_checkpoints(w, x):
        patched.append(jax_internals.remat_p.bind != original)
        if len(patched) == 2:
            raise ValueError("no")
        return checkpointed_loss(w, x)

    with pytest.raises(UserError, match="ValueError: no"):
        count_model_flops(fails_without_checkpoints, shape(D, D), shape(B, D))
    assert patched == [False, True]
    assert jax_internals.remat_p.bind == original


def test_counting_compiles_nothing_and_leaves_the_jit_cache_alone():
    step = jax.jit(jax.value_and_grad(lambda w, x: jnp.sum(checkpointed_layer(w, x))))
    arguments = jnp.ones((D, D)), jnp.ones((B, D))
    jax.block_until_ready(step(*arguments))
    compiled = []

    def listen(event, *_, **__):
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        count = count_model_flops(step, *arguments)
        jax.block_until_ready(step(*arguments))
    finally:
        jax_internals.unregister_event_duration_listener(listen)
    assert compiled == []
    assert count.rematerialized > 0


def test_donated_arrays_are_counted_by_their_shape():
    step = jax.jit(lambda x, w: x @ w, donate_argnums=0)
    x = jnp.ones((B, D))
    x.delete()
    assert count_model_flops(step, x, jnp.ones((D, F))).total == FIRST


def test_a_typed_key_is_no_known_number():
    def f(x):
        def body(carry):
            i, key, x = carry
            return i + 1, jax.random.fold_in(key, i), x @ x

        start = (jnp.int32(0), jax.random.key(0), x)  # a key made from a constant
        return jax.lax.while_loop(lambda carry: carry[0] < 3, body, start)[2]

    assert count_model_flops(f, jnp.ones((4, 4))).total == 3 * (2 * 4 * 4 * 4)


@pytest.mark.parametrize("uses_result", [True, False])
def test_a_forward_that_may_drop_its_residuals_runs_once(uses_result):
    """`optimize_remat` puts the forward into a primitive of its own."""

    @jax.custom_vjp
    def matmul(x, w):
        return jnp.tanh(x @ w)

    def forward(x, w):
        y = jnp.tanh(x @ w)
        return y, (x, w, y if uses_result else jnp.zeros_like(y))

    def backward(saved, g):
        x, w, y = saved
        g = g * (1 - y * y)
        return g @ w.T, x.T @ g

    matmul.defvjp(forward, backward, optimize_remat=True)
    loss = jax.value_and_grad(lambda x, w: jnp.sum(matmul(x, w)), (0, 1))
    count = count_model_flops(loss, shape(B, D), shape(D, F))
    assert (count.forward, count.backward) == (2 * B * D * F, 2 * (2 * B * D * F))
    assert count.unaccounted == ()
