"""What undifferentiated matmuls are for, in programs written as lists of values."""

from __future__ import annotations

from mfu_jax.flops.undifferentiated import ProgramValue, classify


def step(*rest: ProgramValue) -> list[ProgramValue]:
    """0 a weight, 1 a batch, 2 the loss, 3 the gradient, 4 the new weight, then `rest`."""
    return [
        ProgramValue((), 16, is_input=True),
        ProgramValue((), 32, is_input=True),
        ProgramValue((0, 1), 1, is_differentiated=True),
        ProgramValue((0, 1, 2), 16, is_differentiated=True, is_gradient=True),
        ProgramValue((0, 3), 16),
        *rest,
    ]


def test_what_uses_the_new_weight_evaluates() -> None:
    assert classify(step(ProgramValue((4, 1), 32, site=9))) == {9: "evaluation"}


def test_what_uses_gradients_belongs_to_the_optimizer() -> None:
    assert classify(step(ProgramValue((3, 3), 16, site=9))) == {9: "optimizer"}


def test_what_becomes_a_part_of_the_update_belongs_to_the_optimizer_without_a_gradient() -> None:
    values = [
        ProgramValue((), 16, is_input=True),  # a weight
        ProgramValue((), 16, is_input=True),  # a state
        ProgramValue((0,), 16, is_differentiated=True, is_gradient=True),
        ProgramValue((1, 1), 16, site=9),
        ProgramValue((3, 2), 16),  # preconditioned
        ProgramValue((0, 4), 16),
    ]
    assert classify(values) == {9: "optimizer"}


def test_a_scalar_is_no_part_of_an_update() -> None:
    values = [
        ProgramValue((), 16, is_input=True),
        ProgramValue((), 32, is_input=True),
        ProgramValue((0, 1), 16, is_differentiated=True, is_gradient=True),
        ProgramValue((0, 1), 32, site=9),
        ProgramValue((3,), 1),  # a loss, and from it a learning rate
        ProgramValue((4, 2), 16),
        ProgramValue((0, 5), 16),
    ]
    assert classify(values) == {9: "evaluation"}


def test_what_the_loss_uses_is_forward_and_so_is_everything_where_nothing_is_trained() -> None:
    values = [
        ProgramValue((), 16, is_input=True),
        ProgramValue((), 16, site=9),
        ProgramValue((0, 1), 16, is_differentiated=True, is_gradient=True),
    ]
    assert classify(values) == {9: "forward"}
    assert classify([ProgramValue((), 16, is_input=True), ProgramValue((0, 0), 16, site=9)]) == {
        9: "forward"
    }
