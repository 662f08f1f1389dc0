"""What `mfu-jax tune` may choose for the trainer: its keys, and compiler flags by platform.

A choice's settings are the trainer's keys; a key that begins with ``--`` is a compiler flag.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mfu_jax.errors import UserError
from mfu_jax.hardware.chips import Chip
from mfu_jax.planning.tune.space import BATCH, SearchAxis, listed_axes
from mfu_jax.trainer.config.keys import REMAT_KEYS
from mfu_jax.trainer.config.mesh_axes import axis_keys, mesh_shape
from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.util.yaml_files import read_mapping

TOKENS = "tokens_per_step"  # of keep=: the batch and accumulation change, their product does not
ACCUMULATION = "gradient_accumulation_steps"
Choices = Mapping[str, Mapping[str, str]]

_FACTORS = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1, 1.5, 2, 3, 4, 6, 8)  # of the start's batch
_BLOCKS = (512, 1024, 2048)
_TILINGS = (1, 4, 16)
_MESH, _REMATERIALIZATION = "mesh", "remat"
_LONG = 16_384  # tokens of a sequence from which on splitting it is tried
_EIGHT_BITS = ("fp8", "fp8_e5m2", "fp8_full", "int8")


@functools.cache
def _tables() -> Mapping[str, Any]:
    """The choices of tuned_axes.yml."""
    return read_mapping(Path(__file__).with_name("tuned_axes.yml"))


def axes_of(
    config: Config,
    given: Mapping[str, str],
    *,
    platform: str,
    devices: int,
    chip: Chip | None,
    runs: bool,
    keep: Collection[str] = (),
    precisions: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> tuple[list[SearchAxis], dict[str, str]]:
    """The axes, and the keys that stay as they were given.

    Args:
        config: where the search begins.
        given: the user's keys: ``a,b`` are the choices of a key, one value is where it begins.
        platform: tpu, gpu or cpu.
        devices: how many.
        chip: their kind; None: not in the table.
        runs: whether steps are run: some choices only a run can judge.
        keep: keys that stay as they are.
        precisions: in which matmuls may be computed; empty: as it is.
        flags: compiler flags to begin with, all of which may be left out.

    Raises:
        UserError: a list of values is empty or wrong.
    """
    swept, fixed = listed_axes(given)
    listed_keys = {axis.name for axis in swept}
    parts = [flag.partition("=") for flag in flags]
    of_start = {name: text if is_set else "true" for name, is_set, text in parts}
    axes = []
    if of_start:
        axes.append(SearchAxis(name="flags", choices={"as given": of_start, "none": {}}))
    for name, choices in _standard(
        config, platform, devices, chip, runs, TOKENS in keep, precisions
    ):
        keys = {key for settings in choices.values() for key in settings}
        if name == _REMATERIALIZATION:
            keys |= {*REMAT_KEYS}  # of a policy that was given: no other takes them
        if not choices or keys & {*keep, *listed_keys, *of_start}:
            continue
        mine = {key: fixed.pop(key) for key in sorted(keys & set(fixed))}
        if axis := _axis(name, choices, _start(config, name, choices, mine, devices)):
            axes.append(axis)
        else:
            fixed |= mine
    return [*axes, *swept], fixed


def _standard(
    config: Config,
    platform: str,
    devices: int,
    chip: Chip | None,
    runs: bool,
    keeps_tokens: bool,
    precisions: Sequence[str],
) -> Iterator[tuple[str, Choices]]:
    """Every axis that this model and these devices have, by name."""
    batch = config.per_device_batch_size
    sizes = sorted({batch * factor for factor in _FACTORS if (batch * factor).is_integer()})
    yield BATCH, _single(BATCH, [f"{size:g}" for size in sizes or [batch]])
    if keeps_tokens:
        yield ACCUMULATION, _single(ACCUMULATION, ("1", "2", "4", "8"))
    tables = _tables()
    offloaded = tables["offloaded"] if platform == "tpu" else {}
    yield _REMATERIALIZATION, {**tables["remat"], **offloaded}
    known = "auto" if config.attention == "cudnn_flash" else ""  # what auto stands for
    kernels = [kernel for kernel in tables["attention"][platform] if kernel != known]
    yield "attention", _single("attention", kernels)
    if platform == "tpu" and runs:
        yield (
            "sa_block",
            {
                f"{size}{', fused' * fused}": {
                    **dict.fromkeys(tables["block_keys"], str(size)),
                    "sa_use_fused_bwd_kernel": str(fused).lower(),
                }
                for size in _BLOCKS
                if size <= config.max_target_length
                for fused in (False, True)
            },
        )
    tilings = [n for n in _TILINGS if config.max_target_length % n == 0]
    yield "num_vocab_tiling", _single("num_vocab_tiling", map(str, tilings))
    if runs or config.num_decoder_layers <= tables["few_layers"][platform]:
        yield "scan_layers", _single("scan_layers", ("true", "false"))
    if devices > 1:
        yield _MESH, dict(_meshes(config, devices))
        if platform == "tpu":
            yield "weight_gathers", _single("weight_gathers", ("first", "xla"))
    if precisions:
        yield "precision", {word: _precision(word) for word in precisions}
    for row in flags_of(platform, devices, chip):
        yield row["axis"], {"default": {}, row["choice"]: row["flags"]}
    if platform == "tpu" and chip and chip.clock_state and runs:
        name, _, value = chip.clock_state.partition("=")  # a plan's peaks are those of that clock
        yield "clock", {"default": {}, f"p-state {value}": {name: value}}


def flags_of(platform: str, devices: int, chip: Chip | None) -> Iterator[Mapping[str, Any]]:
    """The rows of `flags` in tuned_axes.yml for these devices."""
    for row in _tables()["flags"]:
        is_chips = row.get("chip", "") in (chip.name if chip else "")
        if row["platform"] == platform and is_chips and ("devices" not in row or devices > 1):
            yield row


def _single(key: str, texts: Any) -> Choices:
    return {text: {key: text} for text in texts}


def _precision(word: str) -> Mapping[str, str]:
    if word in _EIGHT_BITS:
        return {"dtype": "bfloat16", "quantization": word}
    if word in ("float32", "bfloat16", "float16"):
        return {"dtype": word, "quantization": ""}
    raise UserError(
        f"precisions={word}: expected some of float32, bfloat16, float16, {', '.join(_EIGHT_BITS)}"
    )


def _meshes(config: Config, devices: int) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Weights over all devices, and splits of them with one other axis of 2 to 8."""
    inner = [key for key in axis_keys() if not key.startswith("dcn_") and key != "pipeline"]

    def sizes(**given: int) -> tuple[str, Mapping[str, str]]:
        left = devices
        for size in given.values():
            left //= size
        all_sizes = {**dict.fromkeys(inner, 1), **given, "fsdp": left}
        settings = {key: str(size) for key, size in all_sizes.items()}
        return _split(settings), settings

    others = ["tensor", "data"]
    others += ["context_parallelism"] * (config.max_target_length >= _LONG)
    others += ["expert"] * (config.num_experts > 1)
    yield sizes()
    for axis in others:
        yield from (sizes(**{axis: size}) for size in (2, 4, 8) if devices % size == 0)


