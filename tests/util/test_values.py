"""One converter for text, YAML values and Python objects."""

from __future__ import annotations

import datetime
import enum
import re
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from mfu_jax.errors import UserError
from mfu_jax.util.values import convert, shown, typed

Policy = Literal["none", "full"]
Words, Numbers = tuple[str, ...], tuple[int, ...]
Exact, Size = int | Fraction, int | tuple[int, ...]


class Block(enum.Enum):
    LLAMA2 = "llama2"


@pytest.mark.parametrize(
    ("value", "kind", "result"),
    [
        (None, float | None, None),
        ("null", float | None, None),
        ("", float | None, None),
        ("0.5", float | None, 0.5),
        ("true", bool, True),
        ("Yes", bool, True),
        ("ON", bool, True),
        ("1", bool, True),
        ("false", bool, False),
        ("no", bool, False),
        ("off", bool, False),
        ("0", bool, False),
        (True, bool, True),
        (1, bool, True),
        (0, bool, False),
        (np.True_, bool, True),
        ("12", int, 12),
        ("1e3", int, 1000),
        ("-1", int, -1),
        (7.0, int, 7),
        (np.int64(5), int, 5),
        (str(2**63 + 1), int, 2**63 + 1),
        ("3e-4", float, 0.0003),
        (2, float, 2.0),
        (np.float32(0.5), float, 0.5),
        ("0.5", Exact, Fraction(1, 2)),
        (1.1, Exact, Fraction(11, 10)),
        ("8", Exact, 8),
        (4.0, Exact, 4),
        ("text", str, "text"),
        ("", str, ""),
        (4090, str, "4090"),
        (datetime.date(2026, 1, 2), str, "2026-01-02"),
        (Path("a/b"), str, "a/b"),
        (Block.LLAMA2, str, "llama2"),
        ("full", Policy, "full"),
        ("silu,linear", Words, ("silu", "linear")),
        ("[silu, linear]", Words, ("silu", "linear")),
        (["silu"], Words, ("silu",)),
        ("[]", Words, ()),
        ("1, 2", Numbers, (1, 2)),
        ((3, 4), Numbers, (3, 4)),
        ("336", Size, 336),
        ("336,448", Size, (336, 448)),
        ([1, 2], Size, (1, 2)),
    ],
)
def test_values_take_the_declared_type(value: object, kind: Any, result: object) -> None:
    got = convert(value, kind)
    assert got == result
    assert type(got) is type(result)


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("half", float | None, "a number"),
        ("maybe", bool, "true or false"),
        (2, bool, "true or false"),
        (1.0, bool, "true or false"),
        (np.True_, int, "a whole number"),
        (np.False_, float, "a number"),
        (None, bool, "true or false"),
        ("many", int, "a whole number"),
        ("1.5", int, "a whole number"),
        (True, int, "a whole number"),
        (None, int, "a whole number"),
        (float("nan"), int, "a whole number"),
        ("inf", int, "a whole number"),
        ([1], int, "a whole number"),
        ("x", float, "a number"),
        (False, float, "a number"),
        ("nan", Exact, "a finite number"),
        (float("inf"), Exact, "a finite number"),
        (None, str, "text"),
        (True, str, "text"),
        ({}, str, "text"),
        ("half", Policy, "one of none, full"),
        ({}, Policy, "one of none, full"),
        ("int7", Literal["", "int8"], 'one of "", int8'),
        (5, Words, "a list of words, for example [a, b]"),
        ([True], Words, "a list of words, for example [a, b]"),
        ("a,b", Numbers, "a list of whole numbers, for example [1, 2]"),
        ([1, True], Numbers, "a list of whole numbers, for example [1, 2]"),
        ("a", Size, "a whole number, or a list of them"),
    ],
)
def test_what_does_not_fit_says_what_was_expected(value: object, kind: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        convert(value, kind)


def test_the_message_names_the_key_the_value_and_the_nearest_choice() -> None:
    with pytest.raises(UserError) as error:
        typed("remat_policy", "ful", Policy, hint="see base.yml")
    assert str(error.value) == (
        "remat_policy='ful': expected one of none, full\nhint: did you mean 'full'? see base.yml"
    )


def test_a_value_of_any_size_is_shown_on_one_short_line() -> None:
    nested: list[object] = []
    for _ in range(60):
        nested = [nested, nested]
    for value in ("x" * 10_000, nested, "a\nb", [0] * 10**6):
        assert len(shown(value)) <= 80
        assert "\n" not in shown(value)
