"""Strategies that draw hostile arguments, files and texts for the commands of `mfu-jax`."""

from __future__ import annotations

import dataclasses
import functools
import json
import lzma
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from mfu_jax.cli import command_names
from mfu_jax.flops.analytic.inputs.maxtext_keys import override_keys
from mfu_jax.trainer.config.keys import base_defaults
from mfu_jax.util.yaml_files import model_file
from tests.campaigns.hostile.files import SPECIAL
from tests.support.paths import DATA, ROOT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One input.

    Attributes:
        kind: what is hostile about it.
        argv: the arguments; ``{file}`` stands for the path of the generated file, ``{fifo}`` and
            the other names of `SPECIAL` for theirs.
        content: of the generated file, and of stdin.
        suffix: of the generated file.
    """

    kind: str
    argv: tuple[str, ...]
    content: str = ""
    suffix: str = ""


_NUMBERS = (
    *(
        "inf",
        "-inf",
        "nan",
        "1e400",
        "-1e400",
        "1e308",
        "1e-400",
        "5e-324",
        "1.7976931348623157e308",
    ),
    *("0", "-0.0", "-1", "0.5", "1/3", "0x10", "1_000", "1__0", "1e12", "1e18", "1e19", "1e50"),
    *(str(2**31), str(2**50), str(2**50 + 1), str(2**63), str(2**64), "9" * 400, "9" * 5000),
    *(f"-{'9' * 4300}", f"0.{'0' * 5000}1", "٣", "²", "1²", "１２", "", " ", "\t1\n", "=", "=1"),
    *("true", "None", "null", "[]", "[1,2]", "[" * 2000, "{}", "a", "a\nb", "\x1b[31m", "\0"),
    *("é" * 700, "\udcff", "15T", "T", "1KK", "41%", "%", "0%", "1e400%", "infT", "1e308T", "-5%"),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 2**31, 2**63, 10**40, -(10**40), 0.5, 1e308, 5e-324, 1e-320),
    *(float("inf"), float("nan"), "", "x", "NaN", "Infinity", "1", "1e999", "9" * 5000, [], [1]),
    *([[]], {}, {"a": 1}, {"step": 1}, "\ud800", "\x1b[31m", "step", "compile", [None] * 100),
)
_MODELS = ("llama3-8b", "deepseek3-671b", "gemma4-26b", "gpt-oss-20b", "qwen3-next-80b-a3b")
_PROJECT_NUMBERS = (
    *("tokens", "chips", "days", "hours", "seconds", "mfu", "tokens_per_sec_per_device"),
    *("step_time_seconds", "tokens_per_step", "params", "max_target_length", "price"),
    "peak_tflops_per_device",
)
_PROJECT = (*_PROJECT_NUMBERS, "model", "convention", "hardware", "dtype")
_REPORT = ("hardware", "dtype", "model", "convention", "peak_tflops_per_device", "warmup_steps")
_FLAGS = ("--json", "--json=", "--list", "--serving", "--calibrate=1", "--help=1", "-", "--", "-x")
_RUN = DATA / "maxtext_0.2.5_metrics.jsonl"
_METRICS = (
    *("perf/step_time_seconds", "perf/per_device_tflops", "perf/per_device_tflops_per_sec"),
    *("perf/per_device_tokens", "perf/mfu", "perf/hfu", "learning/loss", "compile/seconds", "a/b"),
)


def _numbers() -> st.SearchStrategy[str]:
    """Text where a number is expected."""
    return st.one_of(
        st.sampled_from(_NUMBERS),
        st.integers(min_value=-(10**20), max_value=10**60).map(str),
        st.floats().map(repr),
        _words(),
    )


def _words() -> st.SearchStrategy[str]:
    """Any text that a shell can pass, with bytes that are not UTF-8, and some that it cannot."""
    character = st.characters(exclude_categories=["Cs"]) | st.sampled_from("\udc80\udcff=-/[]{}%\0")
    long = st.text(character, min_size=1, max_size=2).map(lambda text: text * 3000)
    return st.text(character, max_size=30) | st.text(character, max_size=30) | long


def _pairs(keys: Sequence[str], values: st.SearchStrategy[str]) -> st.SearchStrategy[list[str]]:
    """``key=value``, mostly with keys that exist."""
    key = st.sampled_from(list(keys))
    return st.lists(st.builds("{}={}".format, key | key | key | _words(), values), max_size=4)


@st.composite
def arguments(draw: st.DrawFn) -> Case:
    """Any command with any words."""
    names = st.sampled_from(command_names())
    command = draw(names | names | names | st.just("") | _words())
    keys = [*_PROJECT, *_REPORT, *override_keys(), *base_defaults()]
    known = st.sampled_from([*_FLAGS, *_MODELS, "h100", "{file}"])
    rest = draw(st.lists(_words() | known, max_size=4)) + draw(_pairs(keys, _numbers()))
    return Case(kind="arguments", argv=(command, *draw(st.permutations(rest))))


@st.composite
def numbers(draw: st.DrawFn) -> Case:
    """Hostile numbers where a command expects numbers."""
    command = draw(st.sampled_from(["flops", "project", "report", "train", "compare", "hardware"]))
    flags = draw(st.sampled_from([[], ["--json"]]))
    if command == "project":
        rest = [*_SENSIBLE, *draw(_pairs(_PROJECT, _numbers()))]
    elif command == "flops":
        rest = [draw(st.sampled_from(_MODELS)), *draw(_pairs(override_keys(), _numbers()))]
        flags = flags + draw(st.sampled_from([[], ["--serving"]]))
    elif command == "report":
        rest = [str(_RUN), *draw(_pairs(_REPORT, _numbers() | st.sampled_from(_MODELS)))]
    elif command == "hardware":
        rest = [draw(st.sampled_from(["h100", "v5p"])), *draw(_pairs(["dtype"], _numbers()))]
    else:
        rest, flags = draw(_pairs(list(base_defaults()), _numbers())), []
    return Case(kind="numbers", argv=(command, *rest, *flags))


_SENSIBLE = ("tokens=1e12", "chips=8", "mfu=0.4", "hardware=h100", "model=llama3-8b")


@st.composite
def extremes(draw: st.DrawFn) -> Case:
    """Finite numbers above 0, each possible, too large or too small together."""
    flags = draw(st.sampled_from([[], ["--json"]]))
    if draw(st.booleans()):
        keys = ["tokens", "chips", "params", "peak_tflops_per_device"]
        keys += draw(st.lists(st.sampled_from(["price", "tokens_per_step"]), unique=True))
        mfu = draw(st.sampled_from(["mfu=0.4", "mfu=5e-324", "tokens_per_sec_per_device=1e-300"]))
        rest = ["project", mfu, *(f"{key}={draw(_positive())!r}" for key in keys)]
    else:
        whole = st.integers(0, 50).map(lambda power: str(2**power)) | st.integers(0, 9).map(str)
        whole |= st.lists(whole, max_size=4).map(lambda items: f"[{','.join(items)}]")
        keys = draw(st.lists(st.sampled_from(override_keys()), max_size=4, unique=True))
        rest = ["flops", draw(st.sampled_from(_MODELS)), *(f"{k}={draw(whole)}" for k in keys)]
    return Case(kind="extremes", argv=(*rest, *flags))


def _positive() -> st.SearchStrategy[float]:
    """Every order of magnitude equally often."""
    return st.integers(-323, 308).map(lambda power: float(f"1e{power}"))


@st.composite
def files(draw: st.DrawFn) -> Case:
    """A file that is no file, no text, or far too large."""
    command = draw(st.sampled_from(command_names()))
    name = f"{{{draw(st.sampled_from(SPECIAL))}}}"
    if command == "project":
        rest = ["tokens=1e12", "chips=8", "mfu=0.4", "hardware=h100", f"model={name}"]
    elif command == "report" and draw(st.booleans()):
        rest = [str(_RUN), f"model={name}"]
    else:
        rest = [name, *draw(st.sampled_from([[], ["--json"]]))]
    return Case(kind="files", argv=(command, *rest))


@st.composite
def metrics(draw: st.DrawFn) -> Case:
    """A metrics file or a log of which some lines are damaged, as a file or by stdin."""
    damaged = draw(st.sampled_from([_json_line(), _log_line(), _json_line() | _words()]))
    lines = draw(st.lists(damaged, min_size=1, max_size=8))
    path = draw(st.sampled_from(["{file}", "-"]))
    options = draw(st.sampled_from([[], ["hardware=h100"], ["peak_tflops_per_device=1e-300"]]))
    flags = draw(st.sampled_from([["warmup_steps=0"], ["warmup_steps=0", "--json"], ["--json"]]))
    return Case(
        kind="metrics",
        argv=("report", path, *options, *flags),
        content="\n".join(lines) * draw(st.sampled_from([1, 1, 3])),
        suffix=".jsonl",
    )


def _json_line() -> st.SearchStrategy[str]:
    """A record, mostly as it should be, with one value that should not be there."""

    def record(step: int, seconds: float, name: str, value: Any) -> str:
        sound = {"step": step, "kind": "step", _METRICS[0]: seconds, _METRICS[1]: 2.0}
        return json.dumps({**sound, name: value})

    names = st.sampled_from(["step", "kind", *_METRICS])
    values = st.floats() | st.integers() | st.sampled_from(_VALUES)
    seconds = st.floats(0.1, 10.0) | _positive()
    line = st.builds(record, st.integers(0, 20), seconds, names, values)
    return line | line | _damaged(line)


def _log_line() -> st.SearchStrategy[str]:
    return st.builds(
        "completed step: {}, seconds: {}, TFLOP/s/device: {}, loss: {}, MFU: {}".format,
        *(_numbers() | st.sampled_from(["1", "7", "0.5", "nan", "41.0%"]) for _ in range(5)),
    )


def _damaged(texts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """A text from which a piece is cut or to which one is added."""

    def damage(text: str, begin: int, length: int, new: str) -> str:
        begin %= len(text) + 1
        return text[:begin] + new + text[begin + length :]

    small = st.integers(0, 40)
    return st.builds(damage, texts, st.integers(0, 10**6), small, _words() | st.just(""))


@st.composite
def yaml_texts(draw: st.DrawFn) -> Case:
    """A YAML file: a bundled model's with other values, or damaged."""
    text = model_file(draw(st.sampled_from(_MODELS))).read_text(encoding="utf-8")
    keys = st.sampled_from([*override_keys(), *base_defaults(), "base_config"]) | _words()
    values = st.sampled_from(_VALUES).map(json.dumps) | _numbers()
    added = draw(st.lists(st.builds("{}: {}".format, keys, values), max_size=4))
    kept = [line for line in text.splitlines() if draw(st.integers(0, 9))]
    text = "\n".join([*kept, *added]) + "\n"
    if draw(st.booleans()):
        text = draw(_damaged(st.just(text)))
    command = draw(st.sampled_from(["flops", "train", "compare"]))
    return Case(kind="YAML", argv=(command, "{file}"), content=text, suffix=".yml")


