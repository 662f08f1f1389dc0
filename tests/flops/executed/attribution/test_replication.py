"""Work that devices repeat: named, to the FLOP, and never where they share it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mfu_jax.flops.executed.attribution.replication import tile_numbers, tiled
from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.executed.instruction_costs import instruction_costs
from mfu_jax.instrumentation.counts import count_program, traced_model

P = PartitionSpec
ROWS, WIDTH, LAYERS = 8, 16, 3


def train_step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    def loss_fn(w: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=LAYERS)
        return jnp.mean(y**2)

    loss, gradient = jax.value_and_grad(loss_fn)(w)
    return w - 0.1 * gradient, loss


# A loop's backward pass has the gradient of its carry in every layer, of the first one, too.
STEP = 3 * LAYERS * 2 * ROWS * WIDTH * WIDTH


@pytest.mark.parametrize(
    ("weights", "rows", "copies", "label"),
    [
        (P(), P(), 4, "repeated on every device (3 of 4)"),
        (P(), P("data"), 2, "repeated in groups of 2 devices (2 of 4)"),
        (P(), P("model"), 2, "repeated in groups of 2 devices (2 of 4)"),
        (P(), P(("data", "model")), 1, None),  # data parallel
        (P(("data", "model")), P(("data", "model")), 1, None),  # weights gathered as needed
        (P(None, "model"), P("data"), 1, None),  # and tensor parallel
    ],
)
def test_a_step_repeats_what_no_axis_shares(
    weights: Any, rows: Any, copies: int, label: str | None
) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    w = jax.device_put(jnp.ones((WIDTH, WIDTH)), NamedSharding(mesh, weights))
    x = jax.device_put(jnp.ones((ROWS, WIDTH)), NamedSharding(mesh, rows))
    step = jax.jit(train_step)
    flops = count_program(step.lower(w, x).compile(), traced_model(step, (w, x), {}, devices=4))
    share = STEP // 4
    assert flops.model.per_device == share
    assert flops.executed.total == copies * share
    assert flops.executed.repeated == ({label: (copies - 1) * share} if label else {})
    assert flops.ledger.residual == 0
    assert (f"+ {label} " in str(flops.ledger)) == bool(label)


NAMED = {  # as JAX 0.11 writes shardings, beside what XLA says of them in tiles
    "{mesh[], replicated}": "{replicated}",
    "{mesh['data'=2,'model'=2,'z'=2], [{'data'}, {}]}": (
        "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"
    ),
    "{mesh['data'=2,'model'=2,'z'=2], [{}, {'model'}]}": (
        "{devices=[1,2,4]<=[2,2,2]T(1,0,2) last_tile_dim_replicate}"
    ),
    "{mesh['data'=2,'model'=2,'z'=2], [{'model', 'data'}, {}]}": (
        "{devices=[4,1,2]<=[2,2,2]T(1,0,2) last_tile_dim_replicate}"
    ),
    "{mesh['data'=2,'model'=2,'z'=2], [{'z', 'data'}, {}]}": (
        "{devices=[4,1,2]<=[4,2]T(1,0) last_tile_dim_replicate}"
    ),
    "{mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)), [{'a'}, {'b'}]}": "{devices=[4,2]<=[2,4]T(1,0)}",
    "{mesh['a'=8], [{'a':(1)2}, {}]}": "",
    "{mesh['a'=4,'b'=2], [{'a'}, {'a'}]}": "",
    "{mesh['a'=4,'b'=2], device_ids=([3,4]T(1,0)), [{'a'}, {}]}": "",
}


@pytest.mark.parametrize(("named", "in_tiles"), NAMED.items())
def test_shardings_by_the_axes_of_a_mesh_are_read(named: str, in_tiles: str) -> None:
    found, expected = (tile_numbers(text, 8) for text in (tiled(named), in_tiles))
    assert (found is None) == (expected is None)
    assert found is None or np.array_equal(found, expected)
    assert tiled(in_tiles) == in_tiles


DOT = 'lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/dot_general"}'


def program(body: str, *, x: str) -> str:
    """One [2, 2] by [2, 2] product on each of four devices, after `body` made %a of x's shard."""
    return f"""HloModule m, num_partitions=4
%add (p: f32[], q: f32[]) -> f32[] {{
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %s = f32[] add(%p, %q)
}}
ENTRY %main (x: f32[2,2], w: f32[2,2]) -> f32[2,2] {{
  %x = f32[2,2] parameter(0), sharding={x}
  %w = f32[2,2] parameter(1), sharding={{replicated}}
  {body}
  ROOT %d = f32[2,2] dot(%a, %w), {DOT}
}}"""


COPY = "%a = f32[2,2] copy(%x)"
ONE = 2 * 2 * 2 * 2


def all_reduce(groups: str) -> str:
    return f"%a = f32[2,2] all-reduce(%x), channel_id=1, replica_groups={groups}, to_apply=%add"


def looked_up(numbers: str) -> str:
    """Every device adds its own entry of a table."""
    return f"""%i = u32[] partition-id()
  %table = s32[4] constant({numbers})
  %own = s32[1] dynamic-slice(%table, %i), dynamic_slice_sizes={{1}}
  %number = s32[] bitcast(%own)
  %float = f32[] convert(%number)
  %same = f32[2,2] broadcast(%float), dimensions={{}}
  %a = f32[2,2] add(%x, %same)"""