def _start(
    config: Config, name: str, choices: Choices, mine: Mapping[str, str], devices: int
) -> Mapping[str, str]:
    """The start's settings: the given keys, and the config's own of the first choice's keys."""
    first = next(iter(choices.values()))
    if name != _MESH:
        return {**{key: _own(config, key) for key in first}, **mine}
    if not mine:  # as plans have it: weights over all devices
        return first
    keys = mesh_shape(config, devices).keys
    return {key: str(keys[key]) for key in first}


def _own(config: Config, key: str) -> str:
    value = getattr(config, key)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _axis(name: str, choices: Choices, start: Mapping[str, str]) -> SearchAxis | None:
    """The axis with the start among its choices; None if there is nothing to choose."""
    for i, settings in enumerate(choices.values()):
        if dict(settings) == dict(start):
            return SearchAxis(name=name, choices=choices, start=i) if len(choices) > 1 else None
    words = [text if i == 0 else f"{key}={text}" for i, (key, text) in enumerate(start.items())]
    label = (_split(start) if name == _MESH else " ".join(filter(None, words))) or "as given"
    return SearchAxis(name=name, choices={label: start, **choices})


def _split(sizes: Mapping[str, str]) -> str:
    """The axes of a mesh that have several devices."""
    return " ".join(f"{key}={size}" for key, size in sizes.items() if size != "1")
