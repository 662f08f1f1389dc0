"""Names in a chart stand apart."""

from __future__ import annotations

import itertools

from mfu_jax.profiling.page.labels import Box, Disc, Label, placed

CHART = Box(0, 0, 400, 200)


def around(discs: list[Disc]) -> list[Box]:
    return [disc.box for disc in discs]


def test_names_of_discs_that_are_close_stand_on_different_sides() -> None:
    discs = [Disc(200, 100, 5, "matmul (dot)"), Disc(215, 104, 5, "attention/scores")]
    left, right = sorted(placed(discs, marks=around(discs), beside=[], within=CHART))
    assert (left.words, left.anchor) == ("matmul (dot)", "end")
    assert (right.words, right.anchor) == ("attention/scores", "start")
    assert not any(label.box.overlaps(disc.box) for label in (left, right) for disc in discs)


def test_of_many_names_at_one_point_those_are_shown_that_fit() -> None:
    discs = [Disc(200, 100 + n, 5, f"layers/{n}", is_needed=True) for n in range(20)]
    labels = placed(discs, marks=around(discs), beside=[], within=CHART)
    assert labels[0].words == "layers/0"
    assert 4 <= len(labels) < 20
    pairs = itertools.combinations(labels, 2)
    assert not any(one.box.overlaps(other.box) for one, other in pairs)


def test_only_a_needed_name_stands_over_other_marks() -> None:
    everywhere = [Box(0, 0, 400, 200)]
    for is_needed, shown in ((True, ["mlp"]), (False, [])):
        disc = Disc(200, 100, 5, "mlp", is_needed)
        labels = placed([disc], marks=everywhere, beside=[], within=CHART)
        assert [label.words for label in labels] == shown


def test_a_name_leaves_the_labels_and_the_edges_alone() -> None:
    roof = Label(400, 95, "bf16 989.4 TFLOP/s", "end")
    disc = Disc(380, 100, 5, "mlp")
    (label,) = placed([disc], marks=[disc.box], beside=[roof], within=CHART)
    assert not label.box.overlaps(roof.box)
    assert label.box.is_within(CHART)
    assert not placed([Disc(200, 100, 5, "x" * 99)], marks=[], beside=[], within=CHART)
