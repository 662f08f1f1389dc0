"""`tabulate` on Flax models that never named anything, against arithmetic."""

from __future__ import annotations

from concurrent import futures

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import mfu_jax
from mfu_jax.errors import UserError
from tests.support.jax_versions import has_nnx_list

B, S, D, V, H = 2, 6, 8, 10, 2
X = jax.ShapeDtypeStruct((B, S, D), jnp.float32)
TOKENS = jax.ShapeDtypeStruct((B, S), jnp.int32)

UP = 2 * B * S * D * 4 * D  # one D×4D projection of all positions
PROJECTION = 2 * B * S * D * D
PAIRS = 2 * 2 * B * S * S * D
ATTENTION = 4 * PROJECTION + PAIRS


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(D, 4 * D, rngs=rngs)
        self.down = nnx.Linear(4 * D, D, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(H, D, decode=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.mlp = Mlp(rngs)

    def __call__(self, x):
        x = x + self.dropout(self.attention(self.norm(x)))
        return x + self.mlp(x)


class Decoder(nnx.Module):
    def __init__(self, rngs, layers=2):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(layers)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(x)


def rows_of(table):
    return {row.path: row for row in table.rows}


@pytest.mark.full
@has_nnx_list
def test_nnx_modules():
    model = Decoder(nnx.Rngs(0))
    table = mfu_jax.tabulate(model, TOKENS)
    rows = rows_of(table)
    head = 2 * B * S * D * V
    block = ATTENTION + 2 * UP
    assert rows[""].forward == head + 2 * block
    assert rows[""].backward == 2 * rows[""].forward
    assert rows[""].share == 1.0
    assert rows["embed"].forward == head  # through Embed.attend
    for path in ("layers/0", "layers/1"):
        assert (rows[path].forward, rows[path].backward) == (block, 2 * block)
        assert rows[f"{path}/attention"].forward == ATTENTION
        assert rows[f"{path}/attention/query"].forward == PROJECTION
        assert rows[f"{path}/mlp/up"].backward == 2 * UP
        assert rows[f"{path}/mlp"].parameters == (D * 4 * D + 4 * D) + (4 * D * D + D)
        assert rows[f"{path}/mlp"].kind == "Mlp"
        assert rows[f"{path}/dropout"].forward == 0
    assert rows["embed"].parameters == V * D
    assert not hasattr(model.layers[0], "_mfu_jax_module")
    assert Block.__call__.__qualname__ == "Block.__call__"
    assert not hasattr(Block.__call__, "__wrapped__")


@pytest.mark.full
def test_nnx_scanned_and_rematerialised_layers():
    class Scanned(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.vmap(lambda key: Mlp(nnx.Rngs(key)))(jax.random.split(rngs(), 3))

        def __call__(self, x):
            body = nnx.remat(lambda x, layer: layer(x))
            return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)

    rows = rows_of(mfu_jax.tabulate(Scanned(nnx.Rngs(0)), X))
    assert rows["layers/up"].forward == 3 * UP
    assert rows["layers"].forward == 3 * 2 * UP
    # The first layer's input needs no gradient, but a scan does the same in every iteration.
    assert rows["layers"].backward == 3 * 4 * UP
    assert rows["layers"].parameters == 3 * ((D * 4 * D + 4 * D) + (4 * D * D + D))


def test_linen_modules():
    class LinenBlock(linen.Module):
        @linen.compact
        def __call__(self, x, train: bool):
            x = linen.BatchNorm(use_running_average=not train)(x)
            x = x + linen.MultiHeadDotProductAttention(num_heads=H, name="attention")(x)
            x = linen.Dropout(0.1, deterministic=not train)(x)
            return x + linen.Dense(D, name="down")(linen.gelu(linen.Dense(4 * D, name="up")(x)))

    class LinenModel(linen.Module):
        @linen.compact
        def __call__(self, tokens, train: bool = False):
            embed = linen.Embed(V, D, name="embed")
            x = embed(tokens)
            for i in range(2):
                x = LinenBlock(name=f"layer_{i}")(x, train)
            return embed.attend(x)

    rows = rows_of(mfu_jax.tabulate(LinenModel(), TOKENS, train=True))
    head, block = 2 * B * S * D * V, ATTENTION + 2 * UP
    assert (rows[""].forward, rows[""].backward) == (head + 2 * block, 2 * (head + 2 * block))
    assert rows["layer_1"].forward == block
    assert rows["layer_1/attention"].forward == ATTENTION
    assert rows["layer_0/up"].backward == 2 * UP
    assert rows["layer_0/up"].parameters == D * 4 * D + 4 * D
    assert rows["embed"].parameters == V * D
    assert rows["layer_0"].kind == "LinenBlock"


def test_a_function_is_shown_by_its_named_scopes():
    def loss(w, x):
        with jax.named_scope("mlp"):
            with jax.named_scope("up"):
                h = x @ w["up"]
            with jax.named_scope("down"):
                return jnp.sum(jnp.tanh(h) @ w["down"])

    up = jax.ShapeDtypeStruct((D, 4 * D), jnp.float32)
    down = jax.ShapeDtypeStruct((4 * D, D), jnp.float32)
    table = mfu_jax.tabulate(jax.value_and_grad(loss), {"up": up, "down": down}, X)
    rows = rows_of(table)
    assert (rows["mlp/up"].forward, rows["mlp/up"].backward) == (UP, UP)
    assert (rows["mlp"].forward, rows["mlp"].backward) == (2 * UP, 3 * UP)
    assert rows["mlp"].parameters is None


def test_the_printed_table():
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    text = str(mfu_jax.tabulate(model, jax.ShapeDtypeStruct((2, 8), jnp.float32)))
    head, _, row = text.splitlines()
    assert head.split() == ["path", "module", "parameters", "forward", "FLOPs", "backward",
                            "FLOPs", "share"]  # fmt: skip
    assert row.split() == ["(model)", "Linear", "36", "128", "128", "100.0%"]


def test_classes_are_as_before_after_two_threads_and_an_exception():
    original = Mlp.__call__
    model = Mlp(nnx.Rngs(0))
    with futures.ThreadPoolExecutor(2) as pool:
        tables = list(pool.map(lambda _: mfu_jax.tabulate(model, X), range(2)))
    assert tables[0] == tables[1]
    with pytest.raises(UserError):
        mfu_jax.tabulate(model, jax.ShapeDtypeStruct((D + 1,), jnp.float32))
    assert Mlp.__call__ is original


def test_wrong_arguments_are_user_errors():
    with pytest.raises(UserError, match=r"^model could not be traced"):
        mfu_jax.tabulate(Mlp(nnx.Rngs(0)), jax.ShapeDtypeStruct((2, D + 1), jnp.float32))
    with pytest.raises(UserError, match="could not be initialised"):
        mfu_jax.tabulate(linen.Dense(3), "text")
    with pytest.raises(UserError, match="expected a Flax module or a function"):
        mfu_jax.tabulate({"a": 1})


class Experts(nnx.Module):
    def __init__(self):
        self.weights = nnx.Param(jnp.zeros((3, D, 4 * D)))

    def __call__(self, x, sizes):
        return jax.lax.ragged_dot(x, self.weights[...], sizes)


def test_given_group_sizes_leave_out_the_rows_of_no_group():
    rows, one_row = 12, 2 * D * 4 * D
    x, sizes = jax.ShapeDtypeStruct((rows, D), jnp.float32), jnp.zeros(3, jnp.int32)
    every = mfu_jax.tabulate(Experts(), x, sizes).count
    given = mfu_jax.tabulate(Experts(), x, sizes, group_sizes=(4, 0, 3)).count
    assert (every.forward, given.forward) == (rows * one_row, (4 + 3) * one_row)
    assert given.backward == (4 + 3) * one_row  # the weights' gradient
    wrong = mfu_jax.tabulate(Experts(), x, sizes, group_sizes=(4, 3)).count
    assert wrong.total == every.total
    assert any("group_sizes= has 2 sizes" in item.reason for item in wrong.unaccounted)