@st.composite
def json_texts(draw: st.DrawFn) -> Case:
    """A Hugging Face config.json with other values, or damaged."""
    config = dict(draw(st.sampled_from(_hugging_face_configs())))
    keys = sorted(config)
    for key in draw(st.lists(st.sampled_from(keys), max_size=4)):
        config[key] = draw(st.sampled_from(_VALUES) | st.integers())
    text = json.dumps(config)
    if not draw(st.integers(0, 3)):
        text = draw(_damaged(st.just(text)))
    flags = draw(st.sampled_from([[], ["--json"], ["--serving"], ["--json", "--serving"]]))
    return Case(kind="JSON", argv=("flops", "{file}", *flags), content=text, suffix=".json")


@functools.cache
def _hugging_face_configs() -> list[dict[str, Any]]:
    rows = json.loads((DATA / "hf_variants.json").read_text(encoding="utf-8"))["rows"]
    return [{"model_type": row["model_type"], **row["config"]} for row in rows]


@st.composite
def hlo_texts(draw: st.DrawFn) -> Case:
    """A compiled program's text in which words are cut, doubled or replaced."""
    lines = draw(st.sampled_from(_programs())).splitlines()
    for _ in range(draw(st.integers(0, 5))):
        at = draw(st.integers(0, len(lines) - 1))
        change = draw(st.sampled_from(_CHANGES))
        lines[at] = change(lines[at], draw(_numbers()))
    numbers = draw(_pairs(["model", "dense", "attention", "xla", "convention"], _numbers()))
    argv = ("compare", "{file}", *numbers, *draw(st.sampled_from([[], ["--json"]])))
    return Case(kind="HLO", argv=argv, content="\n".join(lines), suffix=".hlo")


_CHANGES: tuple[Callable[[str, str], str], ...] = (
    lambda line, word: "",
    lambda line, word: line + "\n" + line,
    lambda line, word: line[: len(line) // 2],
    lambda line, word: line.replace("64", word),
    lambda line, word: line.replace("1", word, 1),
    lambda line, word: line.replace("{", "[", 1),
    lambda line, word: line.replace("(", "", 1),
    lambda line, word: word,
)


@functools.cache
def _programs() -> list[str]:
    names = ("cpu_fft", "cpu_branches", "h100_cublas", "cpu_loops_nested", "cpu_mesh_1x1x4")
    paths = (ROOT / "tests" / "programs" / f"{name}.hlo.xz" for name in names)
    return [lzma.decompress(path.read_bytes()).decode() for path in paths]


KINDS: tuple[Callable[[], st.SearchStrategy[Case]], ...] = (
    *(arguments, numbers, extremes, files, metrics),
    *(yaml_texts, json_texts, hlo_texts),
)
