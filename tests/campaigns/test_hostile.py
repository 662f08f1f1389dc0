"""No argument and no file gives a traceback, hangs a command, or takes a gigabyte."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns.hostile import failures, hostile_inputs, promises


@pytest.mark.full
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from /proc"
)
def test_hostile_inputs_get_one_line_and_exit_code_2() -> None:
    """A slice of the 3,000 of `scripts/campaigns.sh faults`."""
    results = hostile_inputs(random_seed=10, count=110)
    assert len(results) >= 100
    codes = Counter(result.code for result in results)
    assert codes[0] > 3, "the inputs never get past the first check"
    assert codes[2] > 33
    assert not [text for promise in promises(results) for text in promise.failures]


SOUND = {
    "raised": "",
    "code": 2,
    "output": "",
    "errors": "mfu-jax flops: wrong\n",
    "seconds": 0.1,
    "growth": 1000,
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, []),
        ({"code": 0, "output": "{}", "errors": ""}, []),
        ({"raised": "KeyError: 'a'"}, ["KeyError: 'a'"]),
        ({"code": 3}, ["exit code 3"]),
        ({"errors": ""}, ["a refusal in silence"]),
        ({"errors": "one\ntwo\n"}, ["2 lines on stderr"]),
        ({"errors": "one\nhint: two\n"}, []),
        ({"errors": "one\nhint: two\nthree\n"}, ["3 lines on stderr"]),
        ({"errors": "a" * 1501 + "\n"}, ["a long line on stderr"]),
        ({"errors": "\x1b[31m\n"}, ["control characters on stderr"]),
        ({"errors": "a bug of mfu_jax\n"}, ["a bug: a bug of mfu_jax\n"]),
        ({"seconds": 11.0}, ["11 seconds"]),
        ({"growth": 2 * 2**30}, ["2147 MB"]),
        ({"code": 0, "output": '{"mfu": NaN}'}, ["JSON that is not"]),
        ({"code": 0, "output": "{}{}"}, ["JSON that is not"]),
    ],
)
def test_a_broken_promise_is_named(change: dict[str, Any], says: list[str]) -> None:
    assert failures(["flops", "--json"], {**SOUND, **change}) == says