@pytest.mark.parametrize(
    ("body", "x", "repeats"),
    [
        (COPY, "{replicated}", 3),
        (COPY, "{devices=[1,4]<=[4]}", 0),
        (COPY, "{devices=[2,1,2]<=[4] last_tile_dim_replicate}", 2),
        (COPY, "{devices=[2,1,2]<=[2,2]T(1,0) last_tile_dim_replicate}", 2),
        (COPY, "{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}", 2),
        (COPY, "{manual}", 0),
        (COPY, "{something new}", 0),
        (all_reduce("{}"), "{devices=[1,4]<=[4]}", 3),
        (all_reduce("{{0,1,2,3}}"), "{devices=[1,4]<=[4]}", 3),
        (all_reduce("{{0,2},{1,3}}"), "{devices=[1,4]<=[4]}", 2),
        (all_reduce("[2,2]<=[2,2]T(1,0)"), "{devices=[1,4]<=[4]}", 2),
        (all_reduce("mesh['a'=2,'b'=2] {'b'}"), "{devices=[1,4]<=[4]}", 2),
        (
            all_reduce("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}"),
            "{devices=[2,1,2]<=[4] last_tile_dim_replicate}",
            3,  # 'b' is the outer axis of the ids: {0,2} and {1,3}, which hold both rows
        ),
        (all_reduce("{something new}"), "{devices=[1,4]<=[4]}", 0),
        # Rows over one axis, their sum over the other one: still two kinds of rows.
        (
            all_reduce("[2,2]<=[4]"),
            "{devices=[2,1,2]<=[4] last_tile_dim_replicate}",
            2,
        ),
        (
            all_reduce("[2,2]<=[2,2]T(1,0)"),
            "{devices=[2,1,2]<=[4] last_tile_dim_replicate}",
            3,
        ),
        (
            "%a = f32[2,2] collective-permute(%x), source_target_pairs={{0,1},{1,0}}",
            "{devices=[1,4]<=[4]}",
            1,  # two devices receive nothing and hold zeros
        ),
        (
            "%i = u32[] partition-id()\n  %a = f32[2,2] broadcast(%i), dimensions={}",
            "{replicated}",
            0,
        ),
        (
            """%i = u32[] partition-id()
  %own = f32[2,2] broadcast(%i), dimensions={}
  %s = (f32[2,2], f32[2,2]) all-reduce-start(%own, %x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add
  %e = (f32[2,2], f32[2,2]) all-reduce-done(%s)
  %a = f32[2,2] get-tuple-element(%e), index=1""",  # noqa: E501
            "{replicated}",
            3,  # the other one of the two differs between the groups
        ),
        (looked_up("{0, 4, 0, 4}"), "{replicated}", 2),
        (looked_up("{7, 7, 7, 7}"), "{replicated}", 3),
        (looked_up("{0, 1, 2, 3}"), "{replicated}", 0),
        (looked_up("{0, 4, 0, 4}"), "{devices=[2,1,2]<=[4] last_tile_dim_replicate}", 0),
        (
            "%a = f32[2,2] all-to-all(%x), replica_groups={{0,1,2,3}}, dimensions={0}",
            "{devices=[1,4]<=[4]}",
            0,
        ),
    ],
)
def test_who_holds_a_value_follows_from_shardings_and_collectives(
    body: str, x: str, repeats: int
) -> None:
    repeated = executed_flops(program(body, x=x)).repeated
    assert sum(repeated.values()) == ONE * repeats // 4
    assert all(f"({repeats} of 4)" in label for label in repeated)


def test_a_loop_whose_state_becomes_different_on_each_device_repeats_nothing() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))

    def shard(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(i: Any, carry: jax.Array) -> jax.Array:
            # The first pass reads equal values, the later ones do not.
            return jnp.tanh(carry @ w) + jax.lax.axis_index("data")

        return jax.lax.fori_loop(0, 3, body, x)

    step = jax.jit(
        jax.shard_map(shard, mesh=mesh, in_specs=(P(), P()), out_specs=P("data"), check_vma=False)
    )
    executed = executed_flops(step.lower(jnp.ones((4, 4)), jnp.ones((4, 4))).compile())
    assert executed.total == 3 * 2 * 4 * 4 * 4
    assert executed.repeated == {}


@pytest.mark.parametrize(
    ("axis", "groups"),
    [
        ("a", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("b", ((0, 4), (1, 5), (2, 6), (3, 7))),
    ],
)
def test_groups_of_a_mesh_whose_ids_are_in_another_order(axis, groups):
    """[2,4]T(1,0) are the ids 0 4, 1 5, 2 6, 3 7: 'a' counts rows, 'b' columns."""
    reduce = all_reduce(f"mesh['a'=4,'c'=1,'b'=2], device_ids=([2,4]T(1,0)) {{'{axis}'}}")
    text = program(reduce, x="{replicated}").replace("num_partitions=4", "num_partitions=8")
    record = instruction_costs(text).records["a"]
    assert record.device_groups == groups
    assert record.collective.group_size == len(groups[0])
