r"""Mutated programs give a count or an `HloParseError`, soon, and nothing else.

    MFU_JAX_FUZZ_MUTATIONS=100000 MFU_JAX_FUZZ_DELETIONS=10000 \
        pytest tests/flops/executed/hlo/test_hlo_fuzz.py -s

runs longer than the seconds of the default. The bodies of Pallas kernels, binary code that jaxlib's
MLIR decodes, are exchanged and cut as a whole, but not mutated inside: MLIR can hang on that.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable

import pytest

from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.executed.hlo.text import HloParseError
from tests.support.jax_versions import reads_recorded_kernels
from tests.support.recorded import text_of
from tests.support.work import HANG_SECONDS

DELETIONS = int(os.environ.get("MFU_JAX_FUZZ_DELETIONS", "100"))
MUTATIONS = int(os.environ.get("MFU_JAX_FUZZ_MUTATIONS", "1000"))
SEEDS = (
    "cpu_loops_nested",
    "cpu_loops_down",
    "cpu_loops_doubling",
    "cpu_branches",
    "cpu_fft",
    "cpu_moe_ragged",
    "v5e_loops_nested",
    "v5e_loops_doubling",
    "v5e_branches",
    "v5e_convolution",
    "v5e_splash_window",
    "v5e_flash_causal",
    "v6e_moe_ragged",
    "tpu7x_fp8",
    "h100_loops_reversed",
    "h100_branches",
    "h100_convolution",
    "h100_cudnn_window",
    "h100_fp8_cublas",
    "h100_moe_dense",
)
_NUMBERS = ("0", "1", "-1", "2", "3", "7", "65536", "2147483648", "99999999999999999999", "1e9", "")
_MARKS = ("{", "}", "(", ")", "[", "]", ",", "=", "%", '"', "/*", "*/", "\n", "->", "\\", "é")


def _number(text: str, rng: random.Random) -> str:
    numbers = list(re.finditer(r"\d+", text))
    if not numbers:
        return text
    chosen = rng.choice(numbers)
    return text[: chosen.start()] + rng.choice(_NUMBERS) + text[chosen.end() :]


def _mark(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text))
    return text[:at] + rng.choice(_MARKS) + text[at + rng.randrange(2) :]


def _cut(text: str, rng: random.Random) -> str:
    start = rng.randrange(len(text))
    return text[:start] + text[start + rng.randrange(1, 200) :]


def _truncate(text: str, rng: random.Random) -> str:
    return text[: rng.randrange(len(text))]


def _name(text: str, rng: random.Random) -> str:
    """A use of one instruction or computation becomes one of another."""
    names = list(re.finditer(r"%[\w.\-]+", text))
    if not names:
        return text
    chosen = rng.choice(names)
    return text[: chosen.start()] + rng.choice(names)[0] + text[chosen.end() :]


def _opcode(text: str, rng: random.Random) -> str:
    opcodes = list(re.finditer(r"(?<= )[a-z][a-z\-]+(?=\()", text))
    if not opcodes:
        return text
    chosen = rng.choice(opcodes)
    return text[: chosen.start()] + rng.choice(opcodes)[0] + text[chosen.end() :]


def _lines(text: str, rng: random.Random) -> str:
    """A line is left out, repeated or put elsewhere."""
    lines = text.split("\n")
    line = lines.pop(rng.randrange(len(lines)))
    for _ in range(rng.randrange(3)):
        lines.insert(rng.randrange(len(lines) + 1), line)
    return "\n".join(lines)


def _attribute(text: str, rng: random.Random) -> str:
    """An attribute gets the value of another one of its name, or is lost."""
    attributes = list(re.finditer(r", (\w+)=([^,\s]+)", text))
    if not attributes:
        return text
    chosen = rng.choice(attributes)
    alike = [a for a in attributes if a[1] == chosen[1]]
    new = rng.choice(["", rng.choice(alike)[0], rng.choice(attributes)[0]])
    return text[: chosen.start()] + new + text[chosen.end() :]


_MUTATORS: tuple[Callable[[str, random.Random], str], ...] = (
    _number,
    _number,
    _mark,
    _cut,
    _truncate,
    _name,
    _opcode,
    _lines,
    _attribute,
)


_BODY = re.compile(r'(?<="body":")[^"]*')


def _mutated(text: str, rng: random.Random) -> str:
    """One to five mutations of a program, in which short names stand for kernels' bodies."""
    bodies = list(dict.fromkeys(_BODY.findall(text)))
    for number, body in enumerate(bodies):
        text = text.replace(body, f"BODY{number}")
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        text = rng.choice(_MUTATORS)(text, rng) or "x0"
    for number, body in enumerate(bodies):
        text = text.replace(f"BODY{number}", body)
    return text


