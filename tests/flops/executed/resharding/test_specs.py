"""How values are split is followed from the parameters, and written as one writes it."""

from __future__ import annotations

import jax

from mfu_jax.flops.executed.costs.literals import Literals
from mfu_jax.flops.executed.counting import counter_of
from mfu_jax.flops.executed.hlo.uses import Value
from mfu_jax.flops.executed.resharding.specs import Merged, Specs, reshaped, words
from tests.campaigns.shardings import PLANTS, found_in, setting_of

ROWS, WIDTH = ("data",), ("model",)


def test_words_write_a_spec_as_one_does() -> None:
    assert words((ROWS, (), ("a", "b"))) == "P('data', None, ('a', 'b'))"
    assert words((ROWS, (), ())) == "P('data')"
    assert words(((), ())) == "P()"
    assert words((ROWS, None)) == "P('data', U)"
    assert words((None, None)) == words(None) == ""


def test_a_merged_dimension_is_taken_apart_again() -> None:
    merged = reshaped((ROWS, WIDTH, ()), (4, 16, 8), (64, 8))
    assert merged == (Merged([(4, ROWS), (16, WIDTH)]), ())
    assert words(merged) == "P(U)"
    assert reshaped(merged, (64, 8), (4, 16, 8)) == (ROWS, WIDTH, ())
    assert reshaped((ROWS,), (12,), (3, 4)) == (ROWS, ())
    assert reshaped((ROWS, ()), (4, 6), (6, 4)) is None


def test_both_shardings_are_named_by_mesh_axes() -> None:
    s = setting_of(jax.devices()[:8])
    (one,) = found_in(PLANTS["swapped_axes"](s))
    assert one.before == "P('model', None, 'data')"
    assert one.after == "P(None, ('data', 'model'))"
    assert one.after in one.advice


COMBINED = """HloModule m, num_partitions=4

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(a, b)
}

ENTRY main {
  bias = f32[32]{0} parameter(0)
  weight = f32[64,16]{1,0} parameter(1)
  both = (f32[32]{0}, f32[64,16]{1,0}) all-reduce(bias, weight), to_apply=add
  pair = (f32[32]{0}, f32[64,16]{1,0}) opt-barrier(both)
  summed = f32[64,16]{1,0} get-tuple-element(pair), index=1
  ROOT whole = f32[64,32]{1,0} all-gather(summed), dimensions={1}
}
"""


def split(text: str, shardings: dict[int, str]) -> dict[str, str]:
    """How each value of a program on data=2, model=2 is split, in words."""
    counter = counter_of(text)
    specs = Specs(shardings, {"data": 2, "model": 2}, Literals(counter.reader.dataflow))
    main = counter.module.entry
    return {name: words(specs.of(Value(main, main[name]))) for name in main.instructions}


OF_MODEL = "{devices=[2,2]<=[2,2]T(1,0) last_tile_dim_replicate}"


def test_of_what_xla_has_combined_each_result_is_split_as_its_own_operand() -> None:
    found = split(COMBINED, {0: OF_MODEL, 1: "{devices=[1,2,2]<=[4] last_tile_dim_replicate}"})
    assert (found["bias"], found["weight"]) == ("P('model')", "P(None, 'data')")
    assert found["summed"] == found["weight"]
    assert found["whole"] == "P()"


STARTED = """HloModule m, num_partitions=4

ENTRY main {
  bias = f32[32]{0} parameter(0)
  weight = f32[64,16]{1,0} parameter(1)
  start = ((f32[32]{0}, f32[64,16]{1,0}), (f32[64]{0}, f32[128,16]{1,0})) all-gather-start(bias, weight), dimensions={0}
  done = (f32[64]{0}, f32[128,16]{1,0}) all-gather-done(start)
  tall = f32[128,16]{1,0} get-tuple-element(done), index=1
  ROOT apart = f32[2,64,16]{2,1,0} reshape(tall)
}
"""  # noqa: E501


def test_so_it_is_where_they_start_and_end_apart() -> None:
    found = split(STARTED, {0: OF_MODEL, 1: "{devices=[2,2]<=[4]}"})
    assert found["weight"] == "P('data', 'model')"
    assert found["tall"] == "P(None, 'model')"
    assert found["apart"] == "P(None, None, 'model')"