@pytest.mark.full
def test_mutated_programs_give_a_count_or_a_parse_error() -> None:
    texts = [text_of(name) for name in SEEDS]
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    for seed in range(MUTATIONS):
        rng = random.Random(seed)
        text = _mutated(rng.choice(texts), rng)
        started = time.thread_time()
        try:
            count = executed_flops(text)
        except HloParseError:
            outcomes["error"] += 1
        except Exception as error:
            raise AssertionError(f"mutation {seed} gives {error!r}") from error
        else:
            assert all(isinstance(n, int) and n >= 0 for n in count.by_scope.values())
            assert sum(count.by_scope.values()) == sum(count.by_dtype.values()) == count.total
            outcomes["count"] += 1
        slowest = max(slowest, time.thread_time() - started)
        assert slowest < HANG_SECONDS, f"mutation {seed} takes {slowest:.0f} s"
    print(f"{dict(outcomes)}, the slowest in {slowest:.2f} s")
    assert outcomes["error"] > MUTATIONS // 10
    assert outcomes["count"] > MUTATIONS // 10


@pytest.mark.parametrize("seed", [1844, 2200, 2201])  # slice, iota, parameter
def test_a_mutation_that_takes_an_attribute_is_a_parse_error(seed: int) -> None:
    rng = random.Random(seed)
    text = _mutated(rng.choice([text_of(name) for name in SEEDS]), rng)
    with pytest.raises(HloParseError, match="without"):
        executed_flops(text)


def test_an_element_of_many_indices_is_counted() -> None:
    rng = random.Random(2114)
    text = _mutated(rng.choice([text_of(name) for name in SEEDS]), rng)
    assert executed_flops(text).total > 0


def test_a_program_that_has_lost_a_line_gives_an_error_the_same_count_or_a_flag() -> None:
    texts = {name: text_of(name) for name in SEEDS}
    whole = {name: executed_flops(text) for name, text in texts.items()}
    outcomes: Counter[str] = Counter()
    for seed in range(DELETIONS):
        rng = random.Random(seed)
        name = rng.choice(SEEDS)
        lines = texts[name].split("\n")
        lost = lines.pop(rng.randrange(len(lines)))
        try:
            count = executed_flops("\n".join(lines))
        except HloParseError:
            outcomes["error"] += 1
            continue
        says = (count.unaccounted, count.flags) != (whole[name].unaccounted, whole[name].flags)
        assert says or count == whole[name], (
            f"deletion {seed} of {name} loses {lost[:200]!r} in silence"
        )
        outcomes["same"] += 1
    print(dict(outcomes))
    assert outcomes["error"] > DELETIONS // 4


@reads_recorded_kernels
def test_a_kernel_whose_table_the_text_leaves_out_says_so() -> None:
    whole = text_of("v5e_splash_window")
    elided = re.sub(r"constant\(\{ .*?\}\)", "constant({...})", whole)
    count = executed_flops(elided)
    assert executed_flops(whole).total > count.total == 0
    assert len(count.unaccounted) == len(executed_flops(whole).kernels)
    for item in count.unaccounted:
        assert "a constant that this text leaves out" in item.reason
        assert "mfu_jax.dump" in item.reason


def test_a_kernel_with_a_broken_body_is_listed() -> None:
    text = text_of("v5e_splash_window")
    body = _BODY.findall(text)[0]
    for damaged in ("", "AAAA", "no base64", body[: len(body) // 2], "TUzvUgFN" * 50, "/" * 200):
        count = executed_flops(text.replace(body, damaged))
        assert any("its body" in item.reason for item in count.unaccounted)
